"""What the factored form is built from: D of every pair, e and H of every image (see `factored`).

D, which patches each text keeps of each image (Eq. 1-3), is decided in float32 always; e, H and the products with
them run in the products' dtype.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches (R padded),
K tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method import tokens
from seps.method.checks import InputError
from seps.method.config import Branch
from seps.method.encoded import ImageSide
from seps.method.network import PatchSlimming
from seps.method.score import cosine_attention
from seps.method.select import extra_token, num_kept
from seps.method.tokens import merge
from seps.scoring.inputs import TextBlock

Precision = Literal["float32", "half", "bfloat16"]
_FLOAT_SPREAD = 40.0
"""exp(-40) squared is still a normal float32."""
_HALF_SPREAD = 7.0
"""With the weights stretched to the range of float16, exp(-7) squared is still a normal float16."""
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
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Float32 products on a GPU at full precision, or of operands rounded to TF32."""
    settings = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    before = getattr(settings, name)
    setattr(settings, name, precision if name == "fp32_precision" else precision == "tf32")
    try:
        yield
    finally:
        setattr(settings, name, before)


def strict_float32() -> AbstractContextManager[None]:
    """Float32 products at full precision: TF32 would flip patches at the boundary of the selection."""
    return float32_products("ieee")


def present_branches(net: PatchSlimming, side: ImageSide) -> list[Branch]:
    """The branches the state was made for."""
    return [branch for branch in net.config.branches if branch.name in side.fixed_scores]


def draws_noise(net: PatchSlimming) -> bool:
    """Whether decisions are drawn at random: D differs from text to text then, and carries a gradient."""
    return net.training and net.config.decision != "topk"


def depends_on_text(net: PatchSlimming, branch: Branch, text_guides: Collection[str]) -> bool:
    """Whether another text may lead to another D in this branch; `text_guides` come with a text."""
    return draws_noise(net) or any(name in branch.guides for name in text_guides)


def unit_and_scaled(side: ImageSide) -> tuple[Tensor, Tensor]:
    """Two (B, N, C) float32: patches of length 1, without gradient, and patches over the largest length of an image."""
    patches = side.patches.float()
    lengths = patches.detach().norm(dim=-1, keepdim=True)
    largest = lengths.amax(dim=1, keepdim=True)
    return patches.detach() / lengths.clamp_min(1e-12), patches / largest.clamp_min(1e-30)


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
    attentions = {
        name: unit_attention(unit_patches, mean) for name, mean in block.guides.items() if branch.guides.get(name)
    }
    scores = net.guided(side, branch, attentions)
    return scores.expand(block.count, *scores.shape[-2:])


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


def few_texts(texts: int, patches: int, cuda: bool) -> bool:
    """Whether so few texts come that making H costs more than it saves; the direct form is taken then.

    H takes N N Q values to write, a text about as many multiplications with it, against N Q C without it.
    """
    if cuda:
        return texts < patches // 4
    saved = 23.0 / patches - 0.025
    return saved <= 0 or texts < 0.75 / saved


def unsafe_images(net: PatchSlimming, side: ImageSide, dtype: torch.dtype) -> Tensor:
    """(B,) bool: images in which the kept patches may all weigh next to nothing beside a dropped one.

    K patches are kept, so the best kept logit is at least the K-th lowest of its column.
    """
    if draws_noise(net):
        # D carries a gradient there, also at dropped patches, which the direct form bounds as the network does.
        return torch.ones(side.patches.shape[0], dtype=torch.bool, device=side.patches.device)
    limit = _HALF_SPREAD if dtype == torch.float16 else _FLOAT_SPREAD
    kept = 1
    if net.config.decision in ("topk", "gumbel", "relaxed") and side.valid is None:
        kept = num_kept(side.patches.shape[1], net.config.sparse_ratio)
    unsafe = torch.zeros(side.patches.shape[0], dtype=torch.bool, device=side.patches.device)
    for logits in side.logits.values():
        columns = logits.detach().float()
        high, low = columns.amax(dim=1), columns.amin(dim=1)
        if kept > 1 and (columns.is_cuda or bool(((high - low) > limit).any())):
            low = columns.kthvalue(kept, dim=1).values
        unsafe |= ((high - low) > limit).any(dim=-1)
    return unsafe


def branch_weights(logits: Tensor, pad: int, dtype: torch.dtype) -> Tensor:
    """e (B, Z, Q), float32, in (0, 1], or stretched to use the range of float16."""
    values = logits.float()
    weights = tokens.merge_factors(values, values.detach().amax(dim=1, keepdim=True))
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
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[keep_TX.itemsize]
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
