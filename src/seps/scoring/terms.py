"""What the factored form is built from: D of every pair, and e and H of every image (see `factored`).

D, which patches each text keeps of each image (Eq. 1-3), is decided in float32 always; e, H and the products with
them run in the products' dtype. `merged_maxima` is the same for training, with its backward pass written by hand.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches (R padded),
K tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from seps.config import Branch
from seps.nn.aggregation import merge
from seps.nn.checks import InputError
from seps.nn.guidance import cosine_attention, min_max
from seps.nn.image_side import ImageSide
from seps.nn.selection import extra_token, hard_topk, num_kept
from seps.nn.slimming import PatchSlimming
from seps.scoring.inputs import TextBlock

Precision = Literal["float32", "half", "bfloat16"]
SLAB = 2**22
"""Values of H that are made in float32 at once."""
SMALLEST = 1e-36
"""Squared norms up to this are zero."""


def product_dtype(precision: str | None, device: torch.device) -> torch.dtype:
    """The dtype of the large products.

    None follows autocast where it is on and is float32 elsewhere. Raises `InputError` for an unknown name.
    """
    if precision is None:
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return torch.float32
    if precision not in get_args(Precision):
        raise InputError(f"precision is {precision!r}; choose one of {', '.join(map(repr, get_args(Precision)))}.")
    return {"float32": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}[precision]


@contextmanager
def strict_float32() -> Iterator[None]:
    """Float32 products at full precision: TF32 would flip patches at the boundary of the selection."""
    settings = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    before = getattr(settings, name)
    setattr(settings, name, "ieee" if name == "fp32_precision" else False)
    try:
        yield
    finally:
        setattr(settings, name, before)


def present_branches(net: PatchSlimming, side: ImageSide) -> list[Branch]:
    """The branches the state was made for."""
    return [branch for branch in net.config.branches if branch.name in side.fixed_scores]


def draws_noise(net: PatchSlimming) -> bool:
    """Whether decisions are drawn at random: D differs from text to text then, and carries a gradient."""
    return net.training and net.config.decision != "topk"


def depends_on_text(net: PatchSlimming, branch: Branch, text_guides: Collection[str]) -> bool:
    """Whether another text may lead to another D in this branch; `text_guides` come with a text."""
    return draws_noise(net) or any(name in branch.guides for name in text_guides)


def unit_attention(unit_patches: Tensor, mean_TC: Tensor) -> Tensor:
    """cos(v_i, E_t) in float32, without gradient: (B, N, C), (T, C), both L2-normalised -> (T, B, N).

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


def pair_scores(net: PatchSlimming, side: ImageSide, unit_patches: Tensor, branch: Branch, block: TextBlock) -> Tensor:
    """s of Eq. 3 for all pairs: (T, B, N) float32."""
    scores = side.fixed_scores[branch.name].float()
    for name, mean in block.guides.items():
        weight = branch.guides.get(name, 0.0)
        if not weight:
            continue
        attention = unit_attention(unit_patches, mean)
        if net.config.scoring == "learned":
            attention = min_max(attention, side.valid)
        scores = scores + attention.mul_(weight)
    return scores.expand(block.count, *scores.shape[-2:])


def unsorted_topk(scores: Tensor, count: int) -> Tensor:
    """D of `hard_topk` for one K, without sorting: (..., N) -> (..., N) float32."""
    if count >= scores.shape[-1]:
        return torch.ones_like(scores)
    least = scores.kthvalue(scores.shape[-1] - count + 1, dim=-1, keepdim=True).values
    above, level = scores > least, scores == least
    room = count - above.sum(dim=-1, keepdim=True)
    # Of equal scores the lower index is kept.
    return (above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))).to(scores.dtype)


def kept_patches(net: PatchSlimming, side: ImageSide, branch: Branch, scores: Tensor) -> Tensor:
    """D (T, B, N) by the network's own decision."""
    module = net.sparse_net_cap if branch.name == "caption" else net.sparse_net_long
    hard = module.decision == "topk" or (module.decision in ("gumbel", "relaxed") and not module.training)
    if hard and side.valid is None:
        return unsorted_topk(scores.detach(), num_kept(scores.shape[-1], module.sparse_ratio))
    if hard:
        return hard_topk(scores, module.sparse_ratio, side.valid)
    return net.decide(side, branch, scores)


@dataclass
class FixedBranch:
    """A second branch that no text changes: its tokens (B, K, C), L2-normalised, and its D (B, N)."""

    tokens: Tensor
    keep: Tensor


def fixed_branch(net: PatchSlimming, side: ImageSide, branch: Branch) -> FixedBranch:
    """Select and aggregate once per image, in a branch that no text changes."""
    scores = side.fixed_scores[branch.name]
    keep = net.decide(side, branch, scores)
    merged = merge(side.patches, side.logits[branch.name], keep)
    extra = extra_token(side.patches, scores, keep, side.valid)
    return FixedBranch(F.normalize(torch.cat([side.prefix, merged, extra], dim=1).float(), dim=-1), keep)


