"""All pairs of images and texts without a loop over texts and without a token per pair.

What a text decides about an image is which patches are kept: D, zeros and ones. With `e_ik = exp(L_ik - c_k)`
(c_k cancels under the L2 norm) a merged patch of the pair is `u_k = sum_i D_i e_ik v_i`, so that

    word_j . u_k = ((P * D) e)_jk        P = words V^T, one product for all texts
    |u_k|^2     = D^T H_k D              H_k = diag(e_k) V V^T diag(e_k), of the image alone

H is symmetric: only its upper blocks are kept, those off the diagonal doubled. The extra token is built per pair
(one vector). With two sets merged into the same tokens (`aggregation="dual"`) each has a softmax of its own, so that
the denominators do not cancel. An image whose logits spread too far for `e` (`terms.unsafe_images`) takes the
reference: slower, same value.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.align import largest
from seps.method.encoded import EncodedImages, Kept, Texts
from seps.method.maxima import ReferenceMaxima
from seps.method.network import PatchSlimming
from seps.scoring.terms import (
    SMALLEST,
    branch_weights,
    fill_rows,
    inverse_norms,
    keeps_whole_patches,
    other_tokens,
    quadratic,
    scaled_patches,
    upper_blocks,
    weighted_gram,
    zero_dropped,
)


class GramMaxima:
    """`seps.method.maxima.Maxima` by products with e, and norms from H."""

    def __init__(self, net: PatchSlimming, images: EncodedImages, dtype: torch.dtype = torch.float32) -> None:
        self.net, self.images, self.dtype = net, images, dtype
        scaled = scaled_patches(images)
        pad = self.padding(scaled.shape[1])
        self._scaled = F.pad(scaled, (0, 0, 0, pad)) if pad else scaled
        self._decides = keeps_whole_patches(net)
        self._gram: Tensor | None = None
        self._weights: dict[int, tuple[Tensor, Any]] = {}
        self._fixed: dict[int, Tensor] = {}
        self.prepare(self._scaled)
        # (B, P, C) L2-normalised; (B, Z, C), each image scaled to a largest norm of 1.
        self.prefix = F.normalize(images.prefix.float(), dim=-1).to(dtype)
        self.patches = self._scaled.to(dtype)

    @staticmethod
    def supports(net: PatchSlimming, images: EncodedImages | None = None) -> str | None:
        """Why these are not the maxima of `net`, as part of a sentence; None when they are."""
        return other_tokens(net)

    def padding(self, count: int) -> int:
        """How many rows of zeros the products want after `count` patches."""
        return -count % (16 if self.dtype != torch.float32 else 1)

    def prepare(self, scaled: Tensor) -> None:
        """Make what a subclass needs of the scaled patches (B, Z, C) float32."""

    def __call__(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """See `Maxima`: both maxima of the merged patches, joined by those of the prefix and the extra token."""
        first = kept[0]
        if len(kept) == 1 and first.fixed:
            if first.place not in self._fixed:
                self._fixed[first.place] = self.net.tokens(self.images, kept)[0]
            return self.beside(texts, self._fixed[first.place], None)
        if not all(not one.keep.requires_grad and (self._decides or _is_binary(one.keep)) for one in kept):
            return ReferenceMaxima(self.net, self.images)(texts, kept)
        rows, columns = (self.single if len(kept) == 1 else self.dual)(texts, kept)
        extra = first.extra if len(kept) == 1 else torch.stack([one.extra for one in kept]).mean(dim=0)
        best, across = self.others(texts, extra)
        return torch.maximum(rows, best), torch.cat([columns, across], dim=-1)

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        cosines = self.word_products(texts, tokens.to(self.patches.dtype)).permute(2, 0, 1, 3)
        return largest(cosines, texts.mask, None if mask is None else mask[:, None])

    def word_products(self, texts: Texts, tokens: Tensor) -> Tensor:
        """Words of every text with tokens (B, K, C) of every image: (T, M, B, K); with the patches P = words V^T."""
        batch, count, width = tokens.shape
        flat = texts.words.to(tokens.dtype).reshape(-1, width) @ tokens.reshape(-1, width).T
        return flat.view(texts.count, -1, batch, count)

    def others(self, texts: Texts, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Both maxima over the prefix tokens and the extra token: (B, T, M) and (B, T, P + 1), float32."""
        patches = self.patches[:, : extra.shape[-1]]
        tokens = torch.bmm(extra.transpose(0, 1).to(patches.dtype), patches)
        unit = F.normalize(tokens.float(), dim=-1).to(patches.dtype)
        cosines = torch.bmm(texts.words.to(patches.dtype), unit.permute(1, 2, 0)).permute(2, 0, 1)[..., None]
        if self.prefix.shape[1]:
            cosines = torch.cat([self.word_products(texts, self.prefix).permute(2, 0, 1, 3), cosines], dim=-1)
        rows, columns = largest(cosines, texts.mask)
        return rows.float(), columns.float()

    def gram(self) -> Tensor:
        """G = V V^T (B, Z, Z) float32."""
        if self._gram is None:
            self._gram = torch.bmm(self._scaled, self._scaled.transpose(1, 2))
        return self._gram

    def weights(self, place: int) -> tuple[Tensor, Any]:
        """Of a set e (B, Z, at least Q; zeros beyond) in the products' dtype, and what its norms need; made once."""
        if place not in self._weights:
            weights = self.raw_weights(place)
            self._weights[place] = fill_rows(weights, self.dtype), self.tables(weights)
        return self._weights[place]

    def raw_weights(self, place: int) -> Tensor:
        """e of a set, (B, Z, Q) float32."""
        logits = self.images.sets[place].logits
        return branch_weights(logits, self._scaled.shape[1] - logits.shape[1], self.dtype)

    def tables(self, weights: Tensor) -> Any:
        """What the norms of a set with these e (B, Z, Q) need: H, see `upper_blocks`."""
        return upper_blocks(weights, self.gram(), self.dtype)

    def single(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """Best of each word (B, T, M) and of each merged patch (B, T, Q), with one set."""
        (one,) = kept
        keep = self.fit(one.keep)
        products = self.weighted_products(self.word_products(texts, self.patches), one.place, keep)
        return _maxima(products, self.squared_norms(one.place, keep), texts.mask)

    def dual(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """The same with two sets in each merged patch."""
        shared = self.word_products(texts, self.patches)
        keeps = [self.fit(one.keep.expand(texts.count, -1, -1)) for one in kept]
        products: list[Tensor] = []
        norms: list[Tensor] = []
        shares: list[Tensor] = []
        for one, keep in zip(kept, keeps, strict=True):
            weights = self.weights(one.place)[0][..., : self.merged(one.place)]
            share = 1 / torch.bmm(keep.transpose(0, 1).float(), weights.float()).clamp_min(SMALLEST)
            own = shared if products or torch.is_grad_enabled() else shared.clone()
            products.append(self.weighted_products(own, one.place, keep).float() * share[:, :, None])
            norms.append(self.squared_norms(one.place, keep) * share.square())
            shares.append(share)
        mixed = quadratic(keeps[0].transpose(0, 1), self.cross(), keeps[1].transpose(0, 1))
        return _maxima(products[0] + products[1], norms[0] + norms[1] + 2 * shares[0] * shares[1] * mixed, texts.mask)

    def cross(self) -> Tensor:
        """`diag(e^s_k) G diag(e^d_k)` (B, Z, Q * Z) between both sets; made once."""
        if -1 not in self._weights:
            first, second = self.raw_weights(0), self.raw_weights(1)
            self._weights[-1] = first, weighted_gram(first, self.gram(), second, self.dtype)
        table: Tensor = self._weights[-1][1]
        return table

    def merged(self, place: int) -> int:
        """Q of a set."""
        return self.images.sets[place].logits.shape[-1]

    def fit(self, keep: Tensor) -> Tensor:
        """D in the products' dtype, padded to Z: (T, B, Z)."""
        return F.pad(keep.to(self.patches.dtype), (0, self.patches.shape[1] - keep.shape[-1]))

    def weighted_products(self, products: Tensor, place: int, keep: Tensor) -> Tensor:
        """(P * D) e: (T, M, B, Z) -> (B, T, M, Q), unscaled by any norm. Overwrites P without gradients."""
        texts, words, batch, count = products.shape
        if torch.is_grad_enabled():
            masked = products * keep[:, None]
        else:
            masked = zero_dropped(products.view(texts, words, -1), keep.reshape(texts, -1))
        rows = masked.view(texts * words, batch, count).transpose(0, 1)
        return torch.bmm(rows, self.weights(place)[0]).view(batch, texts, words, -1)[..., : self.merged(place)]

    def squared_norms(self, place: int, keep: Tensor) -> Tensor:
        """D^T H_k D: (T, B, Z) -> (B, T, Q) float32."""
        by_image, tables = keep.transpose(0, 1), self.weights(place)[1]
        parts = [quadratic(by_image[..., :stop], table, by_image[..., start:stop]) for start, stop, table in tables]
        return sum(parts[1:], parts[0])


def _is_binary(keep: Tensor) -> bool:
    """Whether D is zeros and ones alone; the value is read from the device."""
    return bool(((keep == 0) | (keep == 1)).all())


def _maxima(products: Tensor, squared_norms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`max_k` (B, T, M) and `max_j` (B, T, Q) of the cosines, from (B, T, M, Q) and (B, T, Q)."""
    return largest(products.float() * inverse_norms(squared_norms)[:, :, None], mask)
