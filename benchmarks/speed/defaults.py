"""What a caller gets: the default call of `score_matrix` beside calls that name their precision and memory.

    python -m benchmarks.speed.defaults --out FILE.jsonl [--images 5000 --captions 25000] [--skip WORD ...]

Parts: `calls`, the calls of `CALLS`; `pairs`, the default call and half precision against strict float32 on all pairs;
`peers`, plain MaxSim by public kernels and by torch (benchmarks/speed/peers.py); `profile`.

One text branch, ViT-224 (196 patches and CLS), captions of 8 to 23 words, float32 features on the device. Each row is
printed when it is measured and appended to the file, so that a run that is cut short has left what it had. The first
row includes the compilation of the kernels, unless Triton's cache has them. The error is against the readable loop on a
slice, in strict float32; pairs further off than 1e-4 (half precision: 1e-3) are those of which another patch was kept.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.lines import append_line
from benchmarks.common.machine import PeakMemory, clock, describe, synchronise
from benchmarks.speed import peers
from benchmarks.speed.scoring import make_inputs, make_net, part_of
from seps.scoring import blocks, choose_backend, score_matrix

MIB = 2**20
PARTS = ("calls", "pairs", "peers", "profile")
FLIPS = {"float32": 1e-4, "half": 1e-3}
"""Scores further apart than this come of another kept patch, not of rounding."""
CALLS: dict[str, dict[str, Any]] = {
    "default, first time": {},
    "default, second time": {},
    "half, first time": {"precision": "half"},
    "half": {"precision": "half"},
    "half, 512 MiB": {"precision": "half", "memory": 512 * MIB},
    "half, 1,536 MiB": {"precision": "half", "memory": 1536 * MIB},
    "half, 6 GiB": {"precision": "half", "memory": 6144 * MIB},
    "half, 6 GiB, 128 images at once": {"precision": "half", "memory": 6144 * MIB},
    "float32, 1,536 MiB": {"memory": 1536 * MIB},
    "float32, 16 GiB, 128 images at once": {"memory": 16384 * MIB},
    "factored float32": {"backend": "factored"},
}


class Report:
    """Prints rows, and appends each to a file of JSON lines."""

    def __init__(self, path: Path | None, common: dict[str, Any]) -> None:
        self.path, self.common = path, common

    def add(self, told: str, **row: Any) -> None:
        """Print `told`, write the row."""
        print(told, flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, {**self.common, **row})


def _time(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds of one run, and the most bytes in use beyond what was."""
    synchronise(device)
    with PeakMemory(device) as peak:
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds = time.perf_counter() - start
    return seconds, peak.bytes


def _compare(scores: Tensor, exact: Tensor, precision: str) -> dict[str, Any]:
    """Largest difference, the largest of pairs with the same kept patches, and how many have others."""
    gaps = (scores - exact).abs()
    flipped = gaps > FLIPS[precision]
    return {
        "largest_difference": float(gaps.max()),
        "largest_below_flips": float(gaps.masked_fill(flipped, 0.0).max()),
        "flips": int(flipped.sum()),
        "pairs_compared": gaps.numel(),
    }


def _calls(
    arguments: argparse.Namespace, net: Any, data: dict[str, Any], device: torch.device, report: Report
) -> Tensor | None:
    """Time every call. Returns the scores of strict float32, where they were computed."""
    images, texts = arguments.images, arguments.captions
    exact = score_matrix(net, **part_of(data, min(images, 256), min(texts, 64)), backend="reference")
    choice = choose_backend(net, device, patches=net.config.num_patches, words=23)
    report.add(f"default call: {choice.backend}, {choice.reason}; budget {blocks.scoring_memory(device) // MIB} MiB")
    out = torch.empty(images, texts, device=device)
    strict: Tensor | None = None
    for name, options in CALLS.items():
        if any(word in name for word in arguments.skip):
            continue
        many = "128 images" in name
        before = blocks._MOST_IMAGES
        blocks._MOST_IMAGES = 128 if many else before
        try:
            seconds, peak = _time(partial(score_matrix, net, **data, **options, out=out), device)
        finally:
            blocks._MOST_IMAGES = before
        precision = options.get("precision", "float32")
        found = _compare(out[: exact.shape[0], : exact.shape[1]], exact, precision)
        if "factored" in name:
            strict = out.clone()
        report.add(
            f"{name:36} {seconds:8.3f} s  {peak / MIB:7.0f} MiB  largest difference {found['largest_difference']:.1e}, "
            f"without flips {found['largest_below_flips']:.1e}, flips {found['flips']} of {found['pairs_compared']}",
            call=name,
            seconds=seconds,
            peak_mib=peak / MIB,
            **found,
        )
    return strict


