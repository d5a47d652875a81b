"""Save and load retrieval models: a folder with `config.json` and `model.safetensors`, or the embedded "mini".

Two forms of weights. "full" holds every tensor. "delta" holds the encoders' tensors as their difference from the
pretrained ones, in 8 bits with a scale a row, so that a fine-tuned model whose encoders come from their own packages
is small. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from seps.retrieval.config import ModelConfig
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.training import find_checkpoint, load_weights

FORMAT = 1
MINI = "mini"
Form = Literal["full", "delta"]
_ENCODERS = ("vision.", "text.")


class ModelError(ValueError):
    """A model folder that cannot be read; the message says which and what to do."""


def pack_delta(trained: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit difference and its scale per row: trained ~ base + scale * q."""
    difference = (trained.float() - base.float()).flatten(1) if trained.dim() > 1 else trained.float() - base.float()
    if trained.dim() < 2:
        return difference.half(), torch.ones(())
    scale = difference.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(difference / scale).to(torch.int8).view(trained.shape), scale.squeeze(1)


def unpack_delta(packed: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """The tensor that `pack_delta` packed."""
    if packed.dim() < 2:
        return (base.float() + packed.float()).to(base.dtype)
    shape = (-1, *[1] * (packed.dim() - 1))
    return (base.float() + packed.float() * scale.float().view(shape)).to(base.dtype)


def save_pretrained(model: RetrievalModel, folder: Path | str, *, form: Form = "full", about: Any = None) -> None:
    """Write `config.json` and `model.safetensors` into `folder`, whole or not at all.

    `form="delta"` needs encoders that can be loaded again by the names in the model's config.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    base = RetrievalModel(model.config).state_dict() if form == "delta" else {}
    for name, tensor in state.items():
        if form == "full":
            tensors[name] = tensor
        elif not name.startswith(_ENCODERS):
            tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
        elif not torch.equal(tensor, base[name]):
            tensors[f"delta.{name}"], scale = pack_delta(tensor, base[name])
            if tensor.dim() > 1:
                tensors[f"scale.{name}"] = scale
    config = {"format": FORMAT, "form": form, "model": resolved(model), "about": about or {}}
    temporary = folder / ".model.safetensors.partial"
    save_file(tensors, temporary)
    os.replace(temporary, folder / "model.safetensors")
    (folder / ".config.json.partial").write_text(json.dumps(config, indent=1) + "\n")
    os.replace(folder / ".config.json.partial", folder / "config.json")


def resolved(model: RetrievalModel) -> dict[str, Any]:
    """The model's configuration with every option of its head spelt out, so that no later default changes it."""
    values = dataclasses.asdict(model.config)
    if isinstance(model.head, SlimmingHead):
        options = dataclasses.asdict(model.head.net.config)
        from_encoder = ("embed_size", "num_patches", "num_prefix_tokens")
        values["slimming"] = {name: value for name, value in options.items() if name not in from_encoder}
    return values


def mini_folder() -> Path:
    """Where the embedded model is."""
    return Path(str(files("seps"))) / "assets" / "mini"


def from_pretrained(name: Path | str, *, device: torch.device | str = "cpu", averaged: bool = True) -> RetrievalModel:
    """The model "mini", that of a folder written by `save_pretrained`, or the best of a training run's folder."""
    folder = mini_folder() if str(name) == MINI else Path(name)
    if not folder.is_dir():
        raise ModelError(
            f"There is no model {str(name)!r}: give {MINI!r}, a folder written by save_pretrained, or a run of "
            "seps train."
        )
    model = _load_folder(folder) if (folder / "config.json").is_file() else _load_run(folder, averaged)
    return model.to(device).eval()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        if int(config["format"]) > FORMAT:
            raise ModelError(
                f"{path} was written by a newer release (format {config['format']}); this one reads up to {FORMAT}. "
                "Update seps."
            )
        return config
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not the configuration of a retrieval model ({error}).") from error


def model_config(values: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` from JSON; unknown fields are refused by name."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ModelError(f"The model's configuration has fields this release does not know: {', '.join(unknown)}.")
    return ModelConfig(**values)


def _load_folder(folder: Path) -> RetrievalModel:
    config = _read_config(folder / "config.json")
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder} has no model.safetensors; copy it there, or save the model again.")
    model = RetrievalModel(model_config(config["model"]))
    try:
        with safe_open(path, "pt") as reader:
            names = set(reader.keys())
        tensors = load_file(path)
    except Exception as error:
        raise ModelError(f"{path} cannot be read ({error}); it may be cut off. Copy or save it again.") from error
    state = model.state_dict()
    if config["form"] == "delta":
        for name in list(state):
            if f"delta.{name}" in names:
                scale = tensors.get(f"scale.{name}", torch.ones(()))
                state[name] = unpack_delta(tensors[f"delta.{name}"], scale, state[name])
            elif name in names:
                state[name] = tensors[name].to(state[name].dtype)
    else:
        state = tensors
    _load_state(model, state, path)
    return model


def _load_run(folder: Path, averaged: bool) -> RetrievalModel:
    checkpoint = find_checkpoint(folder, "best")
    state = json.loads((checkpoint / "state.json").read_text())
    try:
        config = model_config(state["about"]["model"])
    except KeyError as error:
        raise ModelError(
            f"{folder} is a run of another kind: it does not say how to build a retrieval model."
        ) from error
    model = RetrievalModel(config)
    weights = load_weights(checkpoint, averaged)
    own = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    _load_state(model, own, checkpoint)
    return model


def _load_state(model: RetrievalModel, state: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit its configuration: {error}") from error
