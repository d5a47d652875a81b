"""What `tools/identity.py` records: one file per area, each probe a function that returns numbers and text."""
