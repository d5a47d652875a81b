"""All pairs of images and texts without a loop over texts and without a token per pair (method, section 7).

What a caption decides about an image is which patches are kept: D, zeros and ones. With `e_ik = exp(L_ik - c_k)`
(c_k cancels under the L2 norm) a merged patch of the pair is `u_k = sum_i D_i e_ik v_i`, so that

    word_j . u_k = ((P * D) e)_jk        P = words V^T, one product for all texts
    |u_k|^2     = D^T H_k D              H_k = diag(e_k) V V^T diag(e_k), of the image alone

H is symmetric: only its upper blocks are kept, those off the diagonal doubled. The extra token is built per pair
(one vector). An image whose logits spread too far for `e` takes the direct form: slower, same value.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.config import Branch
from seps.nn.aggregation import merge
from seps.nn.guidance import cosine_attention, min_max
from seps.nn.selection import TokenSparse, extra_token, hard_topk, num_kept
from seps.nn.slimming import ImageSide, PatchSlimming
from seps.scoring.precision import strict_float32
from seps.scoring.texts import TextBlock

_FLOAT_SPREAD = 40.0
"""exp(-40) squared is still a normal float32."""
SLAB = 2**22
"""Values of H that are made in float32 at once."""
_HALF_SPREAD = 7.0
"""With the scale of `_half_scale`, exp(-7) squared is still a normal float16."""


@dataclass
class BranchTerms:
    """Of one branch: the weights e (B, Z, at least Q; zeros beyond) and the upper blocks of H."""

    weights: Tensor
    blocks: list[tuple[int, int, Tensor]]
    """(start, stop, H[:, :stop, :, start:stop]) with off-diagonal blocks doubled."""


@dataclass
class Prepared:
    """A block of images, ready to meet any number of texts."""

    side: ImageSide
    unit_patches: Tensor
    """(B, N, C) float32, without gradient: for the selection."""
    patches: Tensor
    """(B, Z, C) in the products' dtype, each image scaled to a largest norm of 1."""
    prefix: Tensor
    """(B, P, C) L2-normalised."""
    terms: dict[str, BranchTerms]
    """By branch; empty where the direct form is taken."""
    gram: Tensor | None
    """(B, Z, Z) float32 where the backward pass recomputes (`maxima`); H is not made then."""
    cross: Tensor | None
    """Dual aggregation: (B, Z, Q * Z), diag(e^s_k) G diag(e^d_k)."""
    fixed_tokens: Tensor | None
    """(B, K, C) tokens of a second branch that no caption changes."""
    fixed_keep: Tensor | None
    """(B, N) D of that branch."""
    thrifty: bool = True
    """Make the extra tokens again in the backward pass rather than keep them."""


def depends_on_text(net: PatchSlimming, branch: Branch, paired: bool) -> bool:
    """Whether another text may lead to another D in this branch."""
    noisy = net.training and net.config.decision != "topk"
    return noisy or "caption" in branch.guides or (paired and "dense" in branch.guides)


def present_branches(net: PatchSlimming, side: ImageSide) -> list[Branch]:
    """The branches the state was made for."""
    return [branch for branch in net.config.branches if branch.name in side.fixed_scores]


def unsafe_images(net: PatchSlimming, side: ImageSide, dtype: torch.dtype) -> Tensor:
    """(B,) bool: images in which the kept patches may all weigh next to nothing beside a dropped one.

    K patches are kept, so the best kept logit is at least the K-th lowest of its column.
    """
    if net.training and net.config.decision != "topk":
        # D carries a gradient there, also at dropped patches, which the direct form bounds as the network does.
        return torch.ones(side.patches.shape[0], dtype=torch.bool, device=side.patches.device)
    limit = _HALF_SPREAD if dtype == torch.float16 else _FLOAT_SPREAD
    kept = 1
    if net.config.decision != "binary" and side.valid is None:
        kept = num_kept(side.patches.shape[1], net.config.sparse_ratio)
    unsafe = torch.zeros(side.patches.shape[0], dtype=torch.bool, device=side.patches.device)
    for logits in side.logits.values():
        columns = logits.detach().float()
        high, low = columns.amax(dim=1), columns.amin(dim=1)
        if kept > 1 and (columns.is_cuda or bool(((high - low) > limit).any())):
            low = columns.kthvalue(kept, dim=1).values
        unsafe |= ((high - low) > limit).any(dim=-1)
    return unsafe


