"""All pairs on a CPU by what a text changes: exact like `factored`, with a fraction of its arithmetic.

Texts decide alike about an image: of 400 patches about 50 differ between two captions. With D = B + d, where B is what
most texts decide and d is 1, -1 or, mostly, 0, and with H_k = diag(e_k) G diag(e_k) as in `factored`,

    |u_k|^2 = D^T H_k D = 2 D^T H_k B - B^T H_k B + d^T H_k d

H_k B is made once per image, the last term is over the changed patches alone, and H is never made. Where the terms are
large against their sum, float32 would lose digits: such merged patches are summed patch by patch (`_LOSS`).

With two sets merged into the same tokens each has a softmax of its own, `u_k = u^1_k / (D^1 e^1)_k + u^2_k / (D^2
e^2)_k`: a share of each set, which multiplies its e. A set changes patches of its own, so that their lists are joined.

The products of the words lose nothing: they are (P * D) e, as in `factored`.

Shapes: B images, T texts, M words, N patches, C width, Q merged patches, P prefix tokens, K = Q + P + 1 tokens,
Z patches and prefix tokens, filled up; S sets, R pairs, X pairs with about as many changed patches, Y of these patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.align import largest
from seps.method.encoded import EncodedImages, Kept, Texts
from seps.method.network import PatchSlimming
from seps.products import linear
from seps.scoring.terms import (
    SMALLEST,
    branch_weights,
    inverse_norms,
    keeps_whole_patches,
    other_tokens,
    scaled_patches,
)

_LOSS = 32.0
"""How much larger than their sum the terms of a norm may be: that costs one of a float's seven digits."""
_LEAST, _MOST, _CELLS = 8, 64, 2**16
"""Pairs that are filled up to the same number of changed patches: at least 8, at most 64, and between these as many as
have 65,536 cells of the Gram matrix, which fit into a core's cache."""
_FULL = 128
"""Merged patches that are summed patch by patch are filled up to a multiple of this (`linear`)."""


