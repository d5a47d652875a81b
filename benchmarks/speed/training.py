"""The training step of the alignment network, forward and backward, both branches as published."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import PeakMemory, clock
from benchmarks.speed.scoring import make_inputs, make_net
from seps.method.network import PatchSlimming
from seps.method.published import score_published_pairing
from seps.scoring import score_with_gradient


def _loop(net: PatchSlimming, data: dict[str, Any]) -> Tensor:
    dense, dense_lengths = data["paired_dense"], data["paired_dense_lengths"]
    return score_published_pairing(net, data["img_embs"], data["cap_embs"], data["cap_lens"], dense, dense_lengths)[0]


def factored(net: PatchSlimming, data: dict[str, Any], precision: str) -> Tensor:
    """Similarities with gradients, by the scorer."""
    return score_with_gradient(
        net,
        data["img_embs"],
        data["cap_embs"],
        data["cap_lens"],
        paired_dense=data["paired_dense"],
        paired_dense_lengths=data["paired_dense_lengths"],
        precision=precision,
    ).similarity


def step(net: PatchSlimming, leaves: list[Tensor], forward: Callable[[], Tensor]) -> None:
    """Forward and backward to the parameters and all inputs."""
    net.zero_grad(set_to_none=True)
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(forward().square().mean())


def run(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds and peak memory of one step; the network's own loop at the smallest batch alone."""
    cuda = device.type == "cuda"
    batches = arguments.batch or ([4] if arguments.quick else [32, 64, 128] if cuda else [16])
    precisions = arguments.precision or (["float32", "bfloat16"] if cuda else ["float32"])
    print("\ntraining step, ViT-224, caption and dense branch  batch  precision        ms   peak MiB")
    rows = []
    for batch in batches:
        net = make_net("vit224", "published", device).train()
        data = make_inputs(net, batch, batch, "published", device)
        leaves = [data[name].requires_grad_() for name in ("img_embs", "cap_embs", "paired_dense")]
        forwards: dict[tuple[str, str], Callable[[], Tensor]] = {}
        if batch == min(batches):
            forwards["loop", "float32"] = partial(_loop, net, data)
        for precision in precisions:
            if precision != "half":
                forwards["factored", precision] = partial(factored, net, data, precision)
        for (backend, precision), forward in forwards.items():
            with PeakMemory(device) as peak:
                seconds = clock(partial(step, net, leaves, forward), device, 3 if cuda else 1)
            row = {
                "training": backend,
                "precision": precision,
                "batch": batch,
                "ms": seconds * 1e3,
                "peak_mib": peak.bytes / 2**20,
            }
            rows.append(row)
            print(f"{backend:48} {batch:6}  {precision:9} {row['ms']:9.1f} {row['peak_mib']:10.0f}", flush=True)
    return rows