def few_texts(texts: int, patches: int, cuda: bool) -> bool:
    """Whether so few texts come that making H costs more than it saves; the direct form is taken then.

    H takes N N Q values to write, a text about as many multiplications with it, against N Q C without it.
    """
    if cuda:
        return texts < patches // 4
    saved = 23.0 / patches - 0.025
    return saved <= 0 or texts < 0.75 / saved


def prepare(
    net: PatchSlimming,
    side: ImageSide,
    dtype: torch.dtype,
    *,
    paired: bool = False,
    direct: bool = False,
    recompute: bool = False,
) -> Prepared:
    """Everything of these images that all texts share; with `recompute` G in the place of H."""
    patches = side.patches.float()
    lengths = patches.detach().norm(dim=-1, keepdim=True)
    unit = patches.detach() / lengths.clamp_min(1e-12)
    largest = lengths.squeeze(-1).amax(dim=-1).clamp_min(1e-30)
    scaled = patches / largest[:, None, None]
    pad = 0 if dtype == torch.float32 else -patches.shape[1] % 16
    scaled = F.pad(scaled, (0, 0, 0, pad)) if pad else scaled
    branches = present_branches(net, side)
    per_text = [branch for branch in branches if depends_on_text(net, branch, paired)]
    terms: dict[str, BranchTerms] = {}
    gram = cross = fixed_tokens = fixed_keep = None
    if net.config.aggregation == "dual":
        per_text = branches
    elif len(per_text) < len(branches):
        fixed_tokens, fixed_keep = _fixed_group(net, side, branches[-1])
    if not direct:
        gram = torch.bmm(scaled, scaled.transpose(1, 2))
        weights = {branch.name: branch_weights(side.logits[branch.name], pad, dtype) for branch in per_text}
        for name, weight in weights.items():
            blocks = [] if recompute else _upper_blocks(weight, gram, dtype)
            terms[name] = BranchTerms(_aligned(weight, dtype), blocks)
        if net.config.aggregation == "dual" and len(per_text) == 2:
            first, second = weights["caption"], weights["dense"]
            cross = weighted_gram(first, gram, second, dtype)
    prefix = F.normalize(side.prefix.float(), dim=-1).to(dtype)
    kept = gram if recompute else None
    return Prepared(side, unit, scaled.to(dtype), prefix, terms, kept, cross, fixed_tokens, fixed_keep)


def _half_scale(patches: int) -> float:
    """How far e may be stretched so that doubled sums of e G e over all patches stay below 65,504."""
    return float((30000.0 / patches) ** 0.5)


def branch_weights(logits: Tensor, pad: int, dtype: torch.dtype) -> Tensor:
    """e (B, Z, Q), float32, in (0, 1], or stretched to use the range of float16."""
    values = logits.float()
    weights = torch.exp(values - values.detach().amax(dim=1, keepdim=True))
    if dtype == torch.float16:
        weights = weights * _half_scale(weights.shape[1] + pad)
    return F.pad(weights, (0, 0, 0, pad)) if pad else weights


