"""Measurements, side by side in one run: `python -m benchmarks`."""
