"""Does dropping patches pay? The parts of `benchmarks.reid_selection`: sets, network, rows, training, statistics."""
