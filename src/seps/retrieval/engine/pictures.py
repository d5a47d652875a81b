"""Pictures and queries as the engines score them.

Shapes: B images, T texts, P prefix tokens, N patches, M stored patches, L description words, C width, E width of the
description's words.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.encoded import map_tensors
from seps.method.score import masked_mean
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.scoring.own_texts import TextPool

if TYPE_CHECKING:
    from seps.retrieval.engine.layout import PatchLayout


@dataclass
class Queries:
    """Encoded queries: sentences, or pictures that others are searched by."""

    words: TextFeatures | None
    """(T, M, E), by which patches and descriptions are scored; None: descriptions take no part."""
    vectors: Tensor | None = None
    """(T, C) of length one, by which the vectors of pictures are scored; None: pictures have no such vectors."""

    def __len__(self) -> int:
        if self.vectors is not None:
            return len(self.vectors)
        return 0 if self.words is None else len(self.words.words)

    @property
    def text_features(self) -> TextFeatures:
        """Their words. Raises ValueError where they have none."""
        if self.words is None:
            raise ValueError("These queries have no words.")
        return self.words

    @functools.cached_property
    def pool(self) -> TextPool:
        """The words, prepared once for pictures that are scored with queries of their own."""
        return TextPool(self.text_features.words, self.text_features.mask)

    def rows(self, rows: Tensor | slice) -> Queries:
        """Some of them, without padding that none of them needs."""
        words = None
        if self.words is not None:
            mask = self.words.mask[rows]
            longest = int(mask.sum(dim=1).max())
            words = TextFeatures(self.words.words[:, :longest][rows], mask[:, :longest])
        return Queries(words, None if self.vectors is None else self.vectors[rows])

    def to(self, device: torch.device | str) -> Queries:
        """The same on another device."""
        moved: Queries = map_tensors(self, lambda tensor: tensor.to(device))
        return moved

    def packed(self) -> Queries:
        """The same, without padding in memory."""
        if self.words is None:
            return self
        return PackedQueries(self.tensors(), F.normalize(masked_mean(self.words.words, self.words.mask), dim=-1))

    def tensors(self) -> dict[str, Tensor]:
        """Plain tensors without padding."""
        values = {} if self.vectors is None else {"vectors": self.vectors}
        if self.words is not None:
            values |= {"words": self.words.words[self.words.mask], "counts": self.words.mask.sum(dim=1)}
        return values

    @classmethod
    def of_tensors(cls, values: Mapping[str, Tensor]) -> Queries:
        """What `tensors` gave."""
        words = None
        if "counts" in values:
            counts = values["counts"]
            mask = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]
            padded = torch.zeros(*mask.shape, values["words"].shape[1], device=counts.device)
            padded[mask] = values["words"]
            words = TextFeatures(padded, mask)
        return cls(words, values.get("vectors"))


class PackedQueries(Queries):
    """Many queries with words, which are padded only when they are asked for.

    `values` are those of `Queries.tensors`, `means` (T, E) their normalised mean words.
    """

    def __init__(self, values: Mapping[str, Tensor], means: Tensor) -> None:
        self.values, self.means = dict(values), means

    @functools.cached_property
    def pool(self) -> TextPool:
        """See `Queries`."""
        return TextPool.packed(self.values["words"], self.values["counts"], self.means)

    def __len__(self) -> int:
        return len(self.values["counts"])

    @property
    def words(self) -> TextFeatures | None:  # type: ignore[override]
        """See `Queries`."""
        return Queries.of_tensors(self.values).words

    @property
    def vectors(self) -> Tensor | None:  # type: ignore[override]
        """See `Queries`."""
        return self.values.get("vectors")

    def tensors(self) -> dict[str, Tensor]:
        """See `Queries`."""
        return dict(self.values)

    def to(self, device: torch.device | str) -> Queries:
        """See `Queries`."""
        return PackedQueries({name: value.to(device) for name, value in self.values.items()}, self.means.to(device))


@dataclass
class PatchPictures:
    """Pictures with their patches, as a model of ours scores them."""

    features: ImageFeatures
    num_prefix_tokens: int
    layout: PatchLayout | None = None
    """How the store keeps them that they were read from; None: they come from the encoder."""
    positions: Tensor | None = None
    """(B, M) which patches the tokens are; None: all, or the cells of a grid of means, in order."""

    def __len__(self) -> int:
        return len(self.features.tokens)

    def rows(self, start: int, stop: int) -> PatchPictures:
        """Images `start` to `stop`."""
        cut = itemgetter(slice(start, stop))
        positions = None if self.positions is None else cut(self.positions)
        return replace(self, features=self.features.rows(start, stop), positions=positions)

    def without_descriptions(self) -> PatchPictures:
        """The same images, their pixels (and guides) alone."""
        own = self.features
        return replace(self, features=ImageFeatures(own.tokens, guides=own.guides, mean=own.mean))

    def as_queries(self) -> Queries:
        """Their patches as the words of queries."""
        patches = self.features.tokens[:, self.num_prefix_tokens :]
        mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        return Queries(TextFeatures(patches, mask))

    @property
    def described(self) -> Tensor:
        """(B,) bool, on the CPU."""
        mask = self.features.dense_mask
        return torch.zeros(len(self), dtype=torch.bool) if mask is None else mask.any(dim=1).cpu()


@dataclass
class VectorPictures:
    """Pictures of one vector each, and the words of their descriptions."""

    vectors: Tensor
    """(B, C) of length one."""
    words: Tensor
    """(B, L, E)."""
    mask: Tensor
    """(B, L) bool."""

    def __len__(self) -> int:
        return len(self.vectors)

    def rows(self, start: int, stop: int) -> VectorPictures:
        """Images `start` to `stop`."""
        part: VectorPictures = map_tensors(self, itemgetter(slice(start, stop)))
        return part

    def without_descriptions(self) -> VectorPictures:
        """The same images, their pixels alone."""
        return replace(self, words=self.words[:, :0], mask=self.mask[:, :0])

    def as_queries(self) -> Queries:
        """Their vectors as those of queries; descriptions take no part."""
        return Queries(None, self.vectors)

    @property
    def described(self) -> Tensor:
        """(B,) bool, on the CPU."""
        return self.mask.any(dim=1).cpu()
