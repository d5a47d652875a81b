"""Pictures as the engines score them.

Shapes: B images, P prefix tokens, N patches, M stored patches, L description words, C width, E width of the
description's words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seps.method.encoded import map_tensors
from seps.retrieval.engine.queries import Queries
from seps.retrieval.heads import ImageFeatures, TextFeatures

if TYPE_CHECKING:
    from seps.retrieval.engine.layout import PatchLayout


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
