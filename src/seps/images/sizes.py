"""Sizes at which pictures are kept."""

from __future__ import annotations


def stored_size(size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) at which training keeps photos for a model of `size`: 8/7 of it, so that crops keep detail."""
    return size[0] * 8 // 7, size[1] * 8 // 7
