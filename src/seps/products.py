"""On a CPU: float32 matrix products by the faster of the two libraries that torch brings.

`torch.matmul` takes MKL. On processors with AVX-512 oneDNN, which torch takes for convolutions, multiplies the same
numbers about twice as fast (an AMD EPYC of 2024: 240 against 110 GFLOP/s on one core). Both sum in float32; they
differ by the order of the sums. Gradients, autocast, tracing, other devices and other types stay with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LEAST = 2**21
"""Multiplications below which starting oneDNN costs more than it saves."""


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows weight^T + bias`: (..., I), (O, I), (O,) -> (..., O), as `torch.nn.functional.linear`.

    oneDNN makes code for each new number of rows (about 0.2 ms), so numbers of rows should come again.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or not _by_onednn(rows, weight):
        return F.linear(rows, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def linear_gelu(rows: Tensor, layer: nn.Linear) -> Tensor:
    """`gelu(layer(rows))` without the tanh form. oneDNN computes both in one pass, with the same values."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or not _is_plain(layer):
        return F.gelu(layer(rows))
    if not _by_onednn(rows, layer.weight):
        return F.gelu(layer(rows))
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, layer.weight, layer.bias, "gelu", [], "none")
    return found


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling the layer does no more than `Linear.forward`."""
    return type(layer).forward is Linear.forward and not (layer._forward_hooks or layer._forward_pre_hooks)


def _by_onednn(rows: Tensor, weight: Tensor) -> bool:
    if not (rows.dtype == weight.dtype == torch.float32 and rows.is_cpu and weight.is_cpu and _AVAILABLE):
        return False
    if rows.numel() * weight.shape[0] < _LEAST:
        return False
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return False
    if torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled:
        return False
    return not (_changed(rows) or _changed(weight))


def _changed(tensor: Tensor) -> bool:
    """Whether a tensor is a subclass or is in a transform such as `torch.func.vmap`, which oneDNN does not support."""
    return type(tensor) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _available() -> bool:
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]
    return known and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


_AVAILABLE = _available()


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return linear(input, self.weight, self.bias)
