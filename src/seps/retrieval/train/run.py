"""Train a retrieval model from a configuration: read and check the data, run, choose on dev, save."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from seps.config import ConfigError
from seps.files import read_json
from seps.hub.folder import CONFIG
from seps.metrics import recall
from seps.retrieval.config import RunConfig
from seps.retrieval.data import (
    CheckReport,
    NothingDescribed,
    RetrievalDataset,
    attach_dense,
    check_dataset,
    drop_bad,
    load_data,
)
from seps.retrieval.eval.evaluate import encode_images, evaluate
from seps.retrieval.eval.protocol import Protocol
from seps.retrieval.heads import ImageFeatures, SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, resolved, save_pretrained
from seps.retrieval.train.task import RetrievalTask
from seps.scoring import score_with_gradient
from seps.training import CheckpointError, DistributedInfo, TrainResult, find_checkpoint, train
from seps.training.tracking import Progress

Log = Callable[[str], None]
TRUST_GRID = tuple(i / 20 for i in range(4, 20))


def read_data(config: RunConfig, log: Log) -> tuple[RetrievalDataset, list[RetrievalDataset]]:
    """The training set and the dev sets, checked; what is bad is left out and named, or refused if `strict`."""
    sets = load_sets(config)
    report = check_dataset(*sets, verify_images="decode")
    kept = without_bad(sets, report, config, log)
    return kept[0], kept[1:]


def load_sets(config: RunConfig) -> list[RetrievalDataset]:
    """The training set and the dev sets, with their descriptions, as their files say."""
    data = config.data
    if not data.train:
        raise ValueError("data.train is empty; give the JSONL file of the training images, or FOLDER:train.")
    sets = [load_data(name, images_root=data.images_root) for name in (data.train, *data.dev)]
    for path in data.dense:
        sets = _described(sets, path)
    return sets


def without_bad(
    sets: list[RetrievalDataset], report: CheckReport, config: RunConfig, log: Log
) -> list[RetrievalDataset]:
    """The sets without what the report finds fault with, each fault named; refused if `strict`."""
    report.raise_if(config.data.strict)
    for sentence in report.sentences():
        log(sentence)
    return [drop_bad(part, report) for part in sets]


def _described(sets: list[RetrievalDataset], path: str) -> list[RetrievalDataset]:
    """The sets with the descriptions of a file that fits one of them at least."""
    found, problem = [], None
    for part in sets:
        try:
            found.append(attach_dense(part, path))
        except NothingDescribed as error:
            found.append(part)
            problem = problem or error
    if problem is not None and all(new is old for new, old in zip(found, sets, strict=True)):
        raise problem
    return found


def train_model(
    config: RunConfig,
    run_dir: Path | str,
    *,
    device: torch.device | str | None = None,
    distributed: DistributedInfo | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
) -> TrainResult:
    """Train as `config` says into `run_dir` (continuing a run that is there), then save the best as `run_dir/model`."""
    say = log or (lambda _: None)
    run_dir = Path(run_dir)
    _same_settings(config, run_dir)
    _room_for_model(run_dir / "model")
    train_set, dev_sets = read_data(config, say)
    torch.manual_seed(config.train.seed)
    model = RetrievalModel(config.model)
    task = RetrievalTask(model, config, train_set, dev_sets)
    about = {"model": resolved(model), "config": dataclasses.asdict(config)}
    result = train(
        task,
        config.train,
        run_dir,
        device=device,
        distributed=distributed,
        progress=progress,
        log=log,
        about=about,
    )
    first = distributed is None or distributed.rank == 0
    if first and not result.interrupted and result.best_checkpoint is not None:
        best = from_pretrained(run_dir, device=device or "cpu")
        if config.choose_trust and best.trust is not None:
            chosen = choose_trust(best, dev_sets, task.dev_pixels)
            say(f"The description's weight chosen on dev is {chosen:.2f}.")
        figures = [
            evaluate(best, data, protocol, pixels=pixels).as_dict()
            for data, pixels in zip(dev_sets, task.dev_pixels, strict=True)
            for protocol in honest_protocols(best)
        ]
        told = {"config": dataclasses.asdict(config), "step": result.step, "figures": figures}
        save_pretrained(best, run_dir / "model", about=told)
    return result


def _same_settings(config: RunConfig, run_dir: Path) -> None:
    """Refuse to continue a run whose model, data, losses or freezing were set otherwise.

    `train` compares its own settings; where files lie, and what happens after training, may differ.
    """
    try:
        about = read_json(find_checkpoint(run_dir, "last") / "state.json").get("about")
    except CheckpointError:
        return
    before = _flat(about.get("config") if isinstance(about, dict) else None)
    now = _flat(json.loads(json.dumps(dataclasses.asdict(config))))
    changed = [
        f"{name}: {before[name]!r} -> {value!r}"
        for name, value in now.items()
        if name in before and _content(name, before[name]) != _content(name, value)
    ]
    if changed:
        raise ConfigError(
            f"{run_dir} holds a run with other settings ({'; '.join(changed)}): continue it with the same, or choose "
            "another folder."
        )


def _flat(config: object) -> dict[str, Any]:
    """The settings by dotted name, without those of the loop and those that do not change what is learned."""
    flat: dict[str, Any] = {}
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[name] = value
    free = ("train.", "data.images_root", "data.strict", "choose_trust")
    return {name: value for name, value in flat.items() if not name.startswith(free)}


def _content(name: str, value: Any) -> Any:
    """Of files only their names: a data set or an encoder may be moved."""
    if name in ("data.train", "data.dev", "data.dense", "model.vision", "model.text"):
        return [Path(str(one)).name for one in (value if isinstance(value, list) else [value])]
    return value


def _room_for_model(folder: Path) -> None:
    """Raise ValueError, before hours of training, where the trained model's folder holds something else."""
    if folder.is_dir() and (not any(folder.iterdir()) or read_json(folder / CONFIG).get("format") is not None):
        return
    if folder.exists():
        raise ValueError(
            f"{folder} is where the trained model goes, but it holds something else, which was left as it is: choose "
            "another folder for the run, or move it away."
        )


