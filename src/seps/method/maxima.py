"""The seam of the score: best token of each word and best word of each token (Eq. 5), for blocks of pairs.

`PatchSlimming.score` selects, calls a `Maxima`, pools and mixes. The reference builds every token of every pair. Other
implementations (`seps.scoring`) find the same maxima without the tokens; they are right for the tokens of
`PatchSlimming.tokens` alone, and `supports` says where a network makes others.

Shapes: B images, T texts, M words, L words of a description, N patches, C width, Q merged patches, K image tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from seps.method.checks import is_compiling
from seps.method.encoded import EncodedImages, Kept, Scores, Texts
from seps.method.precision import float_matmul

if TYPE_CHECKING:
    from seps.method.network import PatchSlimming

_VALUES = 2**22
"""Merge weights of pairs that the reference makes at once."""


class Maxima(Protocol):
    """Made for some images of a network, it meets one block of texts after another."""

    @staticmethod
    def supports(net: PatchSlimming, images: EncodedImages | None = None) -> str | None:
        """Why these maxima are not those of `net` (and of these images), as part of a sentence; None when they are."""

    def __call__(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """Best token of each word (B, T, M) and best word of each token (B, T, K), float32, in any order of tokens.

        `kept` holds one set of patches, or the two that are merged into the same tokens.
        """

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same for tokens (B, L, C) of the images alone, L2-normalised; `mask` (B, L) is True at tokens."""


@dataclass(eq=False)
class ReferenceMaxima:
    """Builds every token of every pair."""

    net: PatchSlimming
    images: EncodedImages

    @staticmethod
    def supports(net: PatchSlimming, images: EncodedImages | None = None) -> str | None:
        """None: it calls the network for the tokens, whatever they are."""
        return None

    def __call__(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        tokens = self.net.tokens(self.images, kept)  # (T or 1, B, K, C)
        if kept[0].fixed:
            return self.beside(texts, tokens[0], None)  # (B, T, M), (B, T, K)
        if texts.words.dim() == 4:
            cosines = float_matmul(texts.words, tokens.transpose(-1, -2)).transpose(0, 1)  # (B, T, M, K)
        else:
            flat = float_matmul(texts.words, tokens.flatten(1, 2).transpose(1, 2))  # (T, M, B * K)
            cosines = flat.view(*flat.shape[:2], *tokens.shape[1:3]).permute(2, 0, 1, 3)  # (B, T, M, K)
        return self.net.hrpa.maxima(cosines, texts.word_mask)

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Maxima`; the tokens (B, L, C) are the same for every text."""
        words = texts.words.transpose(0, 1) if texts.words.dim() == 4 else texts.words[None]  # (B or 1, T, M, C)
        flat = float_matmul(words.flatten(1, 2), tokens.transpose(1, 2))  # (B, T * M, L)
        cosines = flat.view(flat.shape[0], *words.shape[1:3], flat.shape[2])  # (B, T, M, L)
        token_mask = None if mask is None else mask[:, None]  # (B, 1, L)
        return self.net.hrpa.maxima(cosines, texts.word_mask, token_mask)


def reference_scores(net: PatchSlimming, images: EncodedImages, texts: Texts) -> Scores:
    """Scores of all pairs by the reference, some texts at a time."""
    (batch, count), total = images.patches.shape[:2], texts.words.shape[0]
    if is_compiling():
        return net.score(images, texts)
    if not batch or not total:
        nothing = images.pooled.new_zeros(batch, total)  # (B, T)
        return Scores(nothing, masks=tuple(images.pooled.new_zeros(total, batch, count) for _ in images.sets))
    step = max(1, _VALUES // images.sets[0].logits.numel())
    if total <= step:
        return net.score(images, texts)
    return joined([net.score(images, texts.part(i, i + step)) for i in range(0, total, step)])


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of some texts beside those of the next."""
    if len(parts) == 1:
        return parts[0]
    whole = Scores(torch.cat([part.similarity for part in parts], dim=1), described=parts[0].described)
    for name in ("pixels", "description"):
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        setattr(whole, name, torch.cat(values, dim=1) if values else None)
    whole.masks = tuple(torch.cat(masks) for masks in zip(*(part.masks for part in parts), strict=True))
    return whole
