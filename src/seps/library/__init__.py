"""One person's pictures: where the store of a folder is, what a query means, duplicates, and `Library`, all of it as one object."""
