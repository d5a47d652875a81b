"""What benchmarks have in common."""