def branch_weights(logits: Tensor, pad: int, dtype: torch.dtype) -> Tensor:
    """e (B, Z, Q), float32, in (0, 1], or stretched to use the range of float16."""
    values = logits.float()
    weights = torch.exp(values - values.detach().amax(dim=1, keepdim=True))
    if dtype == torch.float16:
        # So far that doubled sums of e G e over all patches stay below 65,504.
        weights = weights * float((30000.0 / (weights.shape[1] + pad)) ** 0.5)
    return F.pad(weights, (0, 0, 0, pad)) if pad else weights


def fill_rows(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in the products' dtype, their rows filled up, or GPUs and CPUs fall to slow paths."""
    full = 8 if dtype != torch.float32 else 4 if weights.is_cuda else 16
    return F.pad(weights.to(dtype), (0, -weights.shape[-1] % full))


def upper_blocks(weights: Tensor, gram: Tensor, dtype: torch.dtype) -> list[tuple[int, int, Tensor]]:
    """(start, stop, H[:, :stop, :, start:stop]) of the upper blocks of H, those off the diagonal doubled."""
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


def row_dots(left_XQN: Tensor, right_XN: Tensor) -> Tensor:
    """`sum_n left_xqn right_xn` in float32: (X, Q, N), (X, N) -> (X, Q)."""
    if left_XQN.dtype == torch.float32:
        if left_XQN.is_cuda:
            return torch.bmm(left_XQN, right_XN[..., None]).squeeze(-1)
        return (left_XQN * right_XN[:, None, :]).sum(dim=-1)
    if left_XQN.is_cuda and not torch.is_grad_enabled():
        try:
            # Half sums would overflow; the wider output keeps half reads.
            return torch.bmm(left_XQN, right_XN[..., None], out_dtype=torch.float32).squeeze(-1)  # type: ignore[call-overload,no-any-return,unused-ignore]
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError):
            pass
    return (left_XQN.float() * right_XN[:, None, :].float()).sum(dim=-1)


def zero_dropped(values_TMX: Tensor, keep_TX: Tensor) -> Tensor:
    """Multiply by zeros and ones in place: (T, M, X) by (T, X), contiguous and of one dtype.

    A product with a mask that is the same for all M is not vectorised on a GPU; the same as a bitwise "and" of eight
    bytes at a time is about three times faster.
    """
    if keep_TX.shape[-1] * keep_TX.itemsize % 8:
        return values_TMX.mul_(keep_TX[:, None])
    whole = torch.int32 if keep_TX.itemsize == 4 else torch.int16
    bits = keep_TX.to(whole).neg_().view(torch.int64)
    values_TMX.view(torch.int64).bitwise_and_(bits[:, None])
    return values_TMX


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


def quadratic(left: Tensor, block: Tensor, right: Tensor) -> Tensor:
    """`left^T block_k right` for each text and merged patch: (B, T, I), (B, I, Q * J), (B, T, J) -> (B, T, Q)."""
    result: Tensor = _Quadratic.apply(left, block, right)  # type: ignore[no-untyped-call]
    return result


def inverse_norms(norms: Tensor) -> Tensor:
    """`1 / sqrt(n)`, zero for a merged patch of length zero."""
    present = norms > SMALLEST
    return torch.where(present, norms, 1.0).rsqrt() * present


def merged_maxima(
    words: Tensor, patches: Tensor, weights: Tensor, gram: Tensor, keep: Tensor, mask: Tensor | None, merged: int
) -> tuple[Tensor, Tensor]:
    """`max_k A_jk` (B, T, M) and `max_j A_jk` (B, T, Q), float32, differentiable in the first four.

    Args:
        words: (T, M, C), zero at padding.
        patches: (B, Z, C) in the products' dtype.
        weights: e, (B, Z, R) in the products' dtype, zero beyond `merged` = Q.
        gram: V V^T, (B, Z, Z) float32.
        keep: D, (T, B, Z) in the products' dtype, zeros and ones.
        mask: (T, M) bool, True at words.
    """
    result: tuple[Tensor, Tensor] = _MergedMaxima.apply(words, patches, weights, gram, keep, mask, merged)  # type: ignore[no-untyped-call]
    return result


def _kept_products(words: Tensor, patches: Tensor, keep: Tensor) -> Tensor:
    """P * D: (T, M, C), (B, Z, C), (T, B, Z) -> (T * M, B, Z)."""
    texts, batch, count = keep.shape
    flat = words.flatten(0, 1) @ patches.flatten(0, 1).T
    return zero_dropped(flat.view(texts, -1, batch * count), keep.flatten(1)).view(-1, batch, count)


