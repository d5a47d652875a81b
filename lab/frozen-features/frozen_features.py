"""Features of a data set, encoded once and kept: what `benchmarks.frozen_rows` trains on."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.word_weights import encode
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.data.images import decode_all
from seps.retrieval.index.embedding import half_copy
from seps.retrieval.model import RetrievalModel

SIDE = 8
"""Patches are merged into a grid of SIDE x SIDE means, unless another side is asked for."""
OBJECTS = Path(__file__).with_name("objects.txt").read_text(encoding="utf-8").split()
"""Things that a caption names and another caption could name in their place."""


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
    swapped: Texts | None
    """The captions with one object swapped for another; a caption without one as it is."""
    dense: Texts

    def photos(self, rows: Tensor) -> Frozen:
        """The same of some photos, which come with all their captions."""
        asked = torch.cat([(self.owner == row).nonzero()[:, 0] for row in rows])
        counts = torch.bincount(self.owner, minlength=len(self.tokens))[rows]
        owner = torch.arange(len(rows)).repeat_interleave(counts)
        swapped = None if self.swapped is None else self.swapped.take(asked)
        return Frozen(self.name, self.tokens[rows], self.captions.take(asked), owner, swapped, self.dense.take(rows))


def pooled_grid(tokens: Tensor, prefix: int, side: int = SIDE) -> Tensor:
    """Patches of a square image merged into side x side means: (B, P + N, C) -> (B, P + side^2, C)."""
    grid = round((tokens.shape[1] - prefix) ** 0.5)
    shaped = tokens[:, prefix:].transpose(1, 2).unflatten(2, (grid, grid))
    merged = F.adaptive_avg_pool2d(shaped, (side, side)).flatten(2).transpose(1, 2)
    return torch.cat([tokens[:, :prefix], merged], dim=1)


def swap_object(caption: str, seed: int) -> str:
    """The caption with one of its objects, drawn at random, swapped for another; as it is where it names none."""
    draw = random.Random(seed)
    found = [match for match in re.finditer(r"[a-z]+", caption) if match[0] in OBJECTS]
    if not found:
        return caption
    one = draw.choice(found)
    other = draw.choice([word for word in OBJECTS if word != one[0]])
    return caption[: one.start()] + other + caption[one.end() :]


@torch.no_grad()
def encode_at(model: RetrievalModel, data: RetrievalDataset, size: int) -> Tensor:
    """Tokens (B, P + N, C) of the photos at size x size px, the encoder in bfloat16; its positions are resized."""
    vision, pixels = half_copy(model), decode_all(data, (size, size))
    return torch.cat([model.encode_pixels(part.float() / 255, vision).half() for part in pixels.split(4)])


def _texts(model: RetrievalModel, texts: list[str], limit: int, idf: Tensor) -> Texts:
    words = encode(model, texts, limit)
    return Texts(words.words.half(), words.mask, words.stop, idf[words.ids])


def _captions(model: RetrievalModel, data: RetrievalDataset, idf: Tensor) -> tuple[Texts, Tensor, Texts]:
    """Captions of all photos, whose they are, and the same captions with one object swapped."""
    swapped = [swap_object(caption, row) for row, caption in enumerate(data.captions)]
    own, others = (_texts(model, texts, model.config.max_words, idf) for texts in (data.captions, swapped))
    return own, torch.as_tensor(data.image_of_caption), others


def with_captions(frozen: Frozen, model: RetrievalModel, data: RetrievalDataset, idf: Tensor) -> Frozen:
    """The same photos and descriptions with the captions of `data`. Raises ValueError where its photos are others."""
    if len(data) != len(frozen.tokens):
        raise ValueError(f"{data.label} has {len(data)} photos, {frozen.name} has {len(frozen.tokens)}.")
    captions, owner, swapped = _captions(model, data, idf)
    return replace(frozen, captions=captions, owner=owner, swapped=swapped)


def freeze_set(
    model: RetrievalModel,
    data: RetrievalDataset,
    name: str,
    idf: Tensor,
    tokens: Tensor | None,
    *,
    side: int = SIDE,
    size: int | None = None,
) -> Frozen:
    """Features of a data set; `tokens` (B, P + N, C) may have been encoded before. `size`: of the photos, in px."""
    dense = _texts(model, [str(record.dense) for record in data.records], model.config.max_dense_words, idf)
    if tokens is None:
        tokens = encode_at(model, data, size or model.image_size[0])
    tokens = tokens[: len(data.records)].float()
    if tokens.shape[1] - model.vision.num_prefix_tokens != side**2:
        tokens = pooled_grid(tokens, model.vision.num_prefix_tokens, side)
    return Frozen(name, tokens.half(), *_captions(model, data, idf), dense=dense)


def packed(one: Frozen) -> dict[str, object]:
    """As plain values, which torch.load reads without running anything."""
    texts = {name: vars(value) for name, value in vars(one).items() if isinstance(value, Texts)}
    return {**vars(one), **texts}


def unpacked(values: dict[str, Any]) -> Frozen:
    texts = {name: Texts(**value) for name, value in values.items() if isinstance(value, dict)}
    return Frozen(**{**values, **texts})
