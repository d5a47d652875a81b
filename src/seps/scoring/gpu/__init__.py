"""Scoring on a GPU: the fused backend, its kernels and their launches, and those of the training step."""
