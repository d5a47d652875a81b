"""What an early selection saves: time and operations of one network over the test shots, against keeping all."""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.selection.data import Sets, evaluation_batch
from benchmarks.selection.model import StudyModel
from benchmarks.selection.rows import ROWS, Row
from benchmarks.selection.runs import Recipe

TIMED = (ROWS["concat"], ROWS["keep-all"], ROWS["topk-25"], ROWS["early-topk-50"], ROWS["early-topk-25"])
EARLIEST = Row("early-topk-15", "score", 0.15, "sdtps", True)


@torch.no_grad()
def time_rows(sets: Sets, recipe: Recipe, repeats: int = 20) -> str:
    """A table in Markdown: milliseconds and GFLOPs (multiplications and additions) for all test shots."""
    device = sets.features.device
    shots = torch.cat([sets.split("query"), sets.split("gallery")])
    batch = evaluation_batch(sets, torch.zeros(1, dtype=torch.long, device=device), shots)
    given = (batch.features[0], batch.shares[0], batch.noise[0])
    lines = ["| row | ms | GFLOPs |", "|---|---:|---:|"]
    for row in (*TIMED, EARLIEST):
        model = StudyModel(row, sets.grid, 2, recipe.net).to(device).eval()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with FlopCounterMode(display=False) as counter:
                model(*given)
            found = []
            for _ in range(repeats if device.type == "cuda" else 3):
                _wait(device)
                started = time.perf_counter()
                model(*given)
                _wait(device)
                found.append(time.perf_counter() - started)
        lines.append(
            f"| `{row.name}` | {1000 * sorted(found)[len(found) // 2]:.2f} | {counter.get_total_flops() / 1e9:.2f} |"
        )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return (
        f"## Time of an early selection\n\n{len(shots)} shots of three sensors, one network, {where}, the stem not "
        "counted, median.\n\n" + "\n".join(lines) + "\n"
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