def _gram_norms(weights: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """n: (B, Z, Q), (B, Z, Z), (B, T, Z) -> (B, T, Q) float32."""
    batch, texts, count = keep.shape
    table = (gram[:, :, None, :] * weights.transpose(1, 2).contiguous()[:, None]).mul_(weights[..., None])
    rows = torch.bmm(keep, table.flatten(2)).view(batch * texts, -1, count)
    return row_dots(rows, keep.reshape(batch * texts, count)).view(batch, texts, -1)


def _gram_norms_backward(slope: Tensor, weights: Tensor, gram: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """de and dG from dn (B, T, Q); H is symmetric, and so is its gradient."""
    batch, _, count = keep.shape
    spread = (slope.to(keep.dtype)[..., None] * keep[:, :, None, :]).flatten(2)
    table = torch.bmm(keep.transpose(1, 2), spread).view(batch, count, -1, count)
    table.mul_(weights.transpose(1, 2).contiguous()[:, None])
    return 2 * torch.matmul(table, gram[..., None]).squeeze(-1), torch.matmul(weights[:, :, None], table).squeeze(2)


class _MergedMaxima(torch.autograd.Function):
    """See `merged_maxima`.

    A score depends on a pair's cosines through its maxima alone: one merged patch per word, one word per merged patch.
    So the forward pass keeps which those are, D and the norms, and the backward pass is a sparse scatter followed by
    matrix products. Nothing of the size (words x patches) or (merged x patches) of a pair is kept in between.
    With X = (P * D) e, n_k = D^T H_k D and A_jk = X_jk / sqrt(n_k) (see `factored`), given dA:

        dX_jk = dA_jk / sqrt(n_k)          dP = (dX e^T) * D       de = (P * D)^T dX
        dn_k  = -1/2 sum_j dA_jk A_jk / n_k                        dH_k = sum over texts of dn_k D D^T
        dG    = sum_k e_k dH_k e_k                                 de_k += 2 (dH_k * G) e_k
    """

    @staticmethod
    def forward(
        ctx: Any,
        words: Tensor,
        patches: Tensor,
        weights: Tensor,
        gram: Tensor,
        keep: Tensor,
        mask: Tensor | None,
        merged: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = patches.dtype
        texts, batch = keep.shape[:2]
        by_image = keep.transpose(0, 1).contiguous()
        norms = _gram_norms(weights[..., :merged], gram.to(dtype), by_image)
        products = _kept_products(words.to(dtype), patches, keep)
        cosines = torch.bmm(products.transpose(0, 1), weights).view(batch, texts, -1, weights.shape[-1])
        del products
        cosines = cosines[..., :merged].float().mul_(inverse_norms(norms)[:, :, None])
        rows, of_word = cosines.max(dim=-1)
        if mask is not None:
            cosines.masked_fill_(~mask[:, :, None], torch.finfo(torch.float32).min)
        columns, of_merged = cosines.max(dim=2)
        small = torch.int16 if max(cosines.shape[2:]) < 2**15 else torch.int32
        ctx.save_for_backward(
            words, patches, weights, gram, keep.bool(), norms, rows, columns, of_word.to(small), of_merged.to(small)
        )
        return rows, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Outside the autocast that the caller may be in: every dtype here was chosen in the forward pass.
        with torch.autocast(gradients[0].device.type, enabled=False):
            found = _gradients(ctx.saved_tensors, gradients[0], gradients[1], ctx.needs_input_grad[0])
            return *found, None, None, None


def _gradients(
    saved: tuple[Tensor, ...], d_rows: Tensor, d_columns: Tensor, want_words: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of words, patches, weights and Gram matrix from those of both maxima."""
    words, patches, weights, gram, keep, norms, rows, columns, of_word, of_merged = saved
    dtype, merged = patches.dtype, norms.shape[-1]
    keep, of_word, of_merged = keep.to(dtype), of_word.long(), of_merged.long()
    inverse = inverse_norms(norms)
    slope = (d_columns * columns).scatter_add_(-1, of_word, d_rows * rows).mul_(inverse.square()).mul_(-0.5)
    by_image = keep.transpose(0, 1).contiguous()
    d_weights, d_gram = _gram_norms_backward(slope, weights[..., :merged], gram.to(dtype), by_image)
    del slope, by_image
    d_cosines = torch.zeros(*rows.shape, weights.shape[-1], dtype=dtype, device=rows.device)
    d_cosines.scatter_(-1, of_word[..., None], (d_rows * inverse.gather(-1, of_word)).to(dtype)[..., None])
    d_cosines[..., :merged].scatter_add_(2, of_merged[:, :, None], (d_columns * inverse).to(dtype)[:, :, None])
    d_cosines = d_cosines.flatten(1, 2)
    unit = words.to(dtype)
    products = _kept_products(unit, patches, keep)
    d_all = torch.bmm(products.permute(1, 2, 0), d_cosines)
    d_all[..., :merged] += d_weights
    # P is needed no more: its gradient takes its place.
    torch.bmm(d_cosines, weights.transpose(1, 2), out=products.transpose(0, 1))
    del d_cosines
    d_products = zero_dropped(products.view(*words.shape[:2], -1), keep.flatten(1)).flatten(0, 1)
    d_words = None
    if want_words:
        d_words = (d_products @ patches.flatten(0, 1)).view_as(words).to(words.dtype)
    d_patches = (d_products.T @ unit.flatten(0, 1)).view_as(patches)
    return d_words, d_patches, d_all, d_gram.to(gram.dtype)
