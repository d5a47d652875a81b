"""One person's pictures: the store of a folder, the meaning of a query, duplicates, and `Library` over all of it."""
