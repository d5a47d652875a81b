"""Lengths of texts: checked, and cut into runs of about the same length.

Shapes: T texts, M words of the longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from seps.nn.checks import check_features, check_lengths

Lengths = Tensor | Sequence[int] | None

_SLACK = 1.13
_MANY = 512
"""Texts that fill a device on their own: from there on a block holds one length alone."""


def cut_by_length(ordered: Sequence[int], limit: int, least: int = 64) -> list[tuple[int, int]]:
    """Cut lengths in rising order into runs (start, stop) of at most `limit` texts and little padding.

    A run of fewer than `least` texts ends at `limit` only: small products cost more than some padding.
    """
    runs: list[tuple[int, int]] = []
    start, some = 0, max(1, min(least, limit))
    while start < len(ordered):
        # Where the lengths begin that waste too much beside the first, of few texts and of many.
        wasteful = max(start + some, bisect_right(ordered, _SLACK * ordered[start], start))
        if wasteful - start >= _MANY:
            wasteful = max(start + some, start + _MANY, bisect_right(ordered, ordered[start], start))
        stop = min(start + limit, wasteful, len(ordered))
        runs.append((start, stop))
        start = stop
    return runs


def checked_lengths(name: str, words: Tensor, lengths: Lengths) -> list[int]:
    """Check features and lengths as the network does, a slice at a time, and return the lengths as numbers."""
    count = max(1, words.shape[0]) if words.dim() == 3 else 1
    # Each slice makes the caller wait for a GPU, and fits the cache of a CPU.
    step = count if words.is_cuda else 1024
    for start in range(0, count, step):
        check_features(f"{name}_embs", words[start : start + step], "texts, words, width")
    if lengths is None:
        return [words.shape[1]] * words.shape[0]
    values = torch.as_tensor(lengths).cpu() if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
    check_lengths(f"{name}_lens", values, words.shape[0], words.shape[1])
    return values.tolist() if isinstance(lengths, Tensor) else [int(value) for value in lengths]


def on_device(values: Tensor | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers on the CPU as a tensor on `device`; the caller does not wait until a GPU has come to the copy."""
    made = values.to(dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
