"""Which pictures of a store are near-duplicates of one another."""
