"""What `GramMaxima` is built from: e and H of every image (see `factored`), in the products' dtype.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches (R padded),
K tokens.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method import tokens
from seps.method.checks import InputError
from seps.method.config import DecisionKind
from seps.method.encoded import EncodedImages
from seps.method.network import PatchSlimming
from seps.method.parts import CustomMerger, Selector
from seps.method.published import CrossSparseAggrNet
from seps.method.select import num_kept

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


_METHODS = {name: value for name, value in vars(PatchSlimming).items() if isinstance(value, FunctionType)}
"""The steps of the network, as they were when this module was loaded."""


def changed_step(net: PatchSlimming, *names: str) -> str | None:
    """The first of these methods of the network that is not the one of this library; None when all are."""
    for name in names:
        if getattr(getattr(net, name), "__func__", None) is not _METHODS[name]:
            return name
    return None


def other_tokens(net: PatchSlimming) -> str | None:
    """Why products with e are not those of the tokens of `net`, as part of a sentence; None when they are."""
    changed = changed_step(net, "tokens", "weights")
    if changed is not None:
        return f"{type(net).__name__} has another {changed}"
    if isinstance(net.aggr_net, CustomMerger):
        return f"aggregation={net.config.aggregation!r} merges patches by itself"
    if net.hrpa.reads_cosines:
        return f"alignment={net.config.alignment!r} reads all cosines"
    return None


_FORWARDS = (PatchSlimming.forward, CrossSparseAggrNet.forward)


def other_forward(net: PatchSlimming) -> str | None:
    """Why calling `net` may run anything but its `score`; None where it does not."""
    if net._forward_hooks or net._forward_pre_hooks:
        return f"{type(net).__name__} has a hook on its forward"
    if "forward" in vars(net) or type(net).forward not in _FORWARDS or type(net).__call__ is not PatchSlimming.__call__:
        return f"{type(net).__name__} has another forward"
    return None


def scaled_patches(images: EncodedImages) -> Tensor:
    """(B, N, C) float32: the patches over the largest length of an image."""
    patches = images.patches.float()
    largest = patches.detach().norm(dim=-1, keepdim=True).amax(dim=1, keepdim=True)
    scaled: Tensor = patches / largest.clamp_min(1e-30)
    return scaled


def few_texts(texts: int, patches: int, cuda: bool) -> bool:
    """Whether so few texts come that making H costs more than it saves; the direct form is taken then.

    H takes N N Q values to write, a text about as many multiplications with it, against N Q C without it.
    """
    if cuda:
        return texts < patches // 4
    saved = 23.0 / patches - 0.025
    return saved <= 0 or texts < 0.75 / saved


def unsafe_images(net: PatchSlimming, images: EncodedImages, dtype: torch.dtype) -> Tensor:
    """(B,) bool: images in which the kept patches may all weigh next to nothing beside a dropped one.

    K patches are kept, so the best kept logit is at least the K-th lowest of its column.
    """
    unsafe = torch.zeros(images.patches.shape[0], dtype=torch.bool, device=images.patches.device)
    if net.draws_noise:
        # D carries a gradient there, also at dropped patches, which the reference bounds.
        return ~unsafe
    limit = _HALF_SPREAD if dtype == torch.float16 else _FLOAT_SPREAD
    kept = 1
    if images.valid is None and net.config.decision in ("topk", "gumbel", "relaxed") and keeps_whole_patches(net):
        kept = num_kept(images.patches.shape[1], net.config.sparse_ratio)
    for place, one in enumerate(images.sets):
        if place and one.logits is images.sets[0].logits:
            continue
        columns = one.logits.detach().float()
        high, low = columns.amax(dim=1), columns.amin(dim=1)
        if kept > 1 and (columns.is_cuda or bool(((high - low) > limit).any())):
            low = columns.kthvalue(kept, dim=1).values
        unsafe |= ((high - low) > limit).any(dim=-1)
    return unsafe


def keeps_whole_patches(net: PatchSlimming) -> bool:
    """Whether the selection is the library's own, so that D is zeros and ones, and a top-K keeps K patches."""
    selector = net.sparse_net_cap
    plain = type(selector) is Selector and not vars(selector).keys() & {"decide", "forward"}
    hooked = selector._forward_hooks or selector._forward_pre_hooks
    own = plain and not hooked and changed_step(net, "select") is None
    return own and net.config.decision in get_args(DecisionKind)


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
