"""Save and load re-identification models: a model folder (`seps.hub.folder`) or a hub id."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from seps.encoders import EfficientNetLite0
from seps.encoders.saved import has_vision_files, save_vision_files
from seps.hub.card import card, table
from seps.hub.folder import CONFIG, ModelError, find_folder, inside, read_config, read_weights
from seps.hub.saving import write_folder
from seps.hub.tensor_names import transformers_version, versions_sentence
from seps.registry import how_to_register, registered
from seps.reid.build import build_model
from seps.reid.config import ReidConfig
from seps.reid.network.model import ReidModel
from seps.reid.run import read_description
from seps.reid.trained import TrainedReid
from seps.training.checkpoint import load_model_tensors, model_tensors

_KIND = "vision encoder"


def save_pretrained(trained: TrainedReid, folder: Path | str, *, about: Mapping[str, Any] | None = None) -> None:
    """Write the model and its card into `folder`, whole or not at all.

    `about` is kept in `config.json`; of it the card shows `name`, `license`, `summary` and `figures`, a list of
    `CaseResult.row()`. Raises ModelError when the folder cannot be written, holds a file in the way that no save wrote,
    or could not be loaded again because nothing names the encoder.
    """
    model, settings = trained.model, trained.config.to_json()
    _check_encoder(model)
    # Where the training images lay is nobody else's business, and of no use to them.
    settings["data"] = {**settings["data"], "root": "", "labels": None, "texts": None}
    config = json.loads(
        json.dumps(
            {
                "application": "reid",
                "reid": settings,
                "modalities": list(model.modalities),
                "identities": model.identities,
                "cameras": list(trained.cameras),
                "shots": trained.shots,
                "transformers": transformers_version(),
                "about": dict(about or {}),
            }
        )
    )

    def encoders(place: Path) -> dict[str, str]:
        backbone: Any = model.backbones[0]
        return {"vision": "vision"} if save_vision_files(backbone, place / "vision") else {}

    write_folder(folder, config, model_tensors(model), model_card(Path(folder).resolve().name, config), encoders)


def _check_encoder(model: ReidModel) -> None:
    """Raise ModelError for an encoder that is neither a preset, nor in the folder's files, nor registered by name."""
    backbone: Any = model.backbones[0]
    named = isinstance(backbone, EfficientNetLite0) or model.config.encoder in registered(_KIND)
    if not named and not has_vision_files(backbone):
        raise ModelError(
            f"The model was not saved: its encoder is a {type(backbone).__name__} passed as an object, and a folder "
            "contains no code. Register it with @seps.register_encoder(NAME) and set model.encoder to that name."
        )


def from_pretrained(
    name: Path | str,
    *,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    local_files_only: bool = False,
) -> TrainedReid:
    """The model of a folder written by `save_pretrained`, or of a hub id; a folder of that name comes first.

    Raises ModelError (a ValueError) when there is none, or it is damaged or of another kind.
    """
    what = "a folder written by save_pretrained"
    folder, _ = find_folder(name, revision=revision, local_files_only=local_files_only, what=what)
    values = read_config(folder)
    if values.get("application") != "reid":
        raise ModelError(f"{folder / CONFIG} is not the configuration of a re-identification model.")
    tensors, path = read_weights(folder, values)
    config, modalities, identities, cameras = read_description(values, str(folder / CONFIG), ModelError)
    model = build_model(_buildable(config, values, folder), modalities, identities, len(cameras))
    load_model_tensors(model, tensors, str(path), versions_sentence(values.get("transformers")))
    model.eval()
    return TrainedReid(model.to(device), config, cameras, folder, values.get("shots"))


def _buildable(config: ReidConfig, values: Mapping[str, Any], folder: Path) -> Any:
    """The model's settings with the encoder from the folder's own files; its weights come with the model's."""
    places = values.get("encoders") or {}
    encoder = config.model.encoder
    if "vision" in places:
        encoder = str(inside(folder, places["vision"], str(folder / CONFIG)))
    elif encoder != "mini" and encoder not in registered(_KIND):
        raise ModelError(
            f"{folder / CONFIG} names the encoder {encoder!r}, an idea of its author: the folder has no files of it, "
            f"and it is not registered here. {how_to_register(_KIND, encoder)}"
        )
    return replace(config.model, encoder=encoder, pretrained=False)


def model_card(name: str, config: Mapping[str, Any]) -> str:
    """README.md of a saved model, from what its config.json holds."""
    about, model = config["about"], config["reid"]["model"]
    facts = [
        ("sensors", ", ".join(config["modalities"])),
        ("trained on", f"{config['identities']} identities, {len(config['cameras'])} cameras"),
        *((key.replace("_", " "), value) for key, value in model.items() if key != "pretrained"),
    ]
    load = (
        "```python\nfrom seps.reid.pretrained import from_pretrained\n\n"
        f'trained = from_pretrained("{name}")  # this folder, or its hub id\n```\n\n'
        f"From the command line: `seps reid eval {shlex.quote(name)} --data.root FOLDER`."
    )
    return card(
        str(about.get("name") or name),
        about,
        tags=("re-identification", "multi-modal", "patch-selection"),
        pipeline="image-feature-extraction",
        summary="Re-identification over several sensors: the other sensors decide which patches of each matter.",
        sections={
            "What it is": table(("", ""), facts),
            "Figures": _figures(about.get("figures")),
            "How to load it": load,
        },
    )


def _figures(rows: Sequence[Mapping[str, Any]] | None) -> str:
    if not rows:
        return "None were recorded when the model was saved. `seps reid eval` measures it."
    names = list(rows[0])
    return table(names, [[_short(row.get(name, "")) for name in names] for row in rows])


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3f}" if isinstance(value, float) else value
