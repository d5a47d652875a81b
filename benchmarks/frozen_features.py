"""Features of a data set, encoded once and kept: what `benchmarks.frozen_rows` trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.word_weights import encode
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.eval.evaluate import encode_images
from seps.retrieval.index.embedding import half_copy
from seps.retrieval.model import RetrievalModel

SIDE = 8
"""Patches are merged into a grid of SIDE x SIDE means."""


@dataclass
class Texts:
    """T texts: words (T, M, C), mask (T, M), stop words (T, M), rarity in the training captions (T, M)."""

    words: Tensor
    mask: Tensor
    stop: Tensor
    idf: Tensor

    def take(self, rows: Tensor) -> Texts:
        longest = int(self.mask[rows].sum(dim=1).max())
        words, *rest = (part[rows, :longest] for part in (self.words, self.mask, self.stop, self.idf))
        return Texts(words.float(), *rest)


@dataclass
class Frozen:
    """A data set as features."""

    name: str
    tokens: Tensor
    captions: Texts
    owner: Tensor
    dense: Texts

    def photos(self, rows: Tensor) -> Frozen:
        """The same of some photos, which come with all their captions."""
        asked = torch.cat([(self.owner == row).nonzero()[:, 0] for row in rows])
        counts = torch.bincount(self.owner, minlength=len(self.tokens))[rows]
        owner = torch.arange(len(rows)).repeat_interleave(counts)
        return Frozen(self.name, self.tokens[rows], self.captions.take(asked), owner, self.dense.take(rows))


def pooled_grid(tokens: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """Patches merged into SIDE x SIDE means: (B, P + N, C) -> (B, P + SIDE^2, C)."""
    shaped = tokens[:, prefix:].transpose(1, 2).unflatten(2, grid)
    merged = F.adaptive_avg_pool2d(shaped, (SIDE, SIDE)).flatten(2).transpose(1, 2)
    return torch.cat([tokens[:, :prefix], merged], dim=1)


def freeze_set(model: RetrievalModel, data: RetrievalDataset, name: str, idf: Tensor, tokens: Tensor | None) -> Frozen:
    """Features of a data set; `tokens` (B, P + N, C) may have been encoded before."""
    captions = [caption for record in data.records for caption in record.captions]
    owner = torch.tensor([row for row, record in enumerate(data.records) for _ in record.captions])
    found = [
        encode(model, captions, model.config.max_words),
        encode(model, [str(record.dense) for record in data.records], model.config.max_dense_words),
    ]
    texts = [Texts(words.words.half(), words.mask, words.stop, idf[words.ids]) for words in found]
    if tokens is None:
        vision, plain = half_copy(model), model.encode_pixels
        model.encode_pixels = lambda pixels, vision=vision: plain(pixels, vision)  # type: ignore[method-assign]
        tokens = encode_images(model, data)
        model.encode_pixels = plain  # type: ignore[method-assign]
    tokens = tokens[: len(data.records)].float()
    if tokens.shape[1] - model.vision.num_prefix_tokens != SIDE**2:
        tokens = pooled_grid(tokens, model.vision.num_prefix_tokens, model.vision.grid)
    return Frozen(name, tokens.half(), texts[0], owner, texts[1])


def packed(one: Frozen) -> dict[str, object]:
    """As plain values, which torch.load reads without running anything."""
    return {**vars(one), "captions": vars(one.captions), "dense": vars(one.dense)}


def unpacked(values: dict[str, Any]) -> Frozen:
    return Frozen(**{**values, "captions": Texts(**values["captions"]), "dense": Texts(**values["dense"])})
