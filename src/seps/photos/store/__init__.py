"""What is stored of pictures: rows, the Lance table, its vector index and its upkeep."""