def _pairs(net: Any, data: dict[str, Any], strict: Tensor | None, device: torch.device, report: Report) -> None:
    """All pairs against the strict form, in slices."""
    out = torch.empty(data["img_embs"].shape[0], data["cap_embs"].shape[0], device=device)
    if strict is None:
        strict = torch.empty_like(out)
        score_matrix(net, **data, backend="factored", out=strict)
    for precision in ("float32", "half"):
        score_matrix(net, **data, precision=precision, out=out)
        parts = [_compare(*rows, precision) for rows in zip(out.split(500), strict.split(500), strict=True)]
        flips = sum(part["flips"] for part in parts)
        error = max(part["largest_below_flips"] for part in parts)
        told = f"{precision} against factored float32, all pairs"
        report.add(
            f"{told}: without flips {error:.1e}, flips {flips} of {out.numel()}",
            call=told,
            largest_below_flips=error,
            flips=flips,
            pairs_compared=out.numel(),
        )


def _profiles(net: Any, data: dict[str, Any], device: torch.device, report: Report) -> None:
    from torch.profiler import ProfilerActivity, profile

    few = part_of(data, 512, 25000)
    out = torch.empty(few["img_embs"].shape[0], few["cap_embs"].shape[0], device=device)
    for precision in ("float32", "half"):
        work = partial(score_matrix, net, **few, precision=precision, out=out)
        wall = clock(work, device, 2) * 1e3
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            work()
            synchronise(device)
        rows = []
        for event in trace.key_averages():
            own = event.self_device_time_total / 1e3
            if own > 0 and str(event.device_type).endswith("CUDA"):
                rows.append({"kernel": event.key[:90], "ms": own, "calls": event.count})
        rows.sort(key=lambda row: -float(row["ms"]))
        busy = sum(float(row["ms"]) for row in rows)
        report.add(
            f"\n{precision}, {out.shape[0]} x {out.shape[1]}: {wall:.1f} ms, busy {busy:.1f} ms",
            profile=precision,
            wall_ms=wall,
            busy_ms=busy,
            kernels=rows[:24],
        )
        for row in rows[:16]:
            print(f"{row['ms']:9.2f} ms  {row['ms'] / busy:6.1%}  {row['calls']:5} x  {row['kernel']}", flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--captions", type=int, default=25000)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument(
        "--skip", nargs="*", default=[], help="parts, and calls and packages whose name holds one of these words"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms  %(message)s")
    device = torch.device(arguments.device)
    report = Report(arguments.out, {"images": arguments.images, "captions": arguments.captions, **describe(device)})
    net = make_net("vit224", "caption", device)
    data = make_inputs(net, arguments.images, arguments.captions, "caption", device)
    wanted = [part for part in arguments.only if part not in arguments.skip]
    strict = _calls(arguments, net, data, device, report) if "calls" in wanted else None
    if "pairs" in wanted and "factored" not in arguments.skip:
        _pairs(net, data, strict, device, report)
    del strict
    if "peers" in wanted:
        peers.measure(data, device, report, arguments.skip)
    if device.type == "cuda" and "profile" in wanted:
        _profiles(net, data, device, report)


if __name__ == "__main__":
    main()
