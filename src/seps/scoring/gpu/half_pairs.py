"""Float32 numbers as pairs of half-precision numbers, so that tensor cores multiply them without losing their digits.

A number x becomes `hi = half(x)` and `lo = half(x - hi)`: together 22 bits of it. The product of two such numbers is
`hi hi' + hi lo' + lo hi'`, summed in float32; what is left out, `lo lo'`, is 2^-22 of it at most. A matrix product does
this in one call, with its inner axis three times as long: `[hi, hi, lo]` on the left, `[hi, lo, hi]` on the right.

Shapes: X and Y rows, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 128.0
"""Unit vectors are multiplied by it, so that `lo` is no subnormal number; a power of two changes no digit."""
UNSCALE = 1.0 / SCALE**2
"""Brings products of two scaled numbers back."""
LOW = 2048.0
"""`lo` is kept so many times larger where hi and lo are multiplied apart: then it has the size of `hi`."""


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 values x into two float16 tensors: `hi`, x rounded, and `LOW * lo`, the scaled rest; x = hi + lo.

    The values must lie within +-65,504, the largest float16.
    """
    high = values.half()
    return high, (values - high.float()).mul_(LOW).half()


def as_left(values: Tensor) -> Tensor:
    """`[hi, hi, lo]` of values within [-1, 1], scaled: (..., C) -> (..., 3 C) float16."""
    return _triple(values, low_at=2)


def as_right(values: Tensor) -> Tensor:
    """`[hi, lo, hi]` of values within [-1, 1], scaled: (..., C) -> (..., 3 C) float16."""
    return _triple(values, low_at=1)


def _triple(values: Tensor, low_at: int) -> Tensor:
    scaled = values.float() * SCALE
    high = scaled.half()
    parts = torch.empty(*values.shape[:-1], 3, values.shape[-1], dtype=torch.float16, device=values.device)
    for place in range(3):
        parts[..., place, :] = scaled.sub(high).half() if place == low_at else high
    return parts.flatten(-2)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of rows x and y from `as_left(x)` (X, 3 C) and `as_right(y)` (Y, 3 C): (X, Y) float32.

    They are `SCALE ** 2` times too large; multiply by `UNSCALE`. Equal rows y get bit-equal products, so that ties of
    the selection are decided by the index and not by rounding.
    """
    if left.is_cuda:
        try:
            return torch.mm(left, right.T, out_dtype=torch.float32)  # type: ignore[call-overload,no-any-return,unused-ignore]
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError):
            # An older torch: slower, and as exact, also in TF32, which holds every half-precision number.
            return left.float() @ right.float().T
    # On the CPU edge columns take another order of summation, edge rows do not, and a single column has edge rows too.
    columns = left.float().T if left.shape[0] > 1 else left.float().T.expand(-1, 2)
    return (right.float() @ columns).T[: left.shape[0]].contiguous()
