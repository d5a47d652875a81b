"""The tables of docs/performance.md, made from the raw files in docs/results."""