def honest_protocols(model: RetrievalModel) -> list[Protocol]:
    """Under which protocols, the leaking one aside, a model can be measured."""
    if not model.head.uses_description:
        return ["none"]
    return ["none", "image"] if model.head.uses_pixels else ["image"]


@torch.no_grad()
def choose_trust(
    model: RetrievalModel, dev_sets: list[RetrievalDataset], pixels: list[torch.Tensor] | None = None
) -> float:
    """Set the description's weight to the one with the best mean rSum over the dev sets, and return it."""
    if not isinstance(model.head, SlimmingHead):
        raise ValueError(f"head {model.config.head!r} has no weight of the description to choose.")
    totals = dict.fromkeys(TRUST_GRID, 0.0)
    for i, data in enumerate(dev_sets):
        texts = model.encode_texts(data.captions)
        tokens = encode_images(model, data, pixels=pixels[i] if pixels else None)
        images = ImageFeatures(tokens, *model.encode_descriptions(data.dense))
        scored = score_with_gradient(
            model.head.net,
            images.tokens,
            texts.words,
            texts.lengths,
            dense=images.dense,
            dense_lengths=images.dense_lengths,
        )
        if scored.patches is None or scored.description is None:
            continue
        for weight in TRUST_GRID:
            mixed = (1 - weight) * scored.patches + weight * scored.description
            if scored.described is not None:
                # As in the score itself: an image without description is judged by its patches alone.
                mixed = torch.where(scored.described[:, None], mixed, scored.patches)
            totals[weight] += recall(mixed, data.image_of_caption).rsum
    best = max(TRUST_GRID, key=lambda weight: totals[weight])
    model.set_trust(best)
    return best
