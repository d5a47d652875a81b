"""`python -m benchmarks.speed`: every backend beside the reference loop, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine
from benchmarks.speed import scoring, training


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the measurements here as JSON")
    parser.add_argument("--only", nargs="*", choices=["scoring", "training"], default=["scoring", "training"])
    parser.add_argument("--shapes", nargs="*", choices=sorted(scoring.SHAPES), default=["vit224", "swin224", "vit384"])
    parser.add_argument("--size", choices=sorted(scoring.SIZES), help="images x captions: f30k 1K, coco 5K, or small")
    parser.add_argument("--branches", nargs="*", choices=scoring.TEXTS, default=["caption"])
    parser.add_argument("--precision", nargs="*", default=None, help="float32, half, bfloat16")
    parser.add_argument("--backends", nargs="*", default=None, help="factored, triton")
    parser.add_argument("--memory", type=float, default=1536, help="budget in MiB")
    parser.add_argument("--batch", type=int, nargs="*", default=None, help="batch sizes of the training step")
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Run what was asked for, print each row as it is measured, and write the JSON."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    report: dict[str, Any] = {"machine": machine.describe(device), "limits": machine.limits(device, arguments.quick)}
    print(json.dumps(report, indent=1), flush=True)
    rows: list[dict[str, Any]] = []
    if "scoring" in arguments.only:
        rows += scoring.run(arguments, device, report["limits"])
    if "training" in arguments.only:
        rows += training.run(arguments, device)
    report["rows"] = rows
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
