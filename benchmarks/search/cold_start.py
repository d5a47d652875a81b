"""How long `seps search` takes from the shell, beside `import torch` alone, in alternation in one run.

    python -m benchmarks.search.cold_start [--models mini base base:vector] [--rounds 7] [--out FILE.json]

A store of the demo photos is made per model (and size) in a temporary folder. Every round starts one process per row:
Python importing torch, and a search by a sentence per store. That of one vector of `base` per picture imports no torch.
Printed are medians of wall time and processor time, and their ratios to those of `import torch`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from seps.retrieval.embedded import embedded_folder

TORCH, QUERY = "import torch", "a dog"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.cold_start", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mini", "base", "base:vector"], help="MODEL or MODEL:SIZE")
    parser.add_argument("--rounds", type=int, default=7, help="processes per row (default: 7)")
    parser.add_argument("--out", help="write the figures to this JSON file")
    options = parser.parse_args()
    seps = [sys.executable, "-m", "seps.cli.main"]
    gallery = embedded_folder("gallery")
    with tempfile.TemporaryDirectory() as work:
        commands = {TORCH: [sys.executable, "-c", TORCH]}
        for model in options.models:
            name, _, size = model.partition(":")
            store = str(Path(work, f"{name}-{size}"))
            kept = ["--size", size] if size else []
            subprocess.run([*seps, "index", str(gallery), "--store", store, "--model", name, *kept], check=True)
            commands[f"search, {model}"] = [*seps, "search", QUERY, "--store", store]
        rows = measure(commands, options.rounds)
    table(rows)
    if options.out:
        facts = {"rounds": options.rounds, "cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}
        Path(options.out).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, dict[str, Any]]:
    """By row the wall and processor seconds of each round; one round before them warms the file cache."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if number:
                spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                taken[name].append((wall, spent))
    return {
        name: {
            "wall": [round(wall, 3) for wall, _ in times],
            "processor": [round(spent, 3) for _, spent in times],
            "median_wall": round(median(wall for wall, _ in times), 3),
            "median_processor": round(median(spent for _, spent in times), 3),
            "ratio_wall": round(median(wall / own for (wall, _), (own, _) in zip(times, taken[TORCH], strict=True)), 2),
            "ratio_processor": round(
                median(spent / own for (_, spent), (_, own) in zip(times, taken[TORCH], strict=True)), 2
            ),
        }
        for name, times in taken.items()
    }


def table(rows: dict[str, dict[str, Any]]) -> None:
    """Print one line per row."""
    print("| process | wall, s | x import torch | processor, s | x import torch |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['median_wall']:.2f} | {row['ratio_wall']:.2f} | {row['median_processor']:.2f} | "
            f"{row['ratio_processor']:.2f} |"
        )


if __name__ == "__main__":
    main()
