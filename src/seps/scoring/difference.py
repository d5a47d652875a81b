"""All pairs on a CPU by what a text changes: exact like `factored`, with a fraction of its arithmetic.

Texts decide alike about an image: of 400 patches about 50 differ between two captions. With D = B + d, where B is what
most texts decide and d is 1, -1 or, mostly, 0, and with H_k = diag(e_k) G diag(e_k) as in `factored`,

    |u_k|^2 = D^T H_k D = B^T H_k B + 2 d^T H_k B + d^T H_k d

The first term and H_k B are one product for all texts with the same B, the last is over the changed patches alone, and
H is never made. Texts that decide alike share a B. Where the terms are large against their sum, float32 would lose
digits: such merged patches are summed patch by patch (`_LOSS`).

The products of the words lose nothing: they are (P * D) e, as in `factored`, over words without padding. Words stand by
their place in the text, so that the words of one place are those of the texts from some text on, and meet their rows of
D and of the norms without an index.

Shapes: B images, T texts, M words, W words of several texts, N patches, C width, Q merged patches, P prefix tokens,
K tokens, G groups of texts, X texts with about as many changed patches, Y of these patches, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.encoded import EncodedImages, Kept, Texts
from seps.method.network import PatchSlimming
from seps.products import linear
from seps.scoring.factored import GramMaxima
from seps.scoring.inputs import TextBlock
from seps.scoring.terms import (
    SMALLEST,
    branch_weights,
    inverse_norms,
    keeps_whole_patches,
    other_tokens,
    scaled_patches,
)

_LOSS = 16.0
"""How much larger than their sum the terms of a norm may be: that costs one of a float's seven digits."""
_GROUPS, _GROUP = 8, 48
"""At most so many groups of texts with a B of their own, of at least so many texts on average."""
_SCATTER = 1.2
"""Groups are made where the mean square of the numbers of changed patches is so far above their squared mean."""
_ALIKE = 16
"""Texts whose changed patches are filled up to one number."""
_FULL = 128
"""Merged patches that are summed patch by patch are filled up to a multiple of this (`linear`)."""
_TEXTS = 96
"""Texts whose words meet the patches at once: their products stay in a core's cache."""


