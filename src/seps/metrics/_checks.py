"""Shape and value checks shared by the metrics: each refusal is a sentence with the shape or value in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    Array: TypeAlias = Tensor | ArrayLike


def _numbers(name: str, values: Array) -> Tensor:
    """`values` as a tensor without gradient; raises ValueError where they are no numbers, or rows differ in length."""
    if min(getattr(values, "strides", None) or (0,)) < 0:
        values = values.copy()  # type: ignore[union-attr]  # torch takes no array with a negative stride
    try:
        return torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as numbers ({error}). Give a tensor, an array or a list.") from error


def matrix(name: str, values: Array) -> Tensor:
    """`values` as a floating-point tensor (rows, columns); raises ValueError if it is none, or empty."""
    tensor = _numbers(name, values)
    if tensor.ndim != 2 or tensor.numel() == 0:
        raise ValueError(f"{name} must be a matrix with at least one entry; its shape is {tuple(tensor.shape)}.")
    if tensor.is_complex():
        raise ValueError(f"{name} must hold real numbers, not {tensor.dtype}.")
    # float64: float32 has no place for whole numbers above 2 ** 24, which would then tie.
    return tensor if tensor.is_floating_point() else tensor.double()


def labels(name: str, values: Array, length: int, device: torch.device) -> Tensor:
    """`values` as a long tensor (length,) on `device`; raises ValueError on another shape or on fractions."""
    tensor = _numbers(name, values)
    if tensor.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},); its shape is {tuple(tensor.shape)}.")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must hold whole numbers; its type is {tensor.dtype}.")
    return tensor.to(device=device, dtype=torch.long)


def check_cut_offs(ks: Sequence[int]) -> None:
    """Raise ValueError unless `ks` holds one whole number or more, each at least 1."""
    whole = isinstance(ks, Sequence) and all(isinstance(k, int) and not isinstance(k, bool) and k >= 1 for k in ks)
    if not whole or not ks:
        raise ValueError(f"ks must be one or more whole numbers, each 1 or more, such as (1, 5, 10); got {ks!r}.")


def refuse_nan(name: str, block: Tensor, first_row: int = 0) -> None:
    """Raise ValueError naming the first NaN of `block`, whose first row is row `first_row` of the whole."""
    # A NaN survives the sum, so the common case costs one cheap pass and no mask.
    if not torch.isnan(block.sum(dtype=torch.float32 if block.dtype != torch.float64 else None)):
        return
    bad = torch.isnan(block).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"{name} holds NaN, the first at row {first_row + row}, column {column}: "
            "it has no rank. Look for the overflow or the empty text that produced it."
        )
