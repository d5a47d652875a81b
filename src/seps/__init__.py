"""Semantic-Enhanced Patch Slimming (arXiv 2511.01390)."""

__version__ = "0.1.0"
