"""From the decisions D to the scores: products, norms, both maxima, pooling (see `factored` for the mathematics).

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from seps.nn.aggregation import merge_weights
from seps.nn.guidance import masked_mean
from seps.nn.selection import extra_weights
from seps.nn.slimming import ImageSide, PatchSlimming
from seps.scoring.factored import Prepared, decide, depends_on_text, pair_scores, present_branches
from seps.scoring.maxima import SMALLEST, merged_maxima
from seps.scoring.precision import row_dots, zero_dropped
from seps.scoring.texts import PackedWords, TextBlock

_FAR = -1e30


@dataclass
class BlockScores:
    """A block of texts against some images: the parts of S, (B, T) each, and D (T, B, N) of each branch."""

    patches: Tensor
    description: Tensor | None
    masks: list[Tensor]


def score_block(net: PatchSlimming, prep: Prepared, block: TextBlock, *, want_masks: bool = False) -> BlockScores:
    """The parts of S for a block of texts; `mix` puts them together."""
    branches = present_branches(net, prep.side)
    paired = block.paired is not None
    scores, masks = [], []
    keeps: list[Tensor] = []
    extras: list[Tensor] = []
    names: list[str] = []
    for branch in branches:
        if prep.fixed_keep is not None and not depends_on_text(net, branch, paired):
            masks.append(prep.fixed_keep.expand(block.count, -1, -1))
            continue
        raw = pair_scores(net, prep, branch, block)
        keep = decide(net, branch, raw, prep.side)
        keeps.append(keep)
        extras.append(extra_weights(raw, keep, prep.side.valid))
        names.append(branch.name)
        masks.append(keep)
    if net.config.aggregation == "dual":
        extra = torch.stack(extras).mean(dim=0)
        scores.append(_score_group(net, prep, block, names, keeps, extra))
    else:
        own = [block, block.paired if block.paired is not None else block]
        for position, name in enumerate(names):
            words = own[position] if net.config.dense == "branch" else block
            score = _score_group(net, prep, words, [name], [keeps[position]], extras[position])
            scores.append(_described_only(prep.side, score) if name == "dense" else score)
    total = scores[0] if len(scores) == 1 else torch.stack(scores).sum(dim=0)
    total = add_fixed_parts(net, prep, block, total)
    return BlockScores(total, describe(net, prep, block), masks if want_masks else [])


def add_fixed_parts(net: PatchSlimming, prep: Prepared, block: TextBlock, score: Tensor) -> Tensor:
    """Add what no decision changes: a second branch's tokens, and the pooled cosine."""
    tokens = prep.fixed_tokens
    if tokens is not None:
        second = _recomputed(prep, lambda: align_tokens(net, block, tokens.to(prep.patches.dtype), None))
        score = score + _described_only(prep.side, second)
    if net.config.pooled:
        score = score + net.pooled_score(prep.side.pooled.float(), block.mean)
    return score


def _described_only(side: ImageSide, score: Tensor) -> Tensor:
    """A second branch's S (B, T), zero for images without description: the branch is the description's."""
    return score if side.described is None else torch.where(side.described[:, None], score, 0.0)


def describe(net: PatchSlimming, prep: Prepared, block: TextBlock) -> Tensor | None:
    """The description's part of S, (B, T) or (1, T), with `dense="tokens"`; None without descriptions."""
    if net.config.dense != "tokens":
        return None
    if block.paired is not None:
        cosines = torch.bmm(block.words.float(), block.paired.words.float().transpose(1, 2))
        described = net.hrpa.align(cosines, block.mask, block.paired.mask)
        means = F.normalize(block.paired.words.float().sum(dim=1), dim=-1)
        return (described + net.config.pooled * (means * block.mean).sum(dim=-1))[None]
    words, mask = prep.side.dense_words, prep.side.dense_mask
    if words is None or mask is None:
        return None
    beside: Tensor = _recomputed(prep, lambda: align_tokens(net, block, words.to(prep.patches.dtype), mask))
    if net.config.pooled:
        beside = beside + net.pooled_score(masked_mean(words, mask), block.mean)
    return beside


