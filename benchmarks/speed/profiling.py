"""Where the time goes: kernels of one scoring call and of one training step, by their total time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.machine import clock, synchronise
from benchmarks.speed.scoring import make_inputs, make_net
from benchmarks.speed.training import factored, step
from seps.scoring import score_matrix

_SHOWN = 28


def _kernels(name: str, work: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """One row for each kernel of `work`, the costliest first; the wall time is measured without the profiler."""
    wall = clock(work, device, 3) * 1e3
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as trace:
        work()
        synchronise(device)
    cuda = device.type == "cuda"
    rows = []
    for event in trace.key_averages():
        own = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
        if own > 0 and (not cuda or str(event.device_type).endswith("CUDA")):
            rows.append({"profile": name, "kernel": event.key[:100], "ms": own, "calls": event.count})
    rows.sort(key=lambda row: -float(row["ms"]))
    busy = sum(float(row["ms"]) for row in rows)
    calls = sum(int(row["calls"]) for row in rows)
    print(f"\n{name}: {wall:.2f} ms, {busy:.2f} ms in {calls} kernels", flush=True)
    for row in rows[:_SHOWN]:
        print(f"{row['ms']:9.3f} ms  {row['ms'] / busy:6.1%}  {row['calls']:5} x  {row['kernel']}", flush=True)
    return [{"profile": name, "wall_ms": wall, "busy_ms": busy, "calls": calls}, *rows[:_SHOWN]]


def run(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Profile scoring of every shape asked for, and the training step of every batch."""
    rows = []
    precision = (arguments.precision or ["half" if device.type == "cuda" else "float32"])[0]
    images, texts = (4, 16) if arguments.quick else (512, 25000) if device.type == "cuda" else (64, 64)
    for shape in arguments.shapes:
        for mode in arguments.branches:
            net = make_net(shape, mode, device)
            data = make_inputs(net, images, texts, mode, device)
            out = torch.empty(images, texts, device=device)
            score = partial(
                score_matrix, net, **data, precision=precision, memory=int(arguments.memory * 2**20), out=out
            )
            rows += _kernels(f"scoring {shape} {mode} {images} x {texts} {precision}", score, device)
            del data, out
    for batch in arguments.batch or []:
        net = make_net("vit224", "published", device).train()
        data = make_inputs(net, batch, batch, "published", device)
        leaves = [data[name].requires_grad_() for name in ("img_embs", "cap_embs", "paired_dense")]
        wanted = "bfloat16" if device.type == "cuda" else "float32"
        work = partial(step, net, leaves, partial(factored, net, data, wanted))
        rows += _kernels(f"training step, batch {batch} {wanted}", work, device)
    return rows
