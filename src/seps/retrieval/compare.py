"""Baselines in one harness: the same data, recipe and seeds, one table.

Each entry changes the base configuration in what it is about and nothing else. Finished runs are kept as JSON lines,
so that an interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.retrieval.config import PartWeights, RunConfig
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.evaluate import evaluate
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.protocol import Protocol
from seps.retrieval.task import RetrievalTask
from seps.retrieval.training import choose_trust
from seps.training import find_checkpoint, load_weights, train

Log = Callable[[str], None]


def _model(**changes: Any) -> Callable[[RunConfig], RunConfig]:
    whole = PartWeights(fused=1.0)
    return lambda base: replace(
        base, model=replace(base.model, slimming={}, **changes), parts=whole, choose_trust=False, pairing="image"
    )


def _published(base: RunConfig) -> RunConfig:
    return replace(_model(preset="open_source")(base), pairing="published")


BASELINES: Mapping[str, tuple[str, Callable[[RunConfig], RunConfig]]] = {
    "mean": ("mean patch against mean word (VSE++ style)", _model(head="mean")),
    "scan-t2i": ("stacked cross attention, words to patches", _model(head="scan-t2i")),
    "scan-i2t": ("stacked cross attention, patches to words", _model(head="scan-i2t")),
    "scan": ("stacked cross attention, both ways", _model(head="scan")),
    "slimming": (
        "slimming by the caption alone (LAPS style)",
        lambda base: replace(
            _model(preset="open_source")(base),
            model=replace(base.model, preset="open_source", slimming={"dense": "none"}),
        ),
    ),
    "open-source": ("SEPS as its published code, description on the image's side", _model(preset="open_source")),
    "paper": ("SEPS as printed, description on the image's side", _model(preset="paper")),
    "published": ("SEPS as its published code, trained with the query carrying its target's text", _published),
    "description": ("description alone, no pixels", _model(head="description")),
    "default": ("ours: pixels and description, each trained to its own best", lambda base: base),
}


def protocols_for(model: RetrievalModel) -> list[Protocol]:
    """Under which protocols a model can be measured."""
    if not model.head.uses_description:
        return ["none"]
    if not model.head.uses_pixels:
        return ["image"]
    leaks = isinstance(model.head, SlimmingHead) and model.head.net.config.dense == "branch"
    return ["none", "image", "published"] if leaks else ["none", "image"]


def run_one(
    name: str,
    base: RunConfig,
    seed: int,
    folder: Path,
    data: tuple[RetrievalDataset, list[RetrievalDataset]],
    pixels: tuple[Tensor, list[Tensor]],
    *,
    device: torch.device | str,
    log: Log,
) -> dict[str, Any]:
    """Train one entry with one seed and measure it on every dev set under every protocol it knows."""
    config = BASELINES[name][1](base)
    config = replace(config, train=replace(config.train, seed=seed))
    torch.manual_seed(seed)
    model = RetrievalModel(config.model)
    task = RetrievalTask(model, config, *data, pixels=pixels[0], dev_pixels=pixels[1])
    started = time.perf_counter()
    run_dir = folder / f"{name}-{seed}"
    train(task, config.train, run_dir, device=device, log=log, about={"baseline": name})
    seconds = time.perf_counter() - started
    weights = load_weights(find_checkpoint(run_dir, "best"))
    own = {key.removeprefix("model."): value for key, value in weights.items() if key.startswith("model.")}
    model.load_state_dict(own)
    model.to(device).eval()
    if config.choose_trust and model.trust is not None:
        choose_trust(model, data[1], pixels[1])
    rsums = {
        f"{part.split}/{protocol}": evaluate(model, part, protocol, pixels=shown).metrics.rsum
        for part, shown in zip(data[1], pixels[1], strict=True)
        for protocol in protocols_for(model)
    }
    parameters = sum(p.numel() for p in model.head.parameters())
    return {
        "name": name,
        "seed": seed,
        "rsum": rsums,
        "seconds": seconds,
        "head_parameters": parameters,
        "trust": model.trust,
    }


def finished(path: Path) -> list[dict[str, Any]]:
    """Results written before; a torn last line is left out."""
    if not path.is_file():
        return []
    results = []
    for line in path.read_text().splitlines():
        try:
            results.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return results


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread (standard deviation over seeds) of every entry, set and protocol, in the order of BASELINES."""
    rows = []
    for name, (title, _) in BASELINES.items():
        mine = [result for result in results if result["name"] == name]
        for key in sorted({key for result in mine for key in result["rsum"]}):
            values = [result["rsum"][key] for result in mine if key in result["rsum"]]
            split, protocol = key.rsplit("/", 1)
            rows.append(
                {
                    "name": name,
                    "title": title,
                    "split": split,
                    "protocol": protocol,
                    "mean": statistics.fmean(values),
                    "spread": statistics.stdev(values) if len(values) > 1 else 0.0,
                    "seeds": len(values),
                }
            )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of `summarise` in Markdown: a line an entry and protocol, a column a data set."""
    splits = sorted({row["split"] for row in rows})
    lines = [
        f"| model | protocol | {' | '.join(f'rSum {split}' for split in splits)} |",
        f"|---|---|{'---|' * len(splits)}",
    ]
    for name, (title, _) in BASELINES.items():
        for protocol in ("none", "image", "published"):
            cells = {
                row["split"]: f"{row['mean']:.1f} ± {row['spread']:.1f}"
                for row in rows
                if row["name"] == name and row["protocol"] == protocol
            }
            if cells:
                shown = " | ".join(cells.get(split, "") for split in splits)
                lines.append(f"| **{name}**: {title} | {protocol} | {shown} |")
    return "\n".join(lines) + "\n"
