"""From a query over a store to its pictures."""
