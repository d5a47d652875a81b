"""Train a retrieval model from a configuration: read and check the data, run, choose on dev, save."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seps.encoders import TextEncoder, VisionEncoder
from seps.files import read_json
from seps.hub.folder import CONFIG
from seps.method.config import ConfigError
from seps.method.network import PatchSlimming
from seps.metrics import recall
from seps.parsing import as_object
from seps.retrieval.config import Protocol, RunConfig
from seps.retrieval.data import RetrievalDataset, check_dataset, drop_bad
from seps.retrieval.data.streams import Pixels
from seps.retrieval.evaluate.encoding import encode_guides, encode_images
from seps.retrieval.evaluate.run import evaluate_each
from seps.retrieval.heads import Head, ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import begin, check_save, from_pretrained, own_parts, resolved, save_pretrained
from seps.retrieval.train.data import load_sets, read_data
from seps.retrieval.train.task import RetrievalTask
from seps.retrieval.train.typed import TypedTask
from seps.retrieval.train.vectors import picture_vectors, readable
from seps.scoring.blocks import scoring_memory
from seps.training import CheckpointError, DistributedInfo, TrainResult, find_checkpoint, train
from seps.training.checkpoint import Log
from seps.training.task import Task
from seps.training.tracking import Progress

WEIGHTS_TRIED = tuple(i / 20 for i in range(4, 20))


def train_model(
    config: RunConfig,
    run_dir: Path | str,
    *,
    device: torch.device | str | None = None,
    distributed: DistributedInfo | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
    vision: VisionEncoder | None = None,
    text: TextEncoder | None = None,
    head: Head | None = None,
    network: PatchSlimming | None = None,
) -> TrainResult:
    """Train as `config` says into `run_dir` (continuing a run that is there), then save the best as `run_dir/model`.

    `vision`, `text`, `head` and `network` (of a slimming head) are objects of your own in the place of what `config`
    names: they are trained, and end with the best weights. `from_pretrained` then takes such objects, too.

    Raises, before the first photo is read, for settings that do not fit the run that is there, for a file that is in
    the way of the model, and for a set without descriptions where the head scores nothing else. Raises ValueError
    where the device runs out of memory, with what to set.
    """
    say = log or (lambda _: None)
    run_dir = Path(run_dir)
    _same_settings(config, run_dir)
    _room_for_model(run_dir / "model")
    sets = load_sets(config)
    torch.manual_seed(config.train.seed)
    own: dict[str, Any] = {"vision": vision, "text": text, "head": head, "network": network}
    model = begin(config.model, config.start, **own, log=log)
    _begin_short_queries(model, config, say)
    _check_descriptions(model, sets)
    check_save(model, run_dir / "model")
    task: Task
    dev_pixels: Sequence[Pixels | None]
    if config.typed.queries:
        task, dev = _typed_task(model, config, sets, run_dir, device, say)
        dev_pixels = [None] * len(dev)
    else:
        data = read_data(config, sets, model.image_size, say)
        task = RetrievalTask(model, config, data.train, data.dev, pixels=data.pixels, dev_pixels=data.dev_pixels)
        dev, dev_pixels = data.dev, data.dev_pixels
    about = {"model": resolved(model), "config": dataclasses.asdict(config), **own_parts(model)}
    try:
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
    except torch.OutOfMemoryError as error:
        raise ValueError(_less_memory(config, error)) from error
    first = distributed is None or distributed.rank == 0
    if first and not result.interrupted and result.best_checkpoint is not None:
        best = from_pretrained(run_dir, device=device or "cpu", **own)
        if config.choose_trust and best.description_weight is not None:
            chosen = choose_description_weight(best, dev, dev_pixels)
            if chosen is None:
                say(f"No dev set with descriptions: the description's weight stays {best.description_weight:.2f}.")
            else:
                say(f"The description's weight chosen on dev is {chosen:.2f}.")
        # With a projection of short queries sentences score as with the start.
        measured = [] if config.typed.short else zip(dev, dev_pixels, strict=True)
        figures = [
            report.as_dict()
            for part, pixels in measured
            for report in evaluate_each(best, part, honest_protocols(best), pixels=pixels)
        ]
        told = {"config": dataclasses.asdict(config), "step": result.step, "figures": figures}
        save_pretrained(best, run_dir / "model", about=told)
    return result


def _typed_task(
    model: RetrievalModel,
    config: RunConfig,
    sets: Sequence[RetrievalDataset],
    run_dir: Path,
    device: torch.device | str | None,
    log: Log,
) -> tuple[TypedTask, list[RetrievalDataset]]:
    """The task that trains the text side alone, and the dev sets without what cannot be read."""
    if device is not None:
        model.to(device)
    model.eval()
    checked = check_dataset(*sets)
    names = ["train", *(f"dev-{number}" for number in range(len(sets) - 1))]
    queries, reports = [], [checked]
    for name, whole in zip(names, sets, strict=True):
        part = drop_bad(whole, checked)
        kept, vectors, unreadable = readable(part, picture_vectors(model, part, run_dir / "vectors" / name, log))
        queries.append((kept, vectors))
        reports.append(unreadable)
    for report in reports:
        report.raise_if(config.data.strict)
        for sentence in report.sentences(left_out=True):
            log(sentence)
    (train_set, vectors), *others = queries
    dev = [part for part, _ in others]
    dev_vectors = [rows for _, rows in others]
    return TypedTask(model, config, train_set, dev, vectors=vectors, dev_vectors=dev_vectors), dev


def _begin_short_queries(model: RetrievalModel, config: RunConfig, log: Log) -> None:
    """Their projection begins as that of sentences where it is what learns; else there is none, which `log` is told."""
    if model.config.short_queries and not config.typed.short:
        log(
            f"start={config.start!r} reads queries of one or two words by a projection of their own. What is trained "
            "here leaves it behind, so the model of this run reads them as sentences. To give it one, train again from "
            "its folder with configs/typed.yaml."
        )
    model.set_short_queries(False)
    model.set_short_queries(config.typed.short)


def _less_memory(config: RunConfig, error: torch.OutOfMemoryError) -> str:
    """What to change so that a step takes less memory, as a sentence."""
    step = config.train.chunk_size or config.train.batch_size
    first = str(error).strip().split("\n")[0]
    return (
        f"The device ran out of memory ({first}). Set train.chunk_size to {max(1, step // 2)} (now {step} of a batch "
        f"of {config.train.batch_size} at a time): the gradients stay those of the whole batch, and the same command "
        "goes on from the last checkpoint."
    )


def _same_settings(config: RunConfig, run_dir: Path) -> None:
    """Refuse to continue a run whose model, data, losses or freezing were set otherwise.

    `train` compares its own settings; where files lie, and what happens after training, may differ.
    """
    try:
        about = read_json(find_checkpoint(run_dir, "last") / "state.json").get("about")
    except CheckpointError:
        return
    before = _flat(as_object(about).get("config"))
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
    for name, value in as_object(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[name] = value
    free = ("train.", "data.images_root", "data.strict", "data.memory", "choose_trust")
    return {name: value for name, value in flat.items() if not name.startswith(free)}


def _content(name: str, value: Any) -> Any:
    """Of files only their names: a data set or an encoder may be moved."""
    if name in ("data.train", "data.dev", "data.dense", "model.vision", "model.text", "start"):
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


def _check_descriptions(model: RetrievalModel, sets: Sequence[RetrievalDataset]) -> None:
    """Raise ValueError where the head scores descriptions alone and a set has none."""
    for part in sets:
        if not model.head.uses_pixels and not any(part.dense):
            raise ValueError(
                f"head={model.config.head!r} scores the images' descriptions alone, but {part.label} has none: give it "
                "some (data.dense names files of seps caption), or choose another head."
            )


def honest_protocols(model: RetrievalModel) -> list[Protocol]:
    """The protocols under which a model can be evaluated without giving a query the answer.

    "none" for a head that reads no descriptions, "image" for one that reads nothing else, and both for the others; see
    `seps.retrieval.evaluate.protocol`.
    """
    if not model.head.uses_description:
        return ["none"]
    return ["none", "image"] if model.head.uses_pixels else ["image"]


@torch.no_grad()
def choose_description_weight(
    model: RetrievalModel, dev_sets: list[RetrievalDataset], pixels: Sequence[Pixels | None] | None = None
) -> float | None:
    """Set the description's weight to the one with the best mean rSum over the dev sets, and return it.

    None, and the weight stays, where no dev set has a description: all weights would be equally good.
    """
    if model.head.description_logit is None:
        raise ValueError(f"head {model.config.head!r} has no weight of the description to choose.")
    totals = dict.fromkeys(WEIGHTS_TRIED, 0.0)
    compared = False
    for i, data in enumerate(dev_sets):
        if not any(data.dense):
            continue
        texts = model.encode_texts(data.captions)
        tokens = encode_images(model, data, pixels=pixels[i] if pixels else None)
        images = ImageFeatures(tokens, *model.encode_descriptions(data.dense), guides=encode_guides(model, data))
        scored = model.head.score_parts(images, texts, memory=scoring_memory(tokens.device))
        if scored.pixels is None or scored.description is None:
            continue
        compared = True
        for weight in WEIGHTS_TRIED:
            mixed = (1 - weight) * scored.pixels + weight * scored.description
            if scored.described is not None:
                # As in the score itself: an image without description is judged by its patches alone.
                mixed = torch.where(scored.described[:, None], mixed, scored.pixels)
            totals[weight] += recall(mixed, data.image_of_caption).rsum
    if not compared:
        return None
    best = max(WEIGHTS_TRIED, key=lambda weight: totals[weight])
    model.set_description_weight(best)
    return best
