"""Fewer tokens for the same text or picture: means of neighbouring words, and means over a grid of patches.

Shapes: B images, N patches, M cells, L description words, W merged words, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def segment_ids(count: int, most: int) -> Tensor:
    """(count,): the segment of each word, for at most `most` segments whose lengths differ by one at most."""
    places = torch.arange(count)
    return places if count <= most else places * most // count


def mean_grid(patches_BNC: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(B, M, C): the means of the patches, which lie on `grid`, over the cells of a grid of `size`, row by row."""
    shaped = patches_BNC.float().transpose(1, 2).reshape(len(patches_BNC), -1, *grid)
    return F.adaptive_avg_pool2d(shaped, size).flatten(2).transpose(1, 2)


@torch.no_grad()
def merge_words(words_BLC: Tensor, mask_BL: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Segments of neighbouring words become their mean, at most `most` per description: (B, W, C), mask (B, W).

    Neighbours have similar vectors, and segments of equal length keep the mean of the whole. Shorter descriptions
    keep their words.
    """
    counts = mask_BL.sum(dim=1).tolist()
    width = min(most, max(counts, default=0))
    merged = words_BLC.new_zeros(len(counts), width, words_BLC.shape[-1])
    mask = torch.zeros(len(counts), width, dtype=torch.bool, device=mask_BL.device)
    for row, count in enumerate(counts):
        words = words_BLC[row][mask_BL[row]]
        if count > most:
            ids = segment_ids(count, most).to(words.device)
            words = F.normalize(torch.zeros_like(merged[row]).index_add_(0, ids, F.normalize(words, dim=-1)), dim=-1)
        merged[row, : len(words)], mask[row, : len(words)] = words, True
    return merged, mask
