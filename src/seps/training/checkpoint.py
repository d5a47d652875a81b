"""Checkpoints: folders of safetensors and JSON that are whole or not there. Nothing is ever unpickled.

    RUN/checkpoints/step-00000120/  model.safetensors      the weights
                                    ema.safetensors        their running average (when ema_decay is set)
                                    optimizer.safetensors  "PARAMETER//exp_avg" and the like
                                    state.json             step, epoch, best score, configuration, groups
                                    manifest.json          size and sha256 of the above, written last
    RUN/last.json, RUN/best.json    which folder, and the figures it earned

A checkpoint is written into a hidden folder, flushed to the disk and renamed. One whose manifest does not fit
is passed over for the one before it.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from seps.files import numbered, read_json, sha256, sync, write_json
from seps.hub.tensor_names import fitted, renamed
from seps.parsing import as_object, is_number

FORMAT = 1
_MODEL, _EMA, _OPTIMIZER = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
_STATE, _MANIFEST = "state.json", "manifest.json"
_TEMPORARY = ".writing-"
_NAME = re.compile(r"step-\d{8,}")

Log = Callable[[str], None]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or continued, in a sentence."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, all tensors on the CPU. `ema` and `optimizer` may be empty."""

    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ema: dict[str, Tensor]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of a module as tensors of their own on the CPU.

    Raises CheckpointError for state of another kind.
    """
    state = model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(f"The model's state holds values that are not tensors ({', '.join(others)}).")
    # A copy each: safetensors refuses tied weights that share memory.
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str, versions: str = "") -> None:
    """Put saved tensors into a module.

    `versions` is a sentence about the releases, for the CheckpointError that names what is missing, left over or
    misshapen.
    """
    own = model.state_dict()
    tensors = fitted(tensors, own)
    missing = sorted(set(own) - set(tensors))
    unknown = sorted(set(tensors) - set(own))
    shapes = sorted(n for n in set(own) & set(tensors) if own[n].shape != tensors[n].shape)
    if missing or unknown or shapes:
        parts = [("missing", missing), ("unknown", unknown), ("of another shape", shapes)]
        told = "; ".join(f"{len(names)} {what}, first '{names[0]}'" for what, names in parts if names)
        advice = f"build the model it was saved from. {versions}".rstrip()
        raise CheckpointError(f"{source} does not fit the model ({told}): {advice}")
    model.load_state_dict(dict(tensors))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The optimiser's state as named tensors, and the scalars and parameter names of its groups (as JSON)."""
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"})
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}//{key}"] = torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
    return tensors, groups


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Put saved state back.

    Raises CheckpointError when the groups hold other parameters than the saved ones.
    """
    own = [name for group in optimizer.param_groups for name in group["names"]]
    # Under another release of transformers an encoder's parameters may have other names, in the same order.
    place = renamed([name for group in groups for name in group["names"]], own)
    groups = [{**group, "names": [place[name] for name in group["names"]]} for group in groups]
    if [group["names"] for group in optimizer.param_groups] != [group["names"] for group in groups]:
        raise CheckpointError("The checkpoint's optimiser groups hold other parameters than this task's.")
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, part = key.rpartition("//")
        by_name.setdefault(place.get(name, name), {})[part] = value
    state = optimizer.state_dict()
    state["state"] = {}
    for current, saved in zip(state["param_groups"], groups, strict=True):
        current.update({k: tuple(v) if k == "betas" else v for k, v in saved.items()})
        for index, name in zip(current["params"], saved["names"], strict=True):
            if name in by_name:
                state["state"][index] = by_name[name]
    optimizer.load_state_dict(state)


class CheckpointStore:
    """The checkpoints of one run folder. Reading and writing is for the first process only."""

    def __init__(self, run_dir: Path, keep_last: int, log: Log) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "checkpoints"
        self._keep_last, self._log = keep_last, log

    def folders(self) -> list[Path]:
        """Every checkpoint folder, whole or not, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is, or would be."""
        return self.folder / f"step-{step:08d}"

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None when there is none at all; damaged ones are named in the log.

        Raises CheckpointError when there are some and all are damaged.
        """
        folders = self.folders()
        for path in reversed(folders):
            problem = damage(path)
            if problem is None:
                return path
            self._log(f"The checkpoint {path} is damaged ({problem}); looking for the one before it.")
        if folders:
            raise CheckpointError(
                f"All {len(folders)} checkpoints in {self.folder} are damaged: move the folder away to start again."
            )
        return None

    def set_aside_after(self, folder: Path) -> None:
        """Rename the (damaged) checkpoints newer than `folder`, so that they do not count as kept ones."""
        for path in self.folders():
            if path.name > folder.name:
                aside = numbered(path.with_name(f"damaged-{path.name}"))
                path.rename(next(free for free in aside if not free.exists()))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, whole or not at all, and drop the oldest.

        Raises CheckpointError when it cannot.
        """
        step = int(checkpoint.state["step"])
        target = self.folder_of(step)
        temporary = self.folder / f"{_TEMPORARY}{target.name}"
        try:
            self.clean()
            temporary.mkdir(parents=True)
            _write_folder(temporary, checkpoint)
            if target.exists():
                if not written_by_us(target):
                    raise OSError(f"{target} holds files that no run of seps wrote")
                shutil.rmtree(target)
            temporary.rename(target)
            sync(self.folder)
            write_json(self.run_dir / "last.json", {"checkpoint": target.name, "step": step, "evaluated": False})
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            previous = [path.name for path in self.folders() if path != target]
            kept = f"The one before it, {previous[-1]}, is intact" if previous else "There is no earlier one"
            raise CheckpointError(
                f"The checkpoint at step {step} could not be written to {self.folder}: {error}. "
                f"{kept}. Make room, then start the same command to resume."
            ) from error
        self._prune()
        return target

    def record_evaluation(
        self, step: int, metrics: Mapping[str, float], is_best: bool, labels: Mapping[str, str] | None = None
    ) -> None:
        """Note in best.json (if it is) and last.json that the checkpoint of `step` earned these figures."""
        figures = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        pointer = {
            **figures,
            **(labels or {}),
            "checkpoint": self.folder_of(step).name,
            "step": step,
            "evaluated": True,
        }
        try:
            if is_best:
                write_json(self.run_dir / "best.json", pointer)
            write_json(self.run_dir / "last.json", pointer)
        except OSError as error:
            raise CheckpointError(
                f"The figures of step {step} could not be noted in {self.run_dir}: {error}. Make room, then "
                "start the same command to resume."
            ) from error
        self._prune()

    def evaluated(self, folder: Path) -> bool:
        """Whether the checkpoint in `folder` is the last one and its evaluation is on record."""
        last = read_json(self.run_dir / "last.json")
        return last.get("checkpoint") == folder.name and last.get("evaluated") is True

    def best(self) -> dict[str, Any] | None:
        """The content of best.json if its checkpoint is whole; one that is not is named in the log."""
        best = read_json(self.run_dir / "best.json")
        if not best:
            return None
        problem = damage(self.folder / str(best.get("checkpoint")))
        if problem is None and is_number(best.get("score", 0.0)):
            return best
        self._log(f"The best checkpoint of {self.run_dir} is damaged ({problem}) and counts no more.")
        return None

    def refuse_foreign(self) -> None:
        """Raise CheckpointError when a file that a run replaces is there and no run of seps wrote it."""
        for name in ("best.json", "last.json"):
            path = self.run_dir / name
            if path.exists() and not isinstance(read_json(path).get("checkpoint"), str):
                raise CheckpointError(
                    f"{path} was not written by a run of seps, and was left as it is: choose another folder, or move "
                    "the file away."
                )

    def clean(self) -> None:
        """Remove what an interrupted save left behind."""
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        best = read_json(self.run_dir / "best.json").get("checkpoint")
        for path in self.folders()[: -self._keep_last]:
            if path.name != best and written_by_us(path):
                shutil.rmtree(path, ignore_errors=True)


def written_by_us(folder: Path) -> bool:
    """Whether a checkpoint folder holds nothing but what a checkpoint consists of."""
    known = {_MODEL, _EMA, _OPTIMIZER, _STATE, _MANIFEST}
    return all(path.name in known and path.is_file() for path in folder.iterdir())


def find_checkpoint(run_dir: Path | str, which: Literal["best", "last"] = "best") -> Path:
    """The folder of a run's best checkpoint, or of its newest whole one.

    Raises CheckpointError when there is none.
    """
    run_dir = Path(run_dir)
    if run_dir.is_file():
        raise CheckpointError(f"There is no run in {run_dir}: it is a file. Name the folder of the run.")
    if not run_dir.is_dir():
        raise CheckpointError(f"There is no run in {run_dir}: the folder does not exist. Train there first.")
    name = read_json(run_dir / "best.json").get("checkpoint")
    if which == "last" or name is None:
        newest = CheckpointStore(run_dir, 1, lambda _: None).newest()
        if newest is None:
            raise CheckpointError(f"There is no run in {run_dir}: it holds no checkpoint. Train there first.")
        if which == "last":
            return newest
        raise CheckpointError(
            f"The run {run_dir} has no best checkpoint, as it has not been evaluated yet; its last checkpoint is there "
            "('last'; --which last)."
        )
    path = run_dir / "checkpoints" / str(name)
    problem = damage(path)
    if problem is not None:
        raise CheckpointError(f"The best checkpoint {path} is damaged ({problem}). {_instead(run_dir)}")
    return path


def _instead(run_dir: Path) -> str:
    """What can be used in place of a damaged best checkpoint."""
    try:
        newest = CheckpointStore(run_dir, 1, lambda _: None).newest()
    except CheckpointError:
        newest = None
    if newest is None:
        return "No other checkpoint of the run is whole: train again, into another folder."
    return f"The newest whole one is {newest.name}: take 'last' (--which last)."


def load_weights(folder: Path, averaged: bool = True) -> dict[str, Tensor]:
    """The model's tensors from a checkpoint folder, or their running average where kept, if `averaged`."""
    checkpoint = load(folder, optimizer=False)
    return {**checkpoint.model, **(checkpoint.ema if averaged else {})}