def _aligned(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in the products' dtype, their rows filled up, or GPUs and CPUs fall to slow paths."""
    full = 8 if dtype != torch.float32 else 4 if weights.is_cuda else 16
    return F.pad(weights.to(dtype), (0, -weights.shape[-1] % full))


def _upper_blocks(weights: Tensor, gram: Tensor, dtype: torch.dtype) -> list[tuple[int, int, Tensor]]:
    count = weights.shape[1]
    # Two column blocks save a quarter of the arithmetic, seven three sevenths; on a GPU those would be too small.
    step = -(-count // (2 if weights.is_cuda or torch.is_grad_enabled() else 7))
    step += -step % 8 if dtype != torch.float32 else 0
    blocks = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        doubled = gram[:, :stop, start:stop] * 1.0
        doubled[:, :start] *= 2.0
        blocks.append((start, stop, weighted_gram(weights[:, :stop], doubled, weights[:, start:stop], dtype)))
    return blocks


def weighted_gram(left: Tensor, gram: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left_ik gram_ij right_jk` -> (B, I, Q * J), from (B, I, Q), (B, I, J), (B, J, Q) in float32.

    Without gradients a half table is made a few k at a time, so that the float32 form never stands whole.
    """
    batch, rows, merged = left.shape
    columns = right.shape[1]
    # Contiguous, or the table takes over its order and has to be copied.
    across = right.transpose(1, 2).contiguous()[:, None]
    if torch.is_grad_enabled():
        return (left[..., None] * (gram[:, :, None, :] * across)).to(dtype).flatten(2)
    if dtype == torch.float32:
        return (left[..., None] * across).mul_(gram[:, :, None, :]).flatten(2)
    table = torch.empty(batch, rows, merged, columns, dtype=dtype, device=gram.device)
    step = max(1, SLAB // max(1, batch * rows * columns))
    for start in range(0, merged, step):
        part = gram[:, :, None, :] * across[:, :, start : start + step]
        place, factor = table[:, :, start : start + step], left[:, :, start : start + step, None]
        place.copy_(part.mul_(factor))
    return table.flatten(2)


def _fixed_group(net: PatchSlimming, side: ImageSide, branch: Branch) -> tuple[Tensor, Tensor]:
    """Tokens (B, K, C) and D (B, N) of a branch that no caption changes."""
    scores = side.fixed_scores[branch.name]
    keep = net.decide(side, branch, scores)
    merged = merge(side.patches, side.logits[branch.name], keep)
    extra = extra_token(side.patches, scores, keep, side.valid)
    return F.normalize(torch.cat([side.prefix, merged, extra], dim=1).float(), dim=-1), keep


def branch_net(net: PatchSlimming, branch: Branch) -> TokenSparse:
    """The selection module of a branch."""
    return net.sparse_net_cap if branch.name == "caption" else net.sparse_net_long


def attention_with(unit_patches: Tensor, mean_TC: Tensor) -> Tensor:
    """cos(v_i, E_t) in float32, without gradient: (B, N, C), (T, C) -> (T, B, N).

    Equal patches get equal values, which the rule for ties needs.
    """
    batch, count, width = unit_patches.shape
    with torch.no_grad(), strict_float32():
        if unit_patches.is_cuda:
            return (mean_TC @ unit_patches.reshape(-1, width).T).view(-1, batch, count)
        if mean_TC.shape[0] == 1:
            return cosine_attention(unit_patches, mean_TC)[None]
        # On the CPU edge columns take another order of summation, edge rows do not: patches are the rows.
        cosines = unit_patches.reshape(-1, width) @ mean_TC.T
        return cosines.T.contiguous().view(-1, batch, count)


def pair_scores(net: PatchSlimming, prep: Prepared, branch: Branch, block: TextBlock) -> Tensor:
    """s of Eq. 3 for all pairs: (T, B, N) float32."""
    scores = prep.side.fixed_scores[branch.name].float()
    means = {"caption": block.mean}
    if block.paired is not None:
        means["dense"] = block.paired.mean
    for name, mean in means.items():
        weight = branch.guides.get(name, 0.0)
        if not weight:
            continue
        attention = attention_with(prep.unit_patches, mean)
        if net.config.scoring == "learned":
            attention = min_max(attention, prep.side.valid)
        scores = scores + attention.mul_(weight)
    return scores.expand(block.count, *scores.shape[-2:])


def keep_best(scores: Tensor, count: int) -> Tensor:
    """D of `hard_topk` for one K, without sorting: (..., N) -> (..., N) float32."""
    if count >= scores.shape[-1]:
        return torch.ones_like(scores)
    least = scores.kthvalue(scores.shape[-1] - count + 1, dim=-1, keepdim=True).values
    above, level = scores > least, scores == least
    room = count - above.sum(dim=-1, keepdim=True)
    # Of equal scores the lower index is kept.
    return (above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))).to(scores.dtype)


def decide(net: PatchSlimming, branch: Branch, scores: Tensor, side: ImageSide) -> Tensor:
    """D (T, B, N) by the network's own decision."""
    module = branch_net(net, branch)
    valid = side.valid
    hard = module.decision == "topk" or (module.decision == "gumbel" and not module.training)
    if hard and valid is None:
        return keep_best(scores.detach(), num_kept(scores.shape[-1], module.sparse_ratio))
    if hard:
        return hard_topk(scores, module.sparse_ratio, valid)
    return net.decide(side, branch, scores)
