"""Block sizes of the fused kernels, on one block of images and texts: selection, with norms, with everything."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.machine import clock
from benchmarks.speed.scoring import make_inputs, make_net
from seps.scoring.gpu.fused import scorer
from seps.scoring.gpu.launches import KernelSizes
from seps.scoring.inputs import Texts

# The first of each name are of the kernels for 64 to 256 patches, the others of those for other shapes.
_NORMS: list[dict[str, Any]] = [
    {},
    {"held_warps": 8},
    {"held_rows": 128, "held_warps": 8},
    {"held_stages": 2},
    {"held_splits": 1},
    {"held_splits": 4},
    {"norm_group": 8, "norm_warps": 8},
    {"norm_stages": 2},
    {"norm_stages": 4},
]
_ALIGN: list[dict[str, Any]] = [
    {},
    {"slot_tiles": 8},
    {"slot_tiles": 64},
    {"slot_stages": 2},
    {"slot_rows": 128, "slot_warps": 8},
    {"align_stages": 2},
    {"align_stages": 4},
    {"align_registers": 128},
    {"align_patches": 32, "align_stages": 2},
    {"align_rows": 32},
]
_SELECT: list[dict[str, Any]] = [{"select_rows": rows} for rows in (1, 2, 4, 8)]


def run(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Time each kernel for each choice of blocks; microseconds per pair."""
    if device.type != "cuda":
        print("tuning needs a GPU")
        return []
    rows = []
    for shape in arguments.shapes:
        net = make_net(shape, "caption", device)
        data = make_inputs(net, 32, 1024, "caption", device)
        texts = Texts(data["cap_embs"], [16] * 1024, dtype=torch.float32)
        block = texts.block(0, 1024)
        pairs = 32 * 1024
        with torch.no_grad():
            side = net.encode_images(data["img_embs"])
            for kind, choices in (("select", _SELECT), ("norms", _NORMS), ("whole", _ALIGN)):
                for choice in choices:
                    sizes = replace(KernelSizes(), **choice)
                    try:
                        images = scorer(net, torch.float16, sizes)(side)
                        work: dict[str, Callable[[], object]] = {
                            "select": partial(images.select, block),
                            "norms": partial(images.decide, block),
                            "whole": partial(images.score, block),
                        }
                        micro = clock(work[kind], device, 5) / pairs * 1e6
                    except Exception as error:
                        print(f"{shape} {kind} {choice}: {type(error).__name__}", flush=True)
                        continue
                    rows.append({"tune": kind, "shape": shape, **choice, "us_per_pair": micro})
                    print(f"{shape} {kind} {choice}: {micro:.5f} us/pair", flush=True)
    return rows