def load(folder: Path, optimizer: bool = True) -> Checkpoint:
    """Read a checkpoint folder. Raises CheckpointError when it is damaged or of a newer format."""
    problem = damage(folder)
    if problem is not None:
        raise CheckpointError(f"The checkpoint {folder} is damaged ({problem}).")
    state = read_json(folder / _STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint {folder} has format {state.get('format')}, this release reads {FORMAT}: use "
            "the release that wrote it."
        )
    ema = load_file(folder / _EMA) if (folder / _EMA).exists() else {}
    states = load_file(folder / _OPTIMIZER) if optimizer else {}
    return Checkpoint(state, load_file(folder / _MODEL), states, ema)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder by its manifest, or None."""
    files = as_object(read_json(folder / _MANIFEST).get("files"))
    if not {_MODEL, _OPTIMIZER, _STATE} <= set(files):
        return f"{_MANIFEST} is missing or unreadable"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        if sha256(path) != expected["sha256"]:
            return f"the content of {name} has changed"
    return None


def _write_folder(folder: Path, checkpoint: Checkpoint) -> None:
    write_tensors(folder / _MODEL, checkpoint.model)
    write_tensors(folder / _OPTIMIZER, checkpoint.optimizer)
    if checkpoint.ema:
        write_tensors(folder / _EMA, checkpoint.ema)
    write_json(folder / _STATE, {"format": FORMAT, **checkpoint.state})
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    write_json(folder / _MANIFEST, {"format": FORMAT, "files": files})
    sync(folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, through to the disk."""
    save_file(dict(tensors), str(path))
    sync(path)
