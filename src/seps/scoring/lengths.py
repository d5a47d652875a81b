"""Lengths of texts: checked, and cut into runs of about the same length.

Shapes: T texts, M words of the longest.
"""

from __future__ import annotations

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
    start = 0
    for position, length in enumerate(ordered):
        size = position - start
        longer = _SLACK if size < _MANY else 1.0
        wasteful = size >= min(least, limit) and length > longer * ordered[start]
        if size and (size >= limit or wasteful):
            runs.append((start, position))
            start = position
    if len(ordered) > start:
        runs.append((start, len(ordered)))
    return runs


def checked_lengths(name: str, words: Tensor, lengths: Lengths) -> list[int]:
    """Check features and lengths as the network does, a slice at a time, and return the lengths as numbers."""
    for start in range(0, max(1, words.shape[0]) if words.dim() == 3 else 1, 1024):
        check_features(f"{name}_embs", words[start : start + 1024], "texts, words, width")
    if lengths is None:
        return [words.shape[1]] * words.shape[0]
    values = torch.as_tensor(lengths).cpu() if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
    check_lengths(f"{name}_lens", values, words.shape[0], words.shape[1])
    return [int(value) for value in (values.tolist() if isinstance(lengths, Tensor) else lengths)]


def on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers as a tensor on `device`; the caller does not wait until a GPU has come to the copy."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
