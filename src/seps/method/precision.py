"""Products and small networks in float32, whatever autocast says and whatever dtype the weights have.

Half precision changes which patches are kept, which token is a word's best and which sample is the hardest: the score
changes a little, its gradient a lot. Everything that decides is therefore computed by the functions of this file.

Shapes: R rows, I inputs, S columns, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING or hasattr(torch, "func"):
    from torch.func import functional_call
else:  # before torch 2.0
    from torch.nn.utils.stateless import functional_call

_HALF = (torch.float16, torch.bfloat16)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off for the device of `tensor`; does nothing where it is off already."""
    kind = tensor.device.type
    if hasattr(torch, "get_autocast_dtype"):
        is_on = torch.is_autocast_enabled(kind)
    else:  # before torch 2.4 each kind has a function of its own
        is_on = torch.is_autocast_cpu_enabled() if kind == "cpu" else torch.is_autocast_enabled()
    # An exporter records a region of autocast as an operator of its own, so none is opened without need.
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()


def float_matmul(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in float32: (..., R, I), (..., I, S) -> (..., R, S)."""
    with without_autocast(left):
        return torch.matmul(left.float(), right.float())  # (..., R, I), (..., I, S) -> (..., R, S)


def float_apply(network: nn.Module, inputs: Tensor) -> Tensor:
    """`network(inputs)` in float32, (..., I) -> (..., O); half-precision weights are widened for the call."""
    weight = next(network.parameters())
    with without_autocast(inputs):
        if weight.dtype in _HALF:
            wide = {name: parameter.float() for name, parameter in network.named_parameters()}
            result: Tensor = functional_call(network, wide, inputs.float())  # (..., I) -> (..., O)
        else:
            result = network(inputs.to(weight.dtype))  # (..., I) -> (..., O)
        return result.float()  # (..., O)


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