def mix(net: PatchSlimming, side: ImageSide, patches: Tensor, description: Tensor | None) -> Tensor:
    """`(1 - g) S_patches + g S_words`; an image without description keeps S_patches."""
    if description is None:
        return patches
    mixed = patches + net.description_weight * (description - patches)
    if side.dense_mask is None:
        return mixed
    return torch.where(side.dense_mask.any(dim=-1, keepdim=True), mixed, patches)


def _recomputed(prep: Prepared, work: Callable[[], Any]) -> Any:
    """`work()`, made again in the backward pass where the images were prepared for that."""
    if prep.gram is None or not torch.is_grad_enabled():
        return work()
    return checkpoint(work, use_reentrant=False, preserve_rng_state=False)


def _score_group(
    net: PatchSlimming, prep: Prepared, block: TextBlock, names: list[str], keeps: list[Tensor], extra: Tensor
) -> Tensor:
    """S (B, T) of the words with the tokens [prefix, merged, extra] of these kept sets."""
    if prep.gram is not None and prep.terms:
        name = names[0]
        merged = prep.side.logits[name].shape[-1]
        rows, columns = merged_maxima(
            block.words,
            prep.patches,
            prep.terms[name].weights,
            prep.gram,
            _fit(keeps[0].detach(), prep),
            block.mask,
            merged,
        )
        return _with_others(net, prep, block, rows, columns, extra)
    columns_masked = False
    if not prep.terms:
        products, norms = _direct_terms(prep, block, names, keeps)
    elif len(names) == 2:
        products, norms = _dual_terms(prep, block, names, keeps)
    else:
        keep = _fit(keeps[0], prep)
        if block.packed is None:
            products = _masked_products(prep, word_products(prep, block), names[0], keep)
        else:
            products = _packed_products(prep, block, block.packed, names[0], keep)
            columns_masked = True
        norms = _norms(prep, names[0], keep)
    present = norms > SMALLEST
    inverse = torch.where(present, norms, 1.0).rsqrt() * present
    cosines = products.float() * inverse[:, :, None]
    columns = cosines.amax(dim=2) if columns_masked else _over_words(block, cosines)
    return _with_others(net, prep, block, cosines.amax(dim=-1), columns, extra)


def _fit(keep: Tensor, prep: Prepared) -> Tensor:
    """D in the products' dtype, padded to Z: (T, B, Z)."""
    return F.pad(keep.to(prep.patches.dtype), (0, prep.patches.shape[1] - keep.shape[-1]))


def word_products(prep: Prepared, block: TextBlock) -> Tensor:
    """P = words V^T for all pairs: (T, M, B, Z)."""
    batch, count, width = prep.patches.shape
    words = block.words.to(prep.patches.dtype).reshape(-1, width)
    return (words @ prep.patches.reshape(-1, width).T).view(block.count, -1, batch, count)


def _masked_products(prep: Prepared, products: Tensor, name: str, keep: Tensor) -> Tensor:
    """(P * D) e: (T, M, B, Z) -> (B, T, M, Q), unscaled by any norm. Overwrites P without gradients."""
    texts, words, batch, count = products.shape
    if torch.is_grad_enabled():
        masked = products * keep[:, None]
    else:
        masked = zero_dropped(products.view(texts, words, -1), keep.reshape(texts, -1))
    rows = masked.view(texts * words, batch, count).transpose(0, 1)
    merged = prep.side.logits[name].shape[-1]
    return torch.bmm(rows, prep.terms[name].weights).view(batch, texts, words, -1)[..., :merged]


def _packed_products(prep: Prepared, block: TextBlock, packed: PackedWords, name: str, keep: Tensor) -> Tensor:
    """`_masked_products` without work for padding, which comes back far below every value: (B, T, M, Q)."""
    batch, count, width = prep.patches.shape
    products = (packed.words @ prep.patches.reshape(-1, width).T).view(-1, batch, count)
    products.mul_(keep.index_select(0, packed.texts))
    merged = prep.side.logits[name].shape[-1]
    found = torch.bmm(products.transpose(0, 1), prep.terms[name].weights)[..., :merged]
    spread = found.new_full((batch, block.words[..., 0].numel(), merged), _FAR)
    return spread.index_copy_(1, packed.places, found).view(batch, block.count, -1, merged)


