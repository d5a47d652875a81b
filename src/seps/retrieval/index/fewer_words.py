"""Descriptions in fewer words: runs of neighbouring words become their mean.

Neighbours mean much the same to a text encoder, and runs of equal length leave the mean of the whole as it was.

Shapes: B descriptions, L words, C width, W words that are left.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def run_of_word(count: int, most: int) -> Tensor:
    """(count,): the run that each word is in, of at most `most` whose lengths differ by one at most."""
    places = torch.arange(count)
    return places if count <= most else places * most // count


@torch.no_grad()
def merge_words(words_BLC: Tensor, mask_BL: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most `most` words a description: (B, W, C), and mask (B, W). Short descriptions keep their words."""
    counts = mask_BL.sum(dim=1).tolist()
    width = min(most, max(counts, default=0))
    merged = words_BLC.new_zeros(len(counts), width, words_BLC.shape[-1])
    mask = torch.zeros(len(counts), width, dtype=torch.bool, device=mask_BL.device)
    for row, count in enumerate(counts):
        words = words_BLC[row][mask_BL[row]]
        if count > most:
            runs = run_of_word(count, most).to(words.device)
            words = F.normalize(torch.zeros_like(merged[row]).index_add_(0, runs, F.normalize(words, dim=-1)), dim=-1)
        merged[row, : len(words)], mask[row, : len(words)] = words, True
    return merged, mask
