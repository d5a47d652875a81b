"""Captions sorted by length and cut into blocks, so that short ones never pay for long ones.

Shapes: T texts, M words of the longest in a block, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn.checks import InputError, check_features, check_lengths
from seps.nn.guidance import masked_mean

_SLACK = 1.13
_MANY = 512
"""Texts that fill a device on their own: from there on a block holds one length alone."""


@dataclass
class PackedWords:
    """The words of a block one after the other, without padding: (W, C), their texts (W,) and places in T * M (W,)."""

    words: Tensor
    texts: Tensor
    places: Tensor


@dataclass
class TextBlock:
    """Texts of about the same length, ready for the products."""

    index: Tensor
    """(T,) their positions among all texts."""
    words: Tensor
    """(T, M, C) L2-normalised words, zero at padding; float32, or the products' dtype without gradients."""
    mask: Tensor | None
    """(T, M) bool, True at words; None when no text is padded."""
    mean: Tensor
    """(T, C) L2-normalised mean word, float32."""
    lengths: Tensor
    """(T,) int32 words of each."""
    paired: TextBlock | None = None
    """The dense texts that come with the captions in the published pairing."""
    packed: PackedWords | None = None
    """On the CPU, where texts of several lengths stand in one block, and without gradients."""

    @property
    def count(self) -> int:
        """T."""
        return self.words.shape[0]

    def part(self, start: int, stop: int) -> TextBlock:
        """Texts `start` to `stop` of the block."""
        return TextBlock(
            self.index[start:stop],
            self.words[start:stop],
            None if self.mask is None else self.mask[start:stop],
            self.mean[start:stop],
            self.lengths[start:stop],
            None if self.paired is None else self.paired.part(start, stop),
        )


def cut_by_length(ordered: Sequence[int], limit: int, least: int = 64) -> list[tuple[int, int]]:
    """Cut lengths in rising order into runs (start, stop) of at most `limit` texts and little padding.

    A run of fewer than `least` texts is cut for `limit` alone: small products cost more than some padding.
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


class Texts:
    """All captions of a call, served in blocks.

    Args:
        words: (T, M, C) word features.
        lengths: (T,) valid words of each; None when all are.
        dtype: the network's dtype, which the features take first.
        products: the dtype that normalised words are kept in.
        paired, paired_lengths: the dense texts of the published pairing, one per caption.
        by_paired: sort by the paired texts' lengths, where those cost more.
    """

    def __init__(
        self,
        words: Tensor,
        lengths: Tensor | Sequence[int] | None,
        *,
        dtype: torch.dtype,
        products: torch.dtype = torch.float32,
        paired: Tensor | None = None,
        paired_lengths: Tensor | Sequence[int] | None = None,
        by_paired: bool = False,
    ) -> None:
        self.words, self.lengths = words, _checked_lengths("cap", words, lengths)
        self.dtype, self.products = dtype, products
        self.paired = paired
        self.paired_lengths: list[int] = []
        if paired is not None:
            if paired.shape[0] != words.shape[0]:
                raise InputError(
                    f"paired_dense holds {paired.shape[0]} texts for {words.shape[0]} captions; the published "
                    "pairing needs one each."
                )
            self.paired_lengths = _checked_lengths("paired_dense", paired, paired_lengths)
        key = self.paired_lengths if by_paired and paired is not None else self.lengths
        self._order = sorted(range(len(key)), key=key.__getitem__)
        self._ordered = [key[i] for i in self._order]
        self._index = torch.tensor(self._order, dtype=torch.long, device=words.device)
        self._back = torch.argsort(self._index)
        # On the device once: a copy for each block would make it wait.
        self._counts = torch.tensor(self.lengths, dtype=torch.int32).to(words.device)[self._index]
        self._paired_counts = self._counts
        if paired is not None:
            self._paired_counts = torch.tensor(self.paired_lengths, dtype=torch.int32).to(words.device)[self._index]
        self._kept: dict[tuple[int, int], TextBlock] | None = None
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @property
    def count(self) -> int:
        """T."""
        return len(self._order)

    @property
    def longest(self) -> int:
        """Words of the longest caption."""
        return max(self.lengths, default=1)

    @property
    def longest_paired(self) -> int:
        """Words of the longest paired dense text, 0 without any."""
        return max(self.paired_lengths, default=0)

    @property
    def unit_nbytes(self) -> int:
        """Bytes that all normalised words take at once."""
        copies = 1 if self.words.is_cuda else 2
        return copies * self.products.itemsize * self.words.shape[-1] * (sum(self.lengths) + sum(self.paired_lengths))

    def keep_blocks(self) -> None:
        """Make each block once and keep it, for texts that many images meet."""
        if self._kept is None:
            self._kept = {}

    def runs(self, limit: int, least: int = 64) -> list[tuple[int, int]]:
        """Runs of the sorted texts, at most `limit` each; see `cut_by_length`."""
        # Every block of images asks: cutting 25,000 texts again would leave a GPU idle for some milliseconds.
        if (limit, least) not in self._runs:
            self._runs[limit, least] = cut_by_length(self._ordered, limit, least)
        return self._runs[limit, least]

    def restore(self, rows: Tensor) -> Tensor:
        """Columns of the sorted texts, (B, T), in the caller's order."""
        return rows.index_select(1, self._back)

    def block(self, start: int, stop: int) -> TextBlock:
        """The block of sorted texts `start` to `stop`."""
        if self._kept is not None and (start, stop) in self._kept:
            return self._kept[start, stop]
        chosen, part = self._order[start:stop], slice(start, stop)
        block = self._make(self.words, part, self._counts, [self.lengths[i] for i in chosen])
        if self.paired is not None:
            lengths = [self.paired_lengths[i] for i in chosen]
            block.paired = self._make(self.paired, part, self._paired_counts, lengths)
        if self._kept is not None:
            self._kept[start, stop] = block
        return block

    def _make(self, features: Tensor, part: slice, counts: Tensor, lengths: list[int]) -> TextBlock:
        # A copy starts at a full address, for which kernels are made once.
        index, counts = self._index[part], counts[part].clone()
        longest = max(lengths)
        words = features[:, :longest].index_select(0, index).to(self.dtype)
        mask = None
        if min(lengths) < longest:
            mask = torch.arange(longest, device=words.device)[None, :] < counts[:, None]
        unit = F.normalize(words.float(), dim=-1)
        if mask is not None:
            unit = unit.masked_fill(~mask[..., None], 0.0)
        mean = F.normalize(masked_mean(words, mask), dim=-1)
        block = TextBlock(index, unit.to(self.products), mask, mean, counts)
        if mask is not None and self.products == torch.float32 and not (words.is_cuda or torch.is_grad_enabled()):
            places = torch.nonzero(mask.flatten()).squeeze(-1)
            block.packed = PackedWords(unit.flatten(0, 1).index_select(0, places), places // longest, places)
        return block


def _checked_lengths(name: str, words: Tensor, lengths: Tensor | Sequence[int] | None) -> list[int]:
    """Check features and lengths as the network does, a slice at a time, and return the lengths as numbers."""
    for start in range(0, max(1, words.shape[0]) if words.dim() == 3 else 1, 1024):
        check_features(f"{name}_embs", words[start : start + 1024], "texts, words, width")
    if lengths is None:
        return [words.shape[1]] * words.shape[0]
    values = torch.as_tensor(lengths).cpu()
    check_lengths(f"{name}_lens", values, words.shape[0], words.shape[1])
    numbers: list[int] = values.tolist()
    return numbers
