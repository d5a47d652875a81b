"""What passes between the steps of the score: encoded images, texts, the decision about both, and scores.

Shapes: B images, T texts, P prefix tokens, N patches, M words, L words of a description, C width, Q merged patches,
R texts of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import is_compiling
from seps.method.precision import strict_float32, without_autocast
from seps.method.score import masked_mean


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting of tuples, lists, mappings and dataclasses with `function` applied to every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    again = partial(map_tensors, function=function)
    if isinstance(batch, Mapping):
        return dict(zip(batch, map(again, batch.values()), strict=True))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(again, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(again, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: a batch already checked at construction need not be checked at each move.
        copy = object.__new__(type(batch))
        for part in fields(batch):
            object.__setattr__(copy, part.name, again(getattr(batch, part.name)))
        return copy
    return batch


@dataclass
class PatchSet:
    """One selection of an image's patches: the part of its scores that no text changes, and its merge logits."""

    fixed: Tensor
    """(B, N): `w_p s^p` and all guides but those that come with a text (Eq. 3)."""
    logits: Tensor
    """(B, N, Q) aggregation logits L (Eq. 4)."""


@dataclass
class EncodedImages:
    """The part of the score of B images that is the same for every text; `encode_images` computes it once."""

    prefix: Tensor
    """(B, P, C) prefix tokens such as CLS."""
    patches: Tensor
    """(B, N, C) spatial patches."""
    valid: Tensor | None
    """(B, N) bool: patches that are not padding; None when all are."""
    sets: tuple[PatchSet, ...]
    """The caption's set and, with `aggregation="dual"` or `dense="branch"`, the description's."""
    full_score: Tensor
    """(B, 1): the sum of Eq. 3's weights over the guides this image has, the scale of a learned threshold."""
    pooled: Tensor
    """(B, C) L2-normalised mean patch."""
    dense_words: Tensor | None = None
    """(B, L, C) L2-normalised words of the description, where they are tokens of the image."""
    dense_mask: Tensor | None = None
    """(B, L) bool: valid words of the description. None: no description came with the images."""
    described: Tensor | None = None
    """(B,) bool: images that have a description; None where no description came with the images."""
    attentions: dict[str, Tensor] = field(default_factory=dict)
    """By guide: (B, N) cosines, where a custom scoring needs them with each text; empty elsewhere."""

    def text_attention(self, means: Tensor) -> Tensor:
        """`a_i = cos(v_i, E_t)` of every text (Eq. 2), float32 and without gradient: (T, B, N).

        `means` are L2-normalised: (T, C), or (T, B, C) with texts of its own for each image. Equal patches get equal
        values, which the rule for ties needs.
        """
        batch, count, width = self.patches.shape
        unit: Tensor | None = getattr(self, "_unit_patches", None)  # of earlier texts
        if unit is None:
            unit = self._unit_patches = F.normalize(self.patches.detach().float(), dim=-1)  # (B, N, C)
        on_gpu = self.patches.is_cuda and not is_compiling()
        with torch.no_grad(), without_autocast(self.patches), strict_float32() if on_gpu else nullcontext():
            if means.dim() == 3:
                return torch.bmm(unit, means.permute(1, 2, 0)).permute(2, 0, 1).contiguous()  # (T, B, N)
            flat = unit.reshape(-1, width)  # (B * N, C)
            if flat.is_cuda:
                return (means @ flat.T).view(-1, batch, count)
            if not is_compiling() and means.shape[0] == 1:
                return (unit * means[:, None]).sum(dim=-1)[None]  # (1, B, N)
            # On a CPU edge columns take another order of summation, edge rows do not: patches are the rows.
            return (flat @ means.T).T.contiguous().view(-1, batch, count)  # (T, B, N)


@dataclass
class Texts:
    """Texts as the score needs them: each for all images, or (T, B, ...) with texts of its own for each image."""

    words: Tensor
    """(T, M, C) or (T, B, M, C): L2-normalised words, float32 or the dtype of the products."""
    mask: Tensor | None
    """(T, M) or (T, B, M) bool, True at words; None when no text is padded."""
    mean: Tensor
    """(T, C) or (T, B, C): L2-normalised mean word, float32."""
    description: Texts | None = field(default=None, kw_only=True)
    """The published pairing alone: the description that comes with each text."""

    @classmethod
    def of(cls, words: Tensor, mask: Tensor | None = None, description: Texts | None = None) -> Texts:
        """Texts from word features (T, M, C), or (T, B, M, C), and their masks."""
        flat = words.flatten(0, -3)  # (R, M, C)
        mean = masked_mean(flat, None if mask is None else mask.flatten(0, -2))  # (R, C)
        mean = F.normalize(mean, dim=-1).view(*words.shape[:-2], words.shape[-1])  # (..., C)
        return cls(F.normalize(words.float(), dim=-1), mask, mean, description=description)

    @property
    def count(self) -> int:
        """T."""
        return self.words.shape[0]

    @property
    def guides(self) -> dict[str, Tensor]:
        """The mean words that guide the selection, by the name of the guide: each (T, C) or (T, B, C)."""
        return {"caption": self.mean, **({} if self.description is None else {"dense": self.description.mean})}

    @property
    def word_mask(self) -> Tensor | None:
        """The mask beside the maxima (B, T, M) of all pairs: (T, M) or (B, T, M)."""
        return self.mask if self.mask is None or self.mask.dim() == 2 else self.mask.transpose(0, 1)

    def part(self, start: int, stop: int) -> Texts:
        """Texts `start` to `stop`."""
        part: Texts = map_tensors(self, itemgetter(slice(start, stop)))
        return part


@dataclass
class Kept:
    """The decision about one set of patches: (T, B, N) each, or (1, B, N) where no text changes it."""

    scores: Tensor
    """s of Eq. 3."""
    keep: Tensor
    """D: 1 at the kept patches, 0 elsewhere."""
    extra: Tensor
    """Weights of the dropped patches in the extra token; they sum to 1, or to 0 where none is dropped."""
    place: int = 0
    """Of the set among `EncodedImages.sets`."""
    fixed: bool = False
    """Whether no text changes it, so that the tokens are those of the image alone."""


@dataclass
class Scores:
    """Similarities (B, T), the parts they are made of, and the decisions."""

    similarity: Tensor
    pixels: Tensor | None = None
    """(B, T) S of the patches alone."""
    description: Tensor | None = None
    """(B, T) S of the description alone; rows of images without one (`described`) are computed on padding."""
    described: Tensor | None = None
    """(B,) bool; None where no description came with the images, or every image has one."""
    masks: tuple[Tensor, ...] = ()
    """D of each set, (T, B, N)."""
