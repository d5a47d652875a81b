"""A person's pictures as one object: the store of a folder, the meaning of a query, duplicates, and `Library`."""
