"""Scoring on real photos: time and exactness of each backend, and what evaluation and training gain from it.

    python -m benchmarks.speed.real --data dev.jsonl [--model mini] [--device cuda] [--out FILE.json]

The reference loop is timed on the first captions only, and said so; differences are against it on those.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.metrics import recall
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.pretrained import from_pretrained
from seps.scoring import score_matrix, score_with_gradient


def timed(device: str, work: Any) -> tuple[float, Any]:
    """Seconds and result of a call."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.real", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--slice", type=int, default=24, help="captions the reference loop is timed on")
    parser.add_argument("--batch", type=int, default=32, help="pairs of a training step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = from_pretrained(options.model, device=options.device)
    if not isinstance(model.head, SlimmingHead):
        raise SystemExit("this benchmark is about slimming heads")
    net, dataset = model.head.net, load_jsonl(options.data)
    encode_seconds, tokens = timed(options.device, lambda: encode_images(model, dataset))
    texts = model.encode_texts(dataset.captions)
    dense, mask = model.encode_descriptions(dataset.dense)
    owner = dataset.image_of_caption
    rows: list[dict[str, Any]] = []
    print(f"{len(dataset)} images, {len(dataset.captions)} captions, encoding the images took {encode_seconds:.1f} s")
    print("description  backend    precision    us/pair   seconds for all   largest difference   rSum")
    for described in (False, True):
        extra: dict[str, Any] = {"dense": dense, "dense_lengths": mask.sum(dim=1)} if described else {}
        few = texts.words[: options.slice], texts.lengths[: options.slice]
        with torch.no_grad():
            seconds, exact = timed(
                options.device,
                lambda few=few, extra=extra: score_matrix(net, tokens, *few, backend="reference", **extra),
            )
        rows.append(_row(described, "reference", "float32", seconds, exact, None, None))
        for precision in ("float32", "half"):

            def work(precision: str = precision, extra: dict[str, Any] = extra) -> Any:
                return score_matrix(net, tokens, texts.words, texts.lengths, precision=precision, **extra)

            work()
            seconds, scores = timed(options.device, work)
            error = float((scores[:, : options.slice] - exact).abs().max())
            rows.append(_row(described, "auto", precision, seconds, scores, error, recall(scores, owner).rsum))
    rows += _training(options, net, tokens, texts.words, texts.lengths)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def _row(
    described: bool,
    backend: str,
    precision: str,
    seconds: float,
    scores: Tensor,
    error: float | None,
    rsum: float | None,
) -> dict[str, Any]:
    pairs = scores.numel()
    row = {
        "description": described,
        "backend": backend,
        "precision": precision,
        "us_per_pair": seconds / pairs * 1e6,
        "pairs": pairs,
        "seconds": seconds,
        "largest_difference": error,
        "rsum": rsum,
    }
    note = "" if error is not None else f"  (timed on {pairs} pairs)"
    print(
        f"{'yes' if described else 'no':12} {backend:10} {precision:10} {row['us_per_pair']:9.2f} {seconds:15.2f}   "
        f"{'' if error is None else f'{error:.1e}':>18} {'' if rsum is None else f'{rsum:10.2f}'}{note}",
        flush=True,
    )
    return row


def _training(
    options: argparse.Namespace, net: Any, tokens: Tensor, words: Tensor, lengths: Tensor
) -> list[dict[str, Any]]:
    """A forward and backward pass of the head on one batch: the network's own loop, and the scorer."""
    batch = min(options.batch, len(tokens))
    net.train()
    rows = []
    for name in ("loop", "scorer"):
        images = tokens[:batch].clone().requires_grad_()
        captions = words[:batch].clone().requires_grad_()

        def step(name: str = name, images: Tensor = images, captions: Tensor = captions) -> None:
            if name == "loop":
                scores = net(images, captions, lengths[:batch])[0]
            else:
                scores = score_with_gradient(net, images, captions, lengths[:batch]).similarity
            torch.autograd.backward(scores.square().mean())

        step()
        seconds, _ = timed(options.device, step)
        rows.append({"training": name, "batch": batch, "milliseconds": seconds * 1e3})
        print(f"training step of the head, batch {batch}, {name}: {seconds * 1e3:.0f} ms", flush=True)
    return rows


if __name__ == "__main__":
    main()
