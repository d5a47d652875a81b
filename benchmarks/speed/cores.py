"""All pairs on a CPU: the default call beside `net.forward`, plain MaxSim in torch and the reference loop, in one run.

    python -m benchmarks.speed.cores --out docs/results/scoring-cpu.json
    python tools/printed.py write

ViT-224 features (196 patches and CLS), captions of 8 to 23 words, float32, two threads. Every round runs each way once,
one after the other; a way's time is its best round. `net.forward` and the reference loop are timed on some captions
of the larger size, and the cost per pair is compared. About two minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common import machine
from benchmarks.speed import scoring
from benchmarks.speed.peers import torch_maxsim
from seps.scoring import score_matrix

SIZES = {(64, 64): 5, (250, 1250): 2}
"""Images and captions: rounds."""
FORWARD, LOOP = 64, 4
"""Captions with which `net.forward` and the reference loop are timed at most."""


def ways(images: int, captions: int) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """By name: how many pairs a call scores, and the call, which returns (images, captions) scores."""
    cpu = torch.device("cpu")
    net = scoring.make_net("vit224", "caption", cpu)
    data = scoring.make_inputs(net, images, captions, "caption", cpu)
    part = scoring.part_of(data, images, FORWARD)
    each = [scoring.text_of(scoring.part_of(data, images, LOOP), text) for text in range(LOOP)]
    tokens, words = normalize(data["img_embs"], dim=-1), normalize(data["cap_embs"], dim=-1)

    @torch.no_grad()
    def forward() -> Tensor:
        scores = net(part["img_embs"], part["cap_embs"], part["cap_lens"])
        assert isinstance(scores, Tensor)
        return scores

    def loop() -> Tensor:
        scores = [score_matrix(net, **one, backend="reference") for one in each]
        return torch.cat(scores, dim=1)  # type: ignore[arg-type]

    return {
        "default": (images * captions, partial(score_matrix, net, **data)),  # type: ignore[dict-item]
        "forward": (images * min(captions, FORWARD), forward),
        "maxsim": (images * captions, lambda: torch_maxsim(tokens, words, data["cap_lens"]).T),
        "loop": (images * LOOP, loop),
    }


def measure(images: int, captions: int, rounds: int) -> dict[str, Any]:
    """The seconds of each way, its microseconds per pair, and how far it is from the default call."""
    calls = ways(images, captions)
    best: dict[str, float] = {}
    scores: dict[str, Tensor] = {}
    for turn in range(rounds + 1):
        for name, (_, call) in calls.items():
            start = time.perf_counter()
            scores[name] = call()
            taken = time.perf_counter() - start
            if turn:  # the first round warms up
                best[name] = min(best.get(name, taken), taken)
    ours = best["default"] / calls["default"][0]
    row: dict[str, Any] = {"images": images, "captions": captions, "rounds": rounds, "ways": {}}
    for name, (pairs, _) in calls.items():
        per_pair = best[name] / pairs
        row["ways"][name] = {"pairs": pairs, "us_per_pair": per_pair * 1e6, "of_default": per_pair / ours}
    for name in ("forward", "loop"):
        gap = (scores["default"][:, : scores[name].shape[1]] - scores[name]).abs().max()
        row["ways"][name]["largest_difference"] = float(gap)
    return row


def main() -> None:
    """Measure every size, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the measurements here as JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="64 x 64 alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": machine.describe(torch.device("cpu")), "rows": []}
    for (images, captions), rounds in list(SIZES.items())[: 1 if options.small else None]:
        report["rows"].append(measure(images, captions, rounds))
        print(json.dumps(report["rows"][-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.out}; now python tools/printed.py write", file=sys.stderr)


if __name__ == "__main__":
    main()
