"""A whole run: train into a folder, and read a trained model back from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from seps.files import read_json
from seps.method.config import ConfigError
from seps.reid.build import build_model
from seps.reid.config import ReidConfig, from_mapping
from seps.reid.data import ReidDataset
from seps.reid.network.backbone import build_backbones, describe_backbone
from seps.reid.network.model import ReidModel
from seps.reid.task import ReidTask
from seps.reid.trained import TrainedReid
from seps.training import CheckpointError, DistributedInfo, TrainResult, find_checkpoint, train
from seps.training import distributed as processes
from seps.training.checkpoint import load, load_model_tensors, model_tensors
from seps.training.tracking import Progress


def train_reid(
    config: ReidConfig,
    dataset: ReidDataset,
    run_dir: Path | str,
    *,
    distributed: DistributedInfo | None = None,
    device: torch.device | str | None = None,
    resume: bool = True,
    progress: Progress | None = None,
    log: Callable[[str], None] | None = None,
) -> TrainResult:
    """Train on `dataset` into `run_dir`, or continue the run that is there; every state.json says how to rebuild.

    Raises ValueError for settings or data that do not fit the earlier run.
    """
    about = {
        "application": "reid",
        "reid": config.to_json(),
        "modalities": list(dataset.modalities),
        "cameras": list(dataset.cameras),
        "shots": shots_digest(dataset),
    }
    processes.on_first_rank(lambda: _same_run(about, Path(run_dir)))
    unseen = sorted(set(dataset.cameras) - {record.camid for record in dataset.train})
    if config.model.camera_embedding and unseen and log is not None and processes.rank() == 0:
        log(
            f"No training shot comes from the cameras {unseen} of query and gallery: their camera embedding stays as "
            "it was drawn. model.camera_embedding=false avoids that."
        )
    task = ReidTask(config, dataset)
    try:
        return train(
            task,
            config.train,
            run_dir,
            distributed=distributed,
            device=device,
            resume=resume,
            progress=progress,
            log=log,
            about={**about, "identities": len(task.fit.identities), "vit": describe_backbone(task.model.backbones[0])},
        )
    finally:
        task.reader.close()


def shots_digest(dataset: ReidDataset) -> str:
    """A short hash of the training shots: names, identities, cameras, scenes and texts, not where they lie."""
    lines = [f"{shot.name} {shot.pid} {shot.camid} {shot.sceneid}" for shot in dataset.train]
    lines += [f"{shot.name} {shot.text}" for shot in dataset.train if shot.text is not None]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def weights_digest(model: ReidModel) -> str:
    """A hash of the names and values of all weights: the same wherever the model lies, another after every step."""
    digest = hashlib.sha256()
    for name, value in sorted(model_tensors(model).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _same_run(about: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse to continue a run whose model, losses, batches or training shots were others."""
    try:
        before = read_json(find_checkpoint(run_dir, "last") / "state.json").get("about", {})
    except CheckpointError:
        return
    stated, now = before.get("reid") or {}, about["reid"]
    # Where the files lie and how fast they are read does not change what is learned.
    free = {"root", "texts", "threads", "cache_mib", "verify_files"}
    changed = [
        f"{section}.{name}: {stated.get(section, {}).get(name)!r} -> {value!r}"
        for section in ("data", "model", "loss")
        for name, value in now[section].items()
        if name not in free and stated.get(section, {}).get(name) != value
    ]
    changed += [
        f"{name}: {before.get(name)!r} -> {about[name]!r}"
        for name in ("modalities", "cameras", "shots")
        if before.get(name) != about[name]
    ]
    if changed:
        raise ConfigError(
            f"{run_dir} holds a run with other settings or other data ({'; '.join(changed)}): continue it with the "
            "same, or choose another folder."
        )


def read_description(
    values: Mapping[str, Any], source: str, problem: type[ValueError]
) -> tuple[ReidConfig, tuple[str, ...], int, tuple[int, ...]]:
    """(settings, modalities, identities, cameras) that a checkpoint or a model folder states.

    Raises `problem` where one is missing or wrong; `source` is the file to name.
    """
    try:
        config = from_mapping(values["reid"], source)
        modalities, cameras = tuple(map(str, values["modalities"])), tuple(map(int, values["cameras"]))
        return config, modalities, int(values["identities"]), cameras
    except (KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise problem(f"{source} does not say how to build the model ({why}).") from error


def load_trained(
    source: Path | str, which: Literal["best", "last"] = "best", device: torch.device | str = "cpu"
) -> TrainedReid:
    """The model of a run folder (its best or last checkpoint) or of a saved model's folder, in evaluation mode.

    Raises CheckpointError (a ValueError) when there is none, or one of another application.
    """
    if (Path(source) / "config.json").is_file():
        from seps.reid.pretrained import from_pretrained

        return from_pretrained(source, device=device)
    folder = find_checkpoint(source, which)
    checkpoint = load(folder, optimizer=False)
    about = checkpoint.state.get("about", {})
    if about.get("application") != "reid":
        raise ConfigError(f"{folder} is no re-identification run: its state does not say how to build the model.")
    config, modalities, identities, cameras = read_description(about, f"{folder}/state.json", CheckpointError)
    # The checkpoint holds every weight: a preset is built without fetching its pretrained ones.
    backbones = build_backbones(about.get("vit"), 1 if config.model.backbones == "shared" else len(modalities))
    model = build_model(replace(config.model, pretrained=False), modalities, identities, len(cameras), backbones)
    load_model_tensors(model, {**checkpoint.model, **checkpoint.ema}, str(folder))
    model.eval()
    return TrainedReid(model.to(device), config, cameras, folder, about.get("shots"))