class DifferenceMaxima:
    """`seps.method.maxima.Maxima` on a CPU in float32, without gradients.

    Decisions that weigh patches, and texts that are no block sorted by length, are left to `GramMaxima`.
    """

    def __init__(self, net: PatchSlimming, images: EncodedImages) -> None:
        self.net, self.images = net, images
        self._decides = keeps_whole_patches(net)
        self._sets: dict[tuple[int, ...], _Sets] = {}
        self._fixed: dict[int, Tensor] = {}
        self._other: GramMaxima | None = None

    @staticmethod
    def supports(net: PatchSlimming, images: EncodedImages | None = None) -> str | None:
        """Why these are not the maxima of `net` and of these images, as part of a sentence; None when they are."""
        if images is not None and (images.patches.is_cuda or torch.is_grad_enabled()):
            return "sums by differences are for a CPU, without gradients"
        return other_tokens(net)

    def __call__(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        parts, place = _parts(texts), kept[0].place
        if parts is None or not self._decides:
            return self._gram()(texts, kept)
        if len(kept) == 1 and kept[0].fixed:
            if place not in self._fixed:
                self._fixed[place] = self.net.tokens(self.images, kept)[0]
            return self.beside(texts, self._fixed[place], None)
        places = tuple(one.place for one in kept)
        if places not in self._sets:
            self._sets[places] = _Sets(self.images, places)
        keeps = [one.keep.expand(texts.count, -1, -1) for one in kept]
        extra = kept[0].extra if len(kept) == 1 else torch.stack([one.extra for one in kept]).mean(dim=0)
        return self._sets[places].maxima(parts, texts.words.shape[1], keeps, extra)

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        parts = _parts(texts)
        if parts is None:
            return self._gram().beside(texts, tokens, mask)
        images, count, width = tokens.shape
        lowest = torch.finfo(tokens.dtype).min
        # Filled up to few numbers of tokens, as `linear` wants.
        filled = F.pad(tokens, (0, 0, 0, -count % 16)).view(-1, width)
        rows = tokens.new_zeros(texts.words.shape[1], texts.count, images)
        columns = tokens.new_full((texts.count, images, count), lowest)
        dropped = None if mask is None or bool(mask.all()) else ~mask
        for part in parts:
            cosines = linear(part.words, filled).view(len(part.words), images, -1)[..., :count]
            part.best_word(cosines, columns)
            if dropped is not None:
                cosines.masked_fill_(dropped, lowest)
            part.spread(cosines.amax(dim=-1), rows)
        return rows.permute(2, 1, 0), columns.transpose(0, 1)

    def _gram(self) -> GramMaxima:
        if self._other is None:
            self._other = GramMaxima(self.net, self.images, torch.float32)
        return self._other


@dataclass
class _Step:
    """Words of some places: `first` to `stop` of a part's words are (places, texts), the texts from some text on."""

    first: int
    stop: int
    places: slice
    texts: slice
    shape: tuple[int, int]

    def of(self, values: Tensor) -> Tensor:
        """The rows of these words, (places, texts, ...), of the values (W, ...) of a part."""
        return values[self.first : self.stop].view(self.shape + values.shape[1:])


@dataclass
class _Part:
    """Words (W, C) of some texts of a block by their places, and what stands where."""

    words: Tensor
    steps: list[_Step]

    def best_word(self, values: Tensor, best: Tensor) -> None:
        """Raise `best` (T, B, K) to the largest of the words' values (W, B, K)."""
        for step in self.steps:
            own, found = best[step.texts], step.of(values)
            torch.maximum(own, found.amax(dim=0) if step.shape[0] > 1 else found[0], out=own)

    def spread(self, values: Tensor, rows: Tensor) -> None:
        """Write the words' values (W, B) to their places in `rows` (M, T, B)."""
        for step in self.steps:
            rows[step.places, step.texts] = step.of(values)


def _parts(texts: Texts) -> list[_Part] | None:
    """The words of a block by places, a few texts at a time, made once; None where the lengths do not rise."""
    if not isinstance(texts, TextBlock):
        return None
    if "parts" not in texts.made:
        lengths = texts.lengths.tolist()
        rising = all(first <= second for first, second in pairwise(lengths))
        cuts = [(start, min(start + _TEXTS, texts.count)) for start in range(0, texts.count, _TEXTS)]
        texts.made["parts"] = [_part(texts.words, lengths, *cut) for cut in cuts] if rising else None
    parts: list[_Part] | None = texts.made["parts"]
    return parts


def _part(words: Tensor, lengths: Sequence[int], start: int, stop: int) -> _Part:
    """Texts `start` to `stop` of a block (T, M, C), whose lengths rise."""
    rows: list[Tensor] = []
    steps: list[_Step] = []
    first = place = 0
    for text in range(start, stop):
        length = lengths[text]
        if length > place:
            own = words[text:stop, place:length].transpose(0, 1)
            shape = (length - place, stop - text)
            count = shape[0] * shape[1]
            steps.append(_Step(first, first + count, slice(place, length), slice(text, stop), shape))
            rows.append(own.reshape(count, -1))
            first, place = first + count, length
    return _Part(torch.cat(rows), steps)


class _Sets:
    """Images with the set of patches that their merged patches are made of, or two sets, ready to meet texts."""

    def __init__(self, images: EncodedImages, places: Sequence[int]) -> None:
        scaled, prefix = scaled_patches(images), F.normalize(images.prefix.float(), dim=-1)  # (B, N, C), (B, P, C)
        weights = [branch_weights(images.sets[place].logits, 0, torch.float32) for place in places]  # each (B, N, Q)
        batch, count, width = scaled.shape
        self.count, self.merged, self.others = count, weights[0].shape[-1], prefix.shape[1] + 1
        # (B, Z, C): the patches, the prefix tokens, and at least one row of zeros; e of each set for them, (B, Q, Z).
        padded = count + self.others + -(count + self.others) % 16
        self.tokens = scaled.new_zeros(batch, padded, width)
        self.tokens[:, :count], self.tokens[:, count : count + self.others - 1] = scaled, prefix
        self.weights = [F.pad(own.transpose(1, 2), (0, padded - count)) for own in weights]
        self.norms = _Norms(scaled, weights)

    def maxima(
        self, parts: Sequence[_Part], longest: int, keeps: Sequence[Tensor], extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Best token of each word (B, T, M), best word of each token (B, T, K), from D of each set and w (T, B, N)."""
        texts, batch, count = extra.shape
        scales = [scale.transpose(0, 1) for scale in self.norms(keeps)]  # each (T, B, Q)
        tokens = [linear(extra[:, i], own[:count].T) for i, own in enumerate(self.tokens)]
        dropped = F.normalize(torch.stack(tokens, dim=2), dim=1)  # (T, C, B)
        rows = extra.new_zeros(longest, texts, batch)
        columns = extra.new_full((texts, batch, self.merged + self.others), torch.finfo(extra.dtype).min)
        for part in parts:
            # Words with patches and prefix tokens, (W, B, Z).
            products = linear(part.words, self.tokens.flatten(0, 1)).view(len(part.words), batch, -1)
            cosines = self._merged(part, products, keeps, scales)  # (W, B, Q)
            others = products[..., count : count + self.others]  # with prefix tokens, and room for the extra token
            for step in part.steps:
                of_extra = torch.bmm(step.of(part.words).transpose(0, 1), dropped[step.texts])  # (texts, places, B)
                step.of(others)[..., -1] = of_extra.transpose(0, 1)
            part.best_word(cosines, columns[..., : self.merged])
            part.best_word(others, columns[..., self.merged :])
            part.spread(torch.maximum(cosines.amax(dim=-1), others.amax(dim=-1)), rows)
        return rows.permute(2, 1, 0), columns.transpose(0, 1)

    def _merged(self, part: _Part, products: Tensor, keeps: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
        """Cosines of words and merged patches (W, B, Q), from the products (W, B, Z), which the last set changes."""
        found: Tensor | None = None
        for place, (keep, scale, weights) in enumerate(zip(keeps, scales, self.weights, strict=True)):
            own = products if place == len(keeps) - 1 else products.clone()
            for step in part.steps:
                step.of(own)[..., : self.count].mul_(keep[step.texts])
            cosines = torch.stack([linear(own[:, i], image) for i, image in enumerate(weights)], dim=1)
            for step in part.steps:
                step.of(cosines).mul_(scale[step.texts])
            found = cosines if found is None else found.add_(cosines)
        assert found is not None
        return found


class _Norms:
    """Lengths of the merged patches for any D, of images with patches (B, N, C) and e (B, N, Q) of one set or two.

    Of two sets each has a softmax of its own: `u_k = u^1_k / (D^1 e^1)_k + u^2_k / (D^2 e^2)_k`.
    """

    def __init__(self, patches: Tensor, weights: Sequence[Tensor]) -> None:
        self.patches, self.by_merged = patches, [own.transpose(1, 2).contiguous() for own in weights]
        self.grams = [linear(own, own) for own in patches]
        # With a patch of zeros, with which changed patches are filled up.
        self.filled = torch.stack([F.pad(gram, (0, 1, 0, 1)) for gram in self.grams]).view(-1)
        self.filled_weights = [F.pad(own, (0, 0, 0, 1)).flatten(0, 1) for own in weights]

    def __call__(self, keeps: Sequence[Tensor]) -> list[Tensor]:
        """D of each set (T, B, N), zeros and ones -> what its sums D e are to be multiplied with, (B, T, Q) each."""
        kept = [keep.transpose(0, 1).clone(memory_format=torch.contiguous_format) for keep in keeps]  # each (B, T, N)
        if len(kept) == 1:
            order = [_sort(own) for own in kept[0]]
            sums = self._sums(0, kept[0], [(base, sizes) for _, base, sizes in order])
            self._exactly(kept, [None], sums.norms, sums.terms)
            for own, (places, _, _) in zip(sums.norms, order, strict=True):
                if places is not None:
                    own[places] = own.clone()
            return [inverse_norms(sums.norms)]
        both = [
            self._sums(place, own, [(_usual(one), [own.shape[1]]) for one in own]) for place, own in enumerate(kept)
        ]
        shares = [
            1 / torch.bmm(own, weights.transpose(1, 2)).clamp_min(SMALLEST)
            for own, weights in zip(kept, self.by_merged, strict=True)
        ]
        cross, terms = self._cross(both, kept)
        product = 2 * shares[0] * shares[1]
        norms = both[0].norms * shares[0].square() + both[1].norms * shares[1].square() + cross * product
        terms = both[0].terms * shares[0].square() + both[1].terms * shares[1].square() + terms * product
        self._exactly(kept, shares, norms, terms)
        return [share * inverse_norms(norms) for share in shares]

    def _sums(self, place: int, kept: Tensor, bases: Sequence[tuple[Tensor, Sequence[int]]]) -> _Sums:
        """D^T H_k D of one set for D (B, T, N), whose texts stand by the bases of their image."""
        norms, terms = (kept.new_empty(*kept.shape[:2], self.by_merged[place].shape[1]) for _ in range(2))
        change = kept.clone()
        for image, (base, sizes) in enumerate(bases):
            by_merged = self.by_merged[place][image]  # (Q, N)
            of_base = base[:, None] * by_merged  # (G, Q, N): e of the base's patches
            slopes = linear(of_base.flatten(0, 1), self.grams[image]).view_as(of_base).mul_(by_merged)  # H_k B
            constants = (slopes * base[:, None]).sum(dim=-1)  # (G, Q)
            start = 0
            for own, slope, constant, size in zip(base, slopes, constants, sizes, strict=True):
                part = slice(start, start + size)
                change[image, part] -= own
                # Not `linear`, which would make code for each size.
                torch.addmm(constant, change[image, part], slope.T, alpha=2, out=norms[image, part])
                absolute = change[image, part].abs(), slope.abs().T
                torch.addmm(constant, *absolute, alpha=2, out=terms[image, part])
                start += size
        changes = _Changes(change, self.filled_weights[place])
        for pairs, square in changes.sums(self.filled, changes):
            norms.flatten(0, 1).index_add_(0, pairs, square)
            terms.flatten(0, 1).index_add_(0, pairs, square)
        return _Sums(norms, terms, changes, [base for base, _ in bases])

    def _cross(self, both: Sequence[_Sums], kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """`D^1^T diag(e^1_k) G diag(e^2_k) D^2` (B, T, Q), and the sum of absolute values of its terms."""
        first, second = both
        found, terms = torch.empty_like(first.norms), torch.empty_like(first.norms)
        for image, gram in enumerate(self.grams):
            weights = [own[image] for own in self.by_merged]  # each (Q, N)
            bases = [own.bases[image] for own in both]  # each (1, N)
            to_second = linear(bases[1] * weights[1], gram).mul_(weights[0])  # (Q, N), for what changes in the first
            to_first = linear(bases[0] * weights[0], gram).mul_(weights[1])
            constant = (to_second * bases[0]).sum(dim=-1)  # (Q,)
            changes = [own.changes.change[image] for own in both]  # each (T, N)
            torch.addmm(constant, changes[0], to_second.T, out=found[image]).addmm_(changes[1], to_first.T)
            torch.addmm(constant.abs(), changes[0].abs(), to_second.abs().T, out=terms[image])
            terms[image].addmm_(changes[1].abs(), to_first.abs().T)
        for pairs, product in first.changes.sums(self.filled, second.changes):
            found.flatten(0, 1).index_add_(0, pairs, product)
            terms.flatten(0, 1).index_add_(0, pairs, product.abs())
        return found, terms

    def _exactly(self, kept: Sequence[Tensor], shares: Sequence[Tensor | None], norms: Tensor, terms: Tensor) -> None:
        """Sum patch by patch those norms (B, T, Q) whose `terms` are too large for their sum."""
        lost = torch.from_numpy(np.flatnonzero((terms > _LOSS * norms).numpy()))
        texts, merged = norms.shape[1:]
        ends = torch.searchsorted(lost, torch.arange(1, len(norms) + 1) * texts * merged).tolist() if len(lost) else []
        for image, (start, stop) in enumerate(pairwise([0, *ends])):
            for rows in torch.split(lost[start:stop], 8 * _FULL):
                weights = torch.zeros(len(rows) + -len(rows) % _FULL, kept[0].shape[-1])
                for own, by_merged, share in zip(kept, self.by_merged, shares, strict=True):
                    one = own[image].index_select(0, rows // merged % texts)
                    one.mul_(by_merged[image].index_select(0, rows % merged))
                    weights[: len(rows)] += one if share is None else one * share.view(-1)[rows][:, None]
                norms.view(-1)[rows] = linear(weights, self.patches[image].T)[: len(rows)].square_().sum(dim=1)


@dataclass
class _Sums:
    """Squared norms of a set (B, T, Q), the sum of absolute values of their terms, and from what they were made."""

    norms: Tensor
    terms: Tensor
    changes: _Changes
    bases: list[Tensor]


class _Changes:
    """The changed patches of each pair: d (B, T, N), and e with a row of zeros for each image, (B (N + 1), Q)."""

    def __init__(self, change: Tensor, filled_weights: Tensor) -> None:
        self.change, self.weights = change, filled_weights
        self.texts, self.count = change.shape[1:]
        flat = torch.from_numpy(np.flatnonzero(change.numpy()))
        self.numbers = (change != 0).sum(dim=-1).view(-1)
        self.starts = self.numbers.cumsum(0) - self.numbers
        self.patches = torch.cat([flat % self.count, flat.new_tensor([self.count])])
        self.signs = F.pad(change.view(-1).index_select(0, flat), (0, 1))

    def of(self, pairs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Changed patches (X, Y) of some pairs, filled up to `width`, and `d e` of them (X, Y, Q)."""
        steps = torch.arange(width)
        where = self.starts.index_select(0, pairs)[:, None] + steps
        past = steps >= self.numbers.index_select(0, pairs)[:, None]
        where = where.masked_fill_(past, len(self.patches) - 1).view(-1)
        place = self.patches.index_select(0, where).view(-1, width)
        signed = self.weights.index_select(0, (place + (pairs // self.texts * (self.count + 1))[:, None]).view(-1))
        signed.mul_(self.signs.index_select(0, where)[:, None])
        return place, signed.view(len(pairs), width, -1)

    def sums(self, filled: Tensor, other: _Changes) -> Iterator[tuple[Tensor, Tensor]]:
        """`sum_ij d_i e_ik G_ij e'_jk d'_j` over changed patches: some pairs (X,) and theirs (X, Q), and so on."""
        numbers = self.numbers if other is self else torch.maximum(self.numbers, other.numbers)
        order = numbers.argsort()
        most = numbers.index_select(0, order).tolist()
        side = self.count + 1
        for first in range(0, len(order), _ALIKE):
            pairs = order[first : first + _ALIKE]
            width = most[min(first + _ALIKE, len(order)) - 1]
            if not width:
                continue
            place, signed = self.of(pairs, width)
            place_of_other, signed_of_other = (place, signed) if other is self else other.of(pairs, width)
            lines = (place + (pairs // self.texts * side)[:, None]) * side
            cells = lines[:, :, None] + place_of_other[:, None, :]
            gram = filled.index_select(0, cells.view(-1)).view_as(cells)  # (X, Y, Y)
            yield pairs, torch.bmm(gram, signed_of_other).mul_(signed).sum(dim=1)


def _usual(kept: Tensor) -> Tensor:
    """What most texts decide (1, N), of their decisions (T, N)."""
    return (kept.mean(dim=0, keepdim=True) > 0.5).float()


def _sort(kept: Tensor) -> tuple[Tensor | None, Tensor, list[int]]:
    """Sort an image's decisions (T, N) by group: their places before, B of each group (G, N), and its size."""
    texts, base = len(kept), _usual(kept)
    groups = min(_GROUPS, texts // _GROUP)
    if groups < 2:
        return None, base, [texts]
    # Whether some texts change many more patches than others, so that groups of them are worth their work.
    numbers = (kept - base).abs().sum(dim=1)
    if not numbers.square().mean() > _SCATTER * numbers.mean().square():
        return None, base, [texts]
    base, group = alike(kept, groups)
    places = group.argsort(stable=True)
    kept.copy_(kept.index_select(0, places))
    return places, base, group.bincount(minlength=groups).tolist()


def alike(keep: Tensor, groups: int, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """Decisions (T, N) in groups: what most of each group decide (G, N), and the group of each (T,)."""
    centred = keep - keep.mean(dim=0)
    axis = centred[0]
    for _ in range(4):
        axis = (centred @ axis) @ centred
        axis = axis / axis.norm().clamp_min(1e-30)
    group = torch.empty(len(keep), dtype=torch.long)
    group[(centred @ axis).argsort(stable=True)] = torch.arange(len(keep)) * groups // len(keep)
    for turn in range(rounds + 1):
        member = F.one_hot(group, groups).float().T.contiguous()  # (G, T)
        base = (member @ keep > member.sum(dim=1, keepdim=True) / 2).float()
        if turn < rounds:
            group = (base.sum(dim=1) - 2 * keep @ base.T).argmin(dim=1)
    return base, group
