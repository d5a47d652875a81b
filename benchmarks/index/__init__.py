"""Indexing: photos per second, and kills."""