class DifferenceMaxima:
    """`seps.method.maxima.Maxima` on a CPU in float32, without gradients."""

    def __init__(self, net: PatchSlimming, images: EncodedImages) -> None:
        self.net, self.images = net, images
        self._merged: dict[int, _Merged] = {}
        self._fixed: dict[int, Tensor] = {}

    @staticmethod
    def supports(net: PatchSlimming, images: EncodedImages | None = None) -> str | None:
        """Why these are not the maxima of `net` and of these images, as part of a sentence; None when they are."""
        if images is not None and (images.patches.is_cuda or torch.is_grad_enabled()):
            return "sums by differences are for a CPU, without gradients"
        return other_tokens(net) or (None if keeps_whole_patches(net) else "its decision may weigh patches")

    def __call__(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        place = kept[0].place
        if len(kept) == 1 and kept[0].fixed:
            if place not in self._fixed:
                self._fixed[place] = self.net.tokens(self.images, kept)[0]
            return self.beside(texts, self._fixed[place], None)
        if place not in self._merged:
            self._merged[place] = _Merged(self.images, kept)
        return self._merged[place].maxima(texts, kept)

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        images, count, width = tokens.shape
        # Filled up to few numbers of tokens, as `linear` wants.
        filled = F.pad(tokens, (0, 0, 0, -count % 16)).view(-1, width)
        flat = linear(texts.words, filled)  # (T, M, B * L), filled up
        cosines = flat.view(*flat.shape[:2], images, -1)[..., :count].permute(2, 0, 1, 3)
        dropped = None if mask is None or bool(mask.all()) else mask[:, None]
        return largest(cosines, texts.mask, dropped)


class _Merged:
    """Images with the set of patches that their merged patches are made of, or two sets, ready to meet texts.

    Made when the first texts come: B of `_Norms` is what most of them decide.
    """

    def __init__(self, images: EncodedImages, kept: Sequence[Kept]) -> None:
        scaled, prefix = scaled_patches(images), F.normalize(images.prefix.float(), dim=-1)  # (B, N, C), (B, P, C)
        batch, self.count = scaled.shape[:2]
        stop = self.count + prefix.shape[1]
        self.tokens = scaled.new_empty(batch, stop + -stop % 16, scaled.shape[2])  # (B, Z, C)
        self.tokens[:, : self.count], self.tokens[:, self.count : stop], self.tokens[:, stop:] = scaled, prefix, 0.0
        weights: list[Tensor] = []  # e of each set, (B, N, Q)
        keeps: list[Tensor] = []  # D of each set, (T, B, N)
        self.mixes: list[Tensor] = []
        for one in kept:
            own = branch_weights(images.sets[one.place].logits, 0, torch.float32)
            weights.append(own)
            keeps.append(one.keep)
            self.merged = own.shape[-1]
            # (B, K, Z) from products with the tokens to those with the merged patches; the prefix tokens stay.
            mix = scaled.new_zeros(batch, self.merged + prefix.shape[1] + 1, self.tokens.shape[1])
            mix[:, : self.merged, : self.count] = own.transpose(1, 2)
            if not self.mixes:
                mix[:, self.merged : -1, self.count : stop] = torch.eye(prefix.shape[1])
            self.mixes.append(mix)
        self.norms = _Norms(scaled, weights, keeps)

    def maxima(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """Best token of each word (B, T, M), best word of each token (B, T, K)."""
        keeps = [one.keep.expand(texts.count, -1, -1).transpose(0, 1) for one in kept]  # each (B, T, N)
        extra = kept[0].extra if len(kept) == 1 else torch.stack([one.extra for one in kept]).mean(dim=0)  # (T, B, N)
        scales, rows, columns = self.norms(keeps), [], []
        for image, tokens in enumerate(self.tokens):
            weight = extra[:, image]  # (T, N)
            products = linear(texts.words, tokens)  # (T, M, Z)
            of_patches = products[..., : self.count]
            dropped = torch.bmm(of_patches, weight[..., None])[..., 0]  # (T, M)
            length = linear(weight, tokens[: self.count].T).norm(dim=-1, keepdim=True)  # (T, 1)
            cosines: Tensor | None = None  # (T, M, K)
            for place, (keep, scale, mix) in enumerate(zip(keeps, scales, self.mixes, strict=True)):
                kept_alone = products if place == len(keeps) - 1 else products.clone()
                kept_alone[..., : self.count].mul_(keep[image][:, None])
                found = linear(kept_alone, mix[image])
                found[..., : self.merged].mul_(scale[image][:, None])
                cosines = found if cosines is None else cosines.add_(found)
            assert cosines is not None
            cosines[..., -1] = dropped / length.clamp_min(1e-12)
            best = largest(cosines, texts.mask)
            rows.append(best[0])
            columns.append(best[1])
        return torch.stack(rows), torch.stack(columns)


class _Norms:
    """Lengths of the merged patches for any D, of images with patches (B, N, C) and e (B, N, Q) of each set."""

    def __init__(self, patches: Tensor, weights: Sequence[Tensor], keeps: Sequence[Tensor]) -> None:
        """B is what most of some texts decide: D of each set (T, B, N)."""
        self.patches, self.weights = patches, weights
        (batch, count, _), sets = patches.shape, len(keeps)
        grams = patches.new_empty(batch, count, count)
        for gram, own in zip(grams, patches, strict=True):
            gram.copy_(linear(own, own))
        # With a patch of zeros in each set, with which changed patches are filled up.
        filled = F.pad(grams, (0, 1, 0, 1))
        self.gram = (filled if sets == 1 else filled.repeat(1, sets, sets)).view(-1)
        self.bases: list[Tensor] = []  # each (B, N)
        signed: list[Tensor] = []
        for own, keep in zip(weights, keeps, strict=True):
            self.bases.append((keep.mean(dim=0) > 0.5).float())
            signed.append(F.pad(own * (1 - 2 * self.bases[-1])[..., None], (0, 0, 0, 1)))
        self.signed = torch.cat(signed, dim=1).flatten(0, 1)
        self.slopes: list[Tensor] = []  # of each set (B, N, S * 2 * Q): 2 H B with each set, and its absolute values
        self.constants: list[Tensor] = []  # (B, 1, S * 2 * Q)
        for own, own_base in zip(weights, self.bases, strict=True):
            slopes, constants = [], []
            for other, base in zip(weights, self.bases, strict=True):
                slope = torch.bmm(grams, other * base[..., None]).mul_(own)
                constant = (slope * own_base[..., None]).sum(dim=1, keepdim=True)
                slopes += [2 * slope, 2 * slope.abs()]
                constants += [-constant, constant.abs()]
            self.slopes.append(torch.cat(slopes, dim=-1))
            self.constants.append(torch.cat(constants, dim=-1))

    def __call__(self, keeps: Sequence[Tensor]) -> list[Tensor]:
        """D of each set (B, T, N), zeros and ones -> what its sums D e are to be multiplied with, (B, T, Q) each."""
        shares = [torch.ones(1, 1, 1)]
        if len(keeps) > 1:
            shares = [
                1 / torch.bmm(keep, own).clamp_min(SMALLEST) for keep, own in zip(keeps, self.weights, strict=True)
            ]
        changed = self._of_changes(keeps, shares)
        norms, terms = changed, changed
        for own, keep, slopes, constants in zip(shares, keeps, self.slopes, self.constants, strict=True):
            parts = torch.baddbmm(constants, keep, slopes).chunk(2 * len(keeps), dim=-1)
            for other, part, absolute in zip(shares, parts[::2], parts[1::2], strict=True):
                norms, terms = norms + part * (own * other), terms + absolute * (own * other)
        self._exactly(keeps, shares, norms, terms)
        inverse = inverse_norms(norms)
        return [share * inverse for share in shares]

    def _of_changes(self, keeps: Sequence[Tensor], shares: list[Tensor]) -> Tensor:
        """`d^T H_k d` (B, T, Q): over the patches alone that a text changes."""
        batch, texts, count = keeps[0].shape
        side = len(keeps) * (count + 1)
        changed = torch.zeros(batch, texts, side, dtype=torch.bool)
        for place, (keep, base) in enumerate(zip(keeps, self.bases, strict=True)):
            torch.ne(keep, base[:, None], out=changed[..., place * (count + 1) : (place + 1) * (count + 1) - 1])
        numbers, order = changed.flatten(0, 1).sum(dim=-1).sort()
        most = numbers.clamp_min(1).tolist()
        # (R, Y) the changed patches of each pair, and a patch of zeros where it has fewer than others.
        patches = torch.full((len(most), most[-1]), count)
        filled = torch.arange(most[-1]) < numbers[:, None]
        flat = changed.flatten(0, 1).index_select(0, order).numpy()
        patches.numpy()[filled.numpy()] = np.flatnonzero(flat) % side
        places = patches + (order // texts * side)[:, None]
        found = keeps[0].new_empty(len(most), self.weights[0].shape[-1])
        stop = 0
        while stop < len(most):
            start, stop = stop, stop + max(_LEAST, min(_MOST, _CELLS // most[stop] ** 2))
            here, width = slice(start, stop), most[min(stop, len(most)) - 1]
            own = places[here, :width]
            signed = self.signed.index_select(0, own.flatten()).view(*own.shape, -1)  # (X, Y, Q)
            if len(shares) > 1:
                of_set = patches[here, :width] // (count + 1) * (batch * texts) + order[here, None]
                signed.mul_(torch.cat(shares).flatten(0, 1).index_select(0, of_set.flatten()).view_as(signed))
            cells = (own * side)[:, :, None] + patches[here, None, :width]
            gram = self.gram.index_select(0, cells.flatten()).view_as(cells)  # (X, Y, Y)
            torch.sum(torch.bmm(gram, signed).mul_(signed), dim=1, out=found[here])
        back = torch.empty_like(found)
        return back.index_copy_(0, order, found).view(batch, texts, -1)

    def _exactly(self, keeps: Sequence[Tensor], shares: Sequence[Tensor], norms: Tensor, terms: Tensor) -> None:
        """Sum patch by patch those norms (B, T, Q) whose `terms` are too large for their sum."""
        lost = terms > _LOSS * norms
        if not lost.any():
            return
        for image, own_lost in enumerate(lost):
            texts, merged = own_lost.nonzero(as_tuple=True)
            for start in range(0, len(texts), 8 * _FULL):
                text, place = texts[start : start + 8 * _FULL], merged[start : start + 8 * _FULL]
                made = norms.new_zeros(len(text) + -len(text) % _FULL, self.patches.shape[1])
                for keep, own, share in zip(keeps, self.weights, shares, strict=True):
                    one = keep[image].index_select(0, text) * own[image].T.index_select(0, place)
                    made[: len(text)] += one if len(shares) == 1 else one * share[image, text, place][:, None]
                vectors = linear(made, self.patches[image].T)[: len(text)]
                norms[image, text, place] = vectors.square_().sum(dim=1)
