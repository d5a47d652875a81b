"""From a folder of pictures to a store, and from a query to its pictures."""