def _norms(prep: Prepared, name: str, keep: Tensor) -> Tensor:
    """D^T H_k D: (T, B, Z) -> (B, T, Q) float32."""
    by_image = keep.transpose(0, 1)
    total: Tensor | None = None
    for start, stop, block in prep.terms[name].blocks:
        part = _quadratic(by_image[..., :stop], block, by_image[..., start:stop])
        total = part if total is None else total + part
    if total is None:
        raise ValueError("an image without patches has no norms")
    return total


class _Quadratic(torch.autograd.Function):
    """`left^T block_k right`, differentiable in `block` alone, without keeping `left^T block`."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, block: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        batch, texts, width = right.shape
        rows = torch.bmm(left, block).view(batch * texts, -1, width)
        return row_dots(rows, right.reshape(batch * texts, width)).view(batch, texts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        left, right = ctx.saved_tensors
        spread = gradients[0].to(right.dtype)[..., None] * right[:, :, None, :]
        return None, torch.bmm(left.transpose(1, 2), spread.flatten(2)), None


def _quadratic(left: Tensor, block: Tensor, right: Tensor) -> Tensor:
    """`left^T block_k right` for each text and merged patch: (B, T, I), (B, I, Q * J), (B, T, J) -> (B, T, Q)."""
    result: Tensor = _Quadratic.apply(left, block, right)  # type: ignore[no-untyped-call]
    return result


def _dual_terms(prep: Prepared, block: TextBlock, names: list[str], keeps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Dual aggregation: each kept set by its own softmax, so that the denominators do not cancel."""
    fitted = [_fit(keep, prep) for keep in keeps]
    shared = word_products(prep, block)
    products: Tensor | None = None
    norms: Tensor | None = None
    shares = []
    for position, (name, keep) in enumerate(zip(names, fitted, strict=True)):
        weights = prep.terms[name].weights[..., : prep.side.logits[name].shape[-1]]
        share = 1 / torch.bmm(keep.transpose(0, 1).float(), weights.float()).clamp_min(SMALLEST)
        own = shared if position or torch.is_grad_enabled() else shared.clone()
        part = _masked_products(prep, own, name, keep).float() * share[:, :, None]
        norm = _norms(prep, name, keep) * share.square()
        products = part if products is None else products + part
        norms = norm if norms is None else norms + norm
        shares.append(share)
    if products is None or norms is None or prep.cross is None:
        raise ValueError("dual aggregation needs both branches")
    mixed = _quadratic(fitted[0].transpose(0, 1), prep.cross, fitted[1].transpose(0, 1))
    return products, norms + 2 * shares[0] * shares[1] * mixed


