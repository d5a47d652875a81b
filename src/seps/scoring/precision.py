"""Which dtype the products run in; the selection is always float32, without TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from seps.nn.checks import InputError

Precision = Literal["float32", "half", "bfloat16"]


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
