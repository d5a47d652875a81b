"""The module for several sensors with each of its options."""

from __future__ import annotations

from typing import Any

import torch

import seps
from probes.bench import Bench
from probes.published import tensors
from probes.registry import probe

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept 0.7": {"sparse_ratio": 0.7},
    "merged 0.3": {"aggr_ratio": 0.3},
    "beta 0.1": {"beta": 0.1},
    "no own guide": {"own_guide": 0.0},
    "gumbel": {"decision": "gumbel"},
    "relaxed": {"decision": "relaxed"},
    "binary": {"decision": "binary"},
    "position": {"guides": "position"},
}


@probe("sensors", each=OPTIONS)
def module(_: Bench, name: str) -> dict[str, Any]:
    """Outputs and gradients in both modes."""
    generator = torch.Generator().manual_seed(2)
    patches = [torch.randn(4, 32, 16, generator=generator).requires_grad_() for _ in range(3)]
    means = [torch.randn(4, 16, generator=generator) for _ in range(3)]
    torch.manual_seed(0)
    net = seps.MultiModalSDTPS(embed_dim=16, num_patches=32, **OPTIONS[name])
    found: dict[str, Any] = {}
    for mode in (True, False):
        torch.manual_seed(3)
        out = tensors(net.train(mode)(*patches, *means))
        found["train" if mode else "eval"] = out
        floats = [value for value in _flat(out) if value.requires_grad]
        for tensor in patches:
            tensor.grad = None
        sum((value * torch.linspace(-1, 1, value.numel()).view_as(value)).sum() for value in floats).backward()
        found[f"gradients {mode}"] = [tensor.grad for tensor in patches]
    return found


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in _flat(item)]