def _direct_terms(prep: Prepared, block: TextBlock, names: list[str], keeps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The merged patches built for each pair, with the maximum over the kept patches taken from the logits."""
    patches = prep.side.patches.float()
    batch, count, width = patches.shape
    texts = block.count
    tokens: Tensor | None = None
    for name, keep in zip(names, keeps, strict=True):
        logits = prep.side.logits[name].float().expand(texts, -1, -1, -1).flatten(0, 1)
        weights = merge_weights(logits, keep.flatten(0, 1)).view(texts, batch, count, -1)
        by_image = weights.permute(1, 0, 3, 2).reshape(batch, -1, count)
        merged = torch.bmm(by_image, patches).view(batch, texts, -1, width)
        tokens = merged if tokens is None else tokens + merged
    if tokens is None:
        raise ValueError("a group of tokens needs a branch")
    by_text = tokens.transpose(0, 1).reshape(texts, -1, width)
    products = torch.bmm(block.words.float(), by_text.transpose(1, 2)).view(texts, -1, batch, tokens.shape[2])
    return products.permute(2, 0, 1, 3), tokens.square().sum(dim=-1)


def _extra_cosines(prep: Prepared, block: TextBlock, extra: Tensor) -> Tensor:
    """Cosines of the words with each pair's extra token: (T, B, N) weights -> (B, T, M)."""
    patches = prep.patches[:, : extra.shape[-1]]
    tokens = torch.bmm(extra.transpose(0, 1).to(patches.dtype), patches)
    unit = F.normalize(tokens.float(), dim=-1).to(patches.dtype)
    words = block.words.to(patches.dtype)
    return torch.bmm(words, unit.permute(1, 2, 0)).permute(2, 0, 1)


def _with_others(
    net: PatchSlimming, prep: Prepared, block: TextBlock, rows: Tensor, columns: Tensor, extra: Tensor
) -> Tensor:
    """Eq. 5 (B, T) from the merged patches' maxima (B, T, M) and (B, T, Q), joined by prefix and extra token.

    LeakyReLU rises, so it commutes with the maxima and is taken of them alone.
    """

    def work() -> tuple[Tensor, Tensor]:
        return _other_maxima(prep, block, extra)

    best, across = _recomputed(prep, work) if prep.thrifty else work()
    return _pool(net, torch.maximum(rows, best), torch.cat([columns, across], dim=-1), block.mask, None)


def _other_maxima(prep: Prepared, block: TextBlock, extra: Tensor) -> tuple[Tensor, Tensor]:
    """Both maxima over the prefix tokens and the extra token: (B, T, M) and (B, T, P + 1), float32."""
    others = _extra_cosines(prep, block, extra)[..., None]
    if prep.prefix.shape[1]:
        others = torch.cat([token_cosines(block, prep.prefix).permute(2, 0, 1, 3), others], dim=-1)
    return others.amax(dim=-1).float(), _over_words(block, others).float()


def _over_words(block: TextBlock, cosines: Tensor) -> Tensor:
    """`max_j` over the words that are no padding: (B, T, M, K) -> (B, T, K)."""
    if block.mask is not None:
        cosines = cosines.masked_fill(~block.mask[:, :, None], torch.finfo(cosines.dtype).min)
    return cosines.amax(dim=2)


def token_cosines(block: TextBlock, tokens: Tensor) -> Tensor:
    """Words of every text with ready tokens (B, K, C): (T, M, B, K)."""
    batch, count, width = tokens.shape
    flat = block.words.to(tokens.dtype).reshape(-1, width) @ tokens.reshape(-1, width).T
    return flat.view(block.count, -1, batch, count)


def align_tokens(net: PatchSlimming, block: TextBlock, tokens: Tensor, token_mask: Tensor | None) -> Tensor:
    """S (B, T) of every text with tokens (B, K, C) that are of the image alone."""
    cosines = token_cosines(block, tokens)
    lowest = torch.finfo(cosines.dtype).min
    columns = cosines
    if block.mask is not None:
        columns = cosines.masked_fill(~block.mask[:, :, None, None], lowest)
    best_columns = columns.amax(dim=1).transpose(0, 1)
    if token_mask is not None:
        # An image without any token keeps finite values, which its weight of zero then leaves out.
        cosines = cosines.masked_fill(~token_mask & token_mask.any(dim=-1, keepdim=True), lowest)
    best_rows = cosines.amax(dim=-1).permute(2, 0, 1)
    return _pool(net, best_rows, best_columns, block.mask, token_mask)


def _pool(
    net: PatchSlimming, rows: Tensor, columns: Tensor, word_mask: Tensor | None, token_mask: Tensor | None
) -> Tensor:
    """Eq. 5 from the maxima (B, T, M) and (B, T, K)."""
    rows, columns = rows.float(), columns.float()
    if net.hrpa.scan:
        rows, columns = F.leaky_relu(rows, 0.1), F.leaky_relu(columns, 0.1)
    score = net.hrpa.pool(rows, word_mask)
    if net.hrpa.bidirectional:
        score = score + net.hrpa.pool(columns, None if token_mask is None else token_mask[:, None])
    return score
