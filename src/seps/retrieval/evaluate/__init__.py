"""Honest evaluation: recall under a named protocol."""
