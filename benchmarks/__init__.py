"""What guards the figures of the pages, in rooms: `python -m benchmarks list`."""
