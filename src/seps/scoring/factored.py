"""All pairs of images and texts without a loop over texts and without a token per pair.

What a caption decides about an image is which patches are kept: D, zeros and ones. With `e_ik = exp(L_ik - c_k)`
(c_k cancels under the L2 norm) a merged patch of the pair is `u_k = sum_i D_i e_ik v_i`, so that

    word_j . u_k = ((P * D) e)_jk        P = words V^T, one product for all texts
    |u_k|^2     = D^T H_k D              H_k = diag(e_k) V V^T diag(e_k), of the image alone

H is symmetric: only its upper blocks are kept, those off the diagonal doubled. The extra token is built per pair
(one vector). An image whose logits spread too far for `e` takes the direct form: slower, same value.

A `BlockScorer` holds some images, ready to meet any number of texts, and scores one block of texts at a time:
`FactoredScorer` as above, `DualScorer` with two kept sets per merged patch, `DirectScorer` with the merged patches
built per pair; `train` adds one that recomputes in the backward pass, `gpu.fused` one with fused kernels.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.encoded import ImageSide
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean
from seps.method.select import extra_weights
from seps.method.tokens import merge_weights
from seps.scoring.inputs import PackedWords, TextBlock
from seps.scoring.terms import (
    SMALLEST,
    FixedBranch,
    branch_weights,
    depends_on_text,
    fill_rows,
    fixed_branch,
    inverse_norms,
    pair_scores,
    present_branches,
    quadratic,
    unit_and_scaled,
    upper_blocks,
    weighted_gram,
    zero_dropped,
)

_FAR = -1e30


@dataclass
class BlockScores:
    """A block of texts against some images: the parts of S, (B, T) each, and D (T, B, N) of each branch."""

    patches: Tensor
    description: Tensor | None
    masks: list[Tensor]


@dataclass
class Group:
    """Branches (caption, description) whose kept patches are merged into the same tokens: D (T, B, N) of each by name,
    1 at a kept patch, and the weights (T, B, N) of the patches in the extra token."""

    keeps: dict[str, Tensor]
    extra: Tensor

    @property
    def only(self) -> tuple[str, Tensor]:
        """Name and D of a group of one branch."""
        ((name, keep),) = self.keeps.items()
        return name, keep


class BlockScorer:
    """Scores B images against blocks of texts; subclasses differ in how they find the largest cosines (`maxima`).

    Args:
        net: the network whose score is computed.
        side: the images, from `PatchSlimming.encode_images`.
        dtype: of the matrix products; sums are in float32.
        text_guides: names of the guides (Eq. 1-3) that differ between texts; the others are part of `side`.
    """

    def __init__(
        self, net: PatchSlimming, side: ImageSide, dtype: torch.dtype, text_guides: Collection[str] = ("caption",)
    ) -> None:
        self.net, self.side, self.dtype, self.text_guides = net, side, dtype, text_guides
        # (B, N, C) float32; the first for the selection, without gradient.
        self.unit_patches, scaled = unit_and_scaled(side)
        pad = self.padding(scaled.shape[1])
        scaled = F.pad(scaled, (0, 0, 0, pad)) if pad else scaled
        self.branches = present_branches(net, side)
        self.fixed: FixedBranch | None = None
        if net.config.aggregation != "dual":
            present = self.branches
            self.branches = [branch for branch in present if depends_on_text(net, branch, text_guides)]
            if len(self.branches) < len(present):
                self.fixed = fixed_branch(net, side, present[-1])
        # Before the patches are rounded: autograd sums gradients in the order in which the steps were made.
        self.prepare(scaled)
        # (B, P, C) L2-normalised; (B, Z, C), each image scaled to a largest norm of 1.
        self.prefix = F.normalize(side.prefix.float(), dim=-1).to(dtype)
        self.patches = scaled.to(dtype)

    def padding(self, count: int) -> int:
        """How many rows of zeros the products want after `count` patches."""
        return -count % (16 if self.dtype != torch.float32 else 1)

    def prepare(self, scaled: Tensor) -> None:
        """Make what a subclass needs of the scaled patches (B, Z, C) float32."""

    def maxima(self, block: TextBlock, group: Group) -> tuple[Tensor, Tensor]:
        """The merged patches' cosines: best of each word (B, T, M), best of each merged patch (B, T, Q)."""
        raise NotImplementedError

    def word_products(self, block: TextBlock, tokens: Tensor) -> Tensor:
        """Words of every text with tokens (B, K, C) of every image: (T, M, B, K); with the patches P = words V^T."""
        batch, count, width = tokens.shape
        flat = block.words.to(tokens.dtype).reshape(-1, width) @ tokens.reshape(-1, width).T
        return flat.view(block.count, -1, batch, count)

    def recompute(self, work: Callable[[], Any]) -> Any:
        """`work()`; a subclass may make it again in the backward pass."""
        return work()

    def score(self, block: TextBlock) -> Tensor:
        """S (B, T) of the block."""
        parts = self.parts(block)
        return self.mix(parts.patches, parts.description)

    def parts(self, block: TextBlock, *, want_masks: bool = False) -> BlockScores:
        """The parts of S for a block of texts; `mix` puts them together."""
        groups = self._groups(block)
        scores = []
        for group in groups:
            words = block.words_for(list(group.keeps)[-1])
            score = self._align(words, *self.maxima(words, group), group.extra)
            scores.append(self._described_only(score) if list(group.keeps) == ["dense"] else score)
        total = scores[0] if len(scores) == 1 else torch.stack(scores).sum(dim=0)
        masks = [keep for group in groups for keep in group.keeps.values()] if want_masks else []
        if want_masks and self.fixed is not None:
            masks.append(self.fixed.keep.expand(block.count, -1, -1))
        return BlockScores(self.add_fixed_parts(block, total), self.describe(block), masks)

    def mix(self, patches: Tensor, description: Tensor | None) -> Tensor:
        """S from its parts (B, T); that of the patches alone where no description came."""
        return patches if description is None else self.net.mix(self.side, patches, description)

    def add_fixed_parts(self, block: TextBlock, score: Tensor) -> Tensor:
        """Add what no decision changes: a second branch's tokens, and the pooled cosine."""
        if self.fixed is not None:
            tokens = self.fixed.tokens
            second = self.recompute(lambda: self._align_tokens(block, tokens.to(self.patches.dtype), None))
            score = score + self._described_only(second)
        if self.net.config.pooled:
            score = score + self.net.pooled_score(self.side.pooled.float(), block.mean)
        return score

    def describe(self, block: TextBlock) -> Tensor | None:
        """The description's part of S, (B, T) or (1, T), with `dense="tokens"`; None without descriptions."""
        if self.net.config.dense != "tokens":
            return None
        paired = block.description_scores(self.net)
        if paired is not None:
            return paired
        words, mask = self.side.dense_words, self.side.dense_mask
        if words is None or mask is None:
            return None
        beside: Tensor = self.recompute(lambda: self._align_tokens(block, words.to(self.patches.dtype), mask))
        if self.net.config.pooled:
            beside = beside + self.net.pooled_score(masked_mean(words, mask), block.mean)
        return beside

    def _groups(self, block: TextBlock) -> list[Group]:
        groups = []
        for branch in self.branches:
            raw = pair_scores(self.net, self.side, self.unit_patches, branch, block)
            keep = self.net.decide(self.side, branch, raw)
            groups.append(Group({branch.name: keep}, extra_weights(raw, keep, self.side.valid)))
        if self.net.config.aggregation != "dual":
            return groups
        extra = torch.stack([group.extra for group in groups]).mean(dim=0)
        return [Group(dict(group.only for group in groups), extra)]

    def _described_only(self, score: Tensor) -> Tensor:
        """A second branch's S (B, T), zero for images without description: the branch is the description's."""
        described = self.side.described
        return score if described is None else torch.where(described[:, None], score, 0.0)

    def _align(self, block: TextBlock, rows: Tensor, columns: Tensor, extra: Tensor) -> Tensor:
        """Eq. 5 (B, T) from the merged patches' maxima (B, T, M) and (B, T, Q), joined by prefix and extra token."""
        best, across = self.other_maxima(block, extra)
        return self.net.hrpa.pool_both(torch.maximum(rows, best), torch.cat([columns, across], dim=-1), block.mask)

    def other_maxima(self, block: TextBlock, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Both maxima over the prefix tokens and the extra token: (B, T, M) and (B, T, P + 1), float32."""
        patches = self.patches[:, : extra.shape[-1]]
        tokens = torch.bmm(extra.transpose(0, 1).to(patches.dtype), patches)
        unit = F.normalize(tokens.float(), dim=-1).to(patches.dtype)
        others = torch.bmm(block.words.to(patches.dtype), unit.permute(1, 2, 0)).permute(2, 0, 1)[..., None]
        if self.prefix.shape[1]:
            others = torch.cat([self.word_products(block, self.prefix).permute(2, 0, 1, 3), others], dim=-1)
        return others.amax(dim=-1).float(), _best_word(others, block.mask).float()

    def _align_tokens(self, block: TextBlock, tokens: Tensor, token_mask: Tensor | None) -> Tensor:
        """S (B, T) of every text with tokens (B, K, C) that are of the image alone."""
        cosines = self.word_products(block, tokens)
        lowest = torch.finfo(cosines.dtype).min
        columns = cosines
        if block.mask is not None:
            columns = cosines.masked_fill(~block.mask[:, :, None, None], lowest)
        best_columns = columns.amax(dim=1).transpose(0, 1)
        if token_mask is not None:
            # An image without any token keeps finite values, which its weight of zero then leaves out.
            cosines = cosines.masked_fill(~token_mask & token_mask.any(dim=-1, keepdim=True), lowest)
        best_rows = cosines.amax(dim=-1).permute(2, 0, 1)
        tokens_valid = None if token_mask is None else token_mask[:, None]
        return self.net.hrpa.pool_both(best_rows, best_columns, block.mask, tokens_valid)


class FactoredScorer(BlockScorer):
    """One kept set per merged patch: products with e, norms from H."""

    weights: dict[str, Tensor]
    """By branch: e (B, Z, at least Q; zeros beyond)."""
    tables: dict[str, list[tuple[int, int, Tensor]]]
    """By branch: the upper blocks of H, see `upper_blocks`."""

    def prepare(self, scaled: Tensor) -> None:
        """Make e and what the norms need of each branch that texts change."""
        gram = torch.bmm(scaled, scaled.transpose(1, 2))
        pad, dtype = scaled.shape[1] - self.side.patches.shape[1], self.dtype
        weights = {b.name: branch_weights(self.side.logits[b.name], pad, dtype) for b in self.branches}
        self.make_tables(gram, weights)
        self.weights = {name: fill_rows(weight, dtype) for name, weight in weights.items()}

    def make_tables(self, gram: Tensor, weights: dict[str, Tensor]) -> None:
        """Make H from G = V V^T (B, Z, Z) and e (B, Z, Q) by branch, both float32."""
        self.tables = {name: upper_blocks(weight, gram, self.dtype) for name, weight in weights.items()}

    def maxima(self, block: TextBlock, group: Group) -> tuple[Tensor, Tensor]:
        """See `BlockScorer.maxima`."""
        name, keep = group.only
        keep = self.fit(keep)
        if block.packed is None:
            products = self.weighted_products(self.word_products(block, self.patches), name, keep)
            return _maxima(products, self.squared_norms(name, keep), block.mask)
        products = self._packed_products(block, block.packed, name, keep)
        return _maxima(products, self.squared_norms(name, keep), None)

    def fit(self, keep: Tensor) -> Tensor:
        """D in the products' dtype, padded to Z: (T, B, Z)."""
        return F.pad(keep.to(self.patches.dtype), (0, self.patches.shape[1] - keep.shape[-1]))

    def weighted_products(self, products: Tensor, name: str, keep: Tensor) -> Tensor:
        """(P * D) e: (T, M, B, Z) -> (B, T, M, Q), unscaled by any norm. Overwrites P without gradients."""
        texts, words, batch, count = products.shape
        if torch.is_grad_enabled():
            masked = products * keep[:, None]
        else:
            masked = zero_dropped(products.view(texts, words, -1), keep.reshape(texts, -1))
        rows = masked.view(texts * words, batch, count).transpose(0, 1)
        merged = self.side.logits[name].shape[-1]
        return torch.bmm(rows, self.weights[name]).view(batch, texts, words, -1)[..., :merged]

    def _packed_products(self, block: TextBlock, packed: PackedWords, name: str, keep: Tensor) -> Tensor:
        """`weighted_products` without work for padding, which comes back far below every value: (B, T, M, Q)."""
        batch, count, width = self.patches.shape
        products = (packed.words @ self.patches.reshape(-1, width).T).view(-1, batch, count)
        products.mul_(keep.index_select(0, packed.texts))
        merged = self.side.logits[name].shape[-1]
        found = torch.bmm(products.transpose(0, 1), self.weights[name])[..., :merged]
        spread = found.new_full((batch, block.words[..., 0].numel(), merged), _FAR)
        return spread.index_copy_(1, packed.places, found).view(batch, block.count, -1, merged)

    def squared_norms(self, name: str, keep: Tensor) -> Tensor:
        """D^T H_k D: (T, B, Z) -> (B, T, Q) float32."""
        by_image, tables = keep.transpose(0, 1), self.tables[name]
        parts = [quadratic(by_image[..., :stop], table, by_image[..., start:stop]) for start, stop, table in tables]
        return sum(parts[1:], parts[0])


class DualScorer(FactoredScorer):
    """Dual aggregation: two kept sets, each by its own softmax, so that the denominators do not cancel."""

    def make_tables(self, gram: Tensor, weights: dict[str, Tensor]) -> None:
        """Also make `diag(e^s_k) G diag(e^d_k)` (B, Z, Q * Z), between the branches."""
        super().make_tables(gram, weights)
        self.cross = weighted_gram(weights["caption"], gram, weights["dense"], self.dtype)

    def maxima(self, block: TextBlock, group: Group) -> tuple[Tensor, Tensor]:
        """See `BlockScorer.maxima`."""
        shared = self.word_products(block, self.patches)
        keeps = {name: self.fit(keep) for name, keep in group.keeps.items()}
        products: list[Tensor] = []
        norms: list[Tensor] = []
        shares: list[Tensor] = []
        for name, keep in keeps.items():
            weights = self.weights[name][..., : self.side.logits[name].shape[-1]]
            share = 1 / torch.bmm(keep.transpose(0, 1).float(), weights.float()).clamp_min(SMALLEST)
            own = shared if products or torch.is_grad_enabled() else shared.clone()
            products.append(self.weighted_products(own, name, keep).float() * share[:, :, None])
            norms.append(self.squared_norms(name, keep) * share.square())
            shares.append(share)
        first, second = (keep.transpose(0, 1) for keep in keeps.values())
        mixed = quadratic(first, self.cross, second)
        return _maxima(products[0] + products[1], norms[0] + norms[1] + 2 * shares[0] * shares[1] * mixed, block.mask)


class DirectScorer(BlockScorer):
    """The merged patches built per pair, with the maximum over the kept patches taken from the logits."""

    def maxima(self, block: TextBlock, group: Group) -> tuple[Tensor, Tensor]:
        """See `BlockScorer.maxima`."""
        patches, texts = self.side.patches.float(), block.count
        batch, count, width = patches.shape
        parts = []
        for name, keep in group.keeps.items():
            logits = self.side.logits[name].float().expand(texts, -1, -1, -1).flatten(0, 1)
            weights = merge_weights(logits, keep.flatten(0, 1)).view(texts, batch, count, -1)
            by_image = weights.permute(1, 0, 3, 2).reshape(batch, -1, count)
            parts.append(torch.bmm(by_image, patches).view(batch, texts, -1, width))
        tokens = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        by_text = tokens.transpose(0, 1).reshape(texts, -1, width)
        products = torch.bmm(block.words.float(), by_text.transpose(1, 2)).view(texts, -1, batch, tokens.shape[2])
        return _maxima(products.permute(2, 0, 1, 3), tokens.square().sum(dim=-1), block.mask)


def factored_scorer(
    net: PatchSlimming, side: ImageSide, dtype: torch.dtype, text_guides: Collection[str]
) -> FactoredScorer:
    """The factored form for the network's aggregation, and for the branches that the images have."""
    dual = net.config.aggregation == "dual" and len(present_branches(net, side)) == 2
    return (DualScorer if dual else FactoredScorer)(net, side, dtype, text_guides)


def _maxima(products: Tensor, squared_norms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`max_k` (B, T, M) and `max_j` (B, T, Q) of the cosines, from (B, T, M, Q) and (B, T, Q)."""
    cosines = products.float() * inverse_norms(squared_norms)[:, :, None]
    return cosines.amax(dim=-1), _best_word(cosines, mask)


def _best_word(cosines: Tensor, mask: Tensor | None) -> Tensor:
    """`max_j` over the words that are no padding: (B, T, M, K) -> (B, T, K)."""
    if mask is not None:
        cosines = cosines.masked_fill(~mask[:, :, None], torch.finfo(cosines.dtype).min)
    return cosines.amax(dim=2)
