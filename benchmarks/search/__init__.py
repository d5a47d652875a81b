"""Searching: one query, large stores, the service."""
