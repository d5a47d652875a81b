"""What each option of the configuration costs: parameters, and the time of a training step and of scoring a pair.

    python -m benchmarks.speed.options [--rounds 9] [--out FILE.json]

Each row changes one option of `SlimmingConfig.open_source(dense="guide")` at width 512 and 196 patches, which is the
row `base` of the ablation; the rows of `MultiModalSDTPS` are compared with its defaults, those of the losses stand by
themselves. Times are CPU seconds of one thread, so that other programs on the machine disturb them little. The rows
are timed in turn, round after round; the figure is the median over the rounds of the row's time divided by the base's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import describe
from seps.method.config import LossConfig, SlimmingConfig
from seps.method.losses import SEPSLoss
from seps.method.network import PatchSlimming
from seps.method.sensors import MultiModalSDTPS
from seps.scoring import score_matrix, score_with_gradient

WIDTH, PATCHES, BATCH, GALLERY, WORDS, DESCRIPTION = 512, 196, 8, 32, 12, 40
SLIMMING: dict[str, dict[str, Any]] = {
    "base": {},
    "scoring=learned": {"scoring": "learned"},
    "beta=0": {"scoring": "learned", "beta": 0.0},
    "beta=0.125": {"scoring": "learned", "beta": 0.125},
    "beta=0.5": {"scoring": "learned", "beta": 0.5},
    "extra_guides=audio": {"extra_guides": {"audio": 0.25}},
    "dense=none": {"dense": "none"},
    "dense=branch": {"dense": "branch"},
    "dense=tokens": {"dense": "tokens"},
    "aggregation=dual": {"aggregation": "dual"},
    "alignment=topk": {"alignment": "topk"},
    "top_k=1": {"alignment": "topk", "top_k": 1},
    "top_k=10": {"alignment": "topk", "top_k": 10},
    "similarity=cosine": {"similarity": "cosine"},
    "decision=gumbel": {"decision": "gumbel"},
    "decision=relaxed": {"decision": "relaxed"},
    "decision=binary": {"decision": "binary"},
    "pooled=2": {"pooled": 2.0},
    "sparse_ratio=0.3": {"sparse_ratio": 0.3},
    "sparse_ratio=0.7": {"sparse_ratio": 0.7},
    "sparse_ratio=1": {"sparse_ratio": 1.0},
    "aggr_ratio=0.2": {"aggr_ratio": 0.2},
    "aggr_ratio=0.6": {"aggr_ratio": 0.6},
    "aggr_ratio=1": {"aggr_ratio": 1.0},
    "detach_patches=True": {"detach_patches": True},
    "embed_size=256": {"embed_size": 256},
    "num_patches=49": {"num_patches": 49},
    "num_prefix_tokens=0": {"num_prefix_tokens": 0},
    "preset=paper": {"scoring": "learned", "aggregation": "dual", "alignment": "topk", "similarity": "cosine"},
    "preset=default": {"scoring": "learned", "dense": "tokens", "similarity": "cosine", "pooled": 2.0},
}
SENSORS: dict[str, dict[str, Any]] = {
    "sensors": {},
    "guides=position": {"guides": "position"},
    "own_guide=0": {"own_guide": 0.0},
    "sensors, decision=relaxed": {"decision": "relaxed"},
}
LOSSES: dict[str, dict[str, Any]] = {
    "kind=triplet": {"kind": "triplet"},
    "kind=infonce": {"kind": "infonce"},
    "kind=sigmoid": {"kind": "sigmoid"},
    "hardest=False": {"kind": "triplet", "hardest": False},
    "ratio_form=unified": {"ratio_weight": 2.0, "ratio_form": "unified"},
    "ratio_form=separate": {"ratio_weight": 2.0, "ratio_form": "separate"},
    "ratio_form=printed": {"ratio_weight": 2.0, "ratio_form": "printed"},
}


def slimming(changes: dict[str, Any]) -> PatchSlimming:
    """The network of a row of `SLIMMING`."""
    sizes = {"embed_size": WIDTH, "num_patches": PATCHES, "dense": "guide"}
    return PatchSlimming(SlimmingConfig.open_source(**{**sizes, **changes}))


def parameters(module: torch.nn.Module) -> int:
    """How many weights learn."""
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)


def count(row: str) -> int:
    """Parameters of a row of any of the three tables."""
    if row in SLIMMING:
        return parameters(slimming(SLIMMING[row]))
    if row in SENSORS:
        return parameters(MultiModalSDTPS(WIDTH, 128, **SENSORS[row]))
    return parameters(SEPSLoss.from_config(LossConfig(**LOSSES[row])))


def _slimming_jobs(row: str) -> dict[str, Callable[[], object]]:
    net = slimming(SLIMMING[row]).train()
    config = net.config
    given: dict[str, Any] = {}
    if config.dense != "none":
        given = {"dense": torch.randn(GALLERY, DESCRIPTION, config.embed_size)}
    if config.extra_guides:
        given["guides"] = {"audio": torch.randn(GALLERY, config.embed_size)}
    images = torch.randn(GALLERY, config.num_prefix_tokens + config.num_patches, config.embed_size)
    words = torch.randn(GALLERY, WORDS, config.embed_size)
    first = {
        name: value[:BATCH] if name == "dense" else {"audio": value["audio"][:BATCH]} for name, value in given.items()
    }
    leaf = images[:BATCH].clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        net.zero_grad(set_to_none=True)
        torch.autograd.backward(score_with_gradient(net, leaf, words[:BATCH], **first).similarity.square().mean())

    return {"step": step, "pair": partial(score_matrix, net, images, words, **given)}


def _sensor_jobs(row: str) -> dict[str, Callable[[], object]]:
    net = MultiModalSDTPS(WIDTH, 128, **SENSORS[row]).train()
    leaves = [torch.randn(BATCH, 128, WIDTH, requires_grad=True) for _ in range(3)]
    vectors = [torch.randn(BATCH, WIDTH) for _ in range(3)]

    def step() -> None:
        tokens = net(*leaves, *vectors)[:3]
        torch.autograd.backward(torch.stack([part.square().mean() for part in tokens]).sum())

    return {"step": step}


def _loss_jobs(row: str) -> dict[str, Callable[[], object]]:
    loss = SEPSLoss.from_config(LossConfig(**LOSSES[row]))
    scores = torch.randn(128, 128, requires_grad=True)
    masks = tuple((torch.rand(128, 128, 49) < 0.5).float().requires_grad_() for _ in range(2))

    def step() -> None:
        torch.autograd.backward(loss(scores, masks)[0])

    return {"step": step}


def _seconds(job: Callable[[], object]) -> float:
    begin = time.process_time()
    job()
    return time.process_time() - begin


def measure(rows: dict[str, dict[str, Callable[[], object]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """CPU seconds of every job of every row, round after round; a first round is not counted."""
    found: dict[str, dict[str, list[float]]] = {row: {name: [] for name in jobs} for row, jobs in rows.items()}
    for turn in range(rounds + 1):
        for row, jobs in rows.items():
            for name, job in jobs.items():
                seconds = _seconds(job)
                if turn:
                    found[row][name].append(seconds)
    return found


def table(rows: dict[str, dict[str, list[float]]], base: str | None) -> list[dict[str, Any]]:
    """One line per row: parameters, milliseconds, and the time relative to the base's."""
    lines = []
    for row, jobs in rows.items():
        line: dict[str, Any] = {"option": row, "parameters": count(row)}
        for name, seconds in jobs.items():
            line[f"{name}_ms"] = round(1e3 * statistics.median(seconds), 3)
            if base is not None:
                ratios = [a / b for a, b in zip(seconds, rows[base][name], strict=True)]
                line[f"{name}_ratio"] = round(statistics.median(ratios), 2)
        lines.append(line)
    return lines


def keep_memory() -> None:
    """Let glibc keep freed memory: pages that are fetched again in every step would be most of what is timed."""
    with contextlib.suppress(AttributeError, OSError):
        for option, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)


def main() -> None:
    """Measure all rows, print them, and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.options",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()
    lines = []
    for names, jobs, base in (
        (SLIMMING, _slimming_jobs, "base"),
        (SENSORS, _sensor_jobs, "sensors"),
        (LOSSES, _loss_jobs, None),
    ):
        lines += table(measure({row: jobs(row) for row in names}, options.rounds), base)
    for line in lines:
        print(json.dumps(line), flush=True)
    if options.out is not None:
        report = {"machine": describe(torch.device("cpu")), "threads": 1, "rounds": options.rounds, "rows": lines}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
