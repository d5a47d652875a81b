"""A saved model as a folder, on disk or on a model hub; nothing in it is ever unpickled.

    config.json          what to build, which file of weights belongs to it, and a list of all its files with sha256
    model.safetensors    the weights
    README.md            the model card
    vision/, text/       configuration and tokenizer of the encoders, where they are not found by name

`config.json` is replaced last and names its weights, so that a folder holds the old model or the new one, whole
(`seps.hub.saving`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from seps.files import load_json, sha256
from seps.hub.download import HubError, hub_folder
from seps.parsing import as_object

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FORMAT = 1
SAFE_FILES = ("*.safetensors", "*.json", "README.md", "vocab.txt", "merges.txt", "*.model")
"""What is fetched from a hub: tensors, configurations and tokenizers; never pickles, never code."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class ModelError(ValueError):
    """A model folder that cannot be read; the message says which and what to do."""


def find_folder(
    name: Path | str, *, revision: str | None = None, local_files_only: bool = False, what: str = "a model folder"
) -> tuple[Path, bool]:
    """The folder of a model, and whether it came from a hub: a local folder first, else the hub id "org/name".

    `what` ends the sentence of the `ModelError` that says that there is none.
    """
    text = str(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder, False
    parts = text.split("/")
    if isinstance(name, Path) or len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~") or "\\" in text:
        raise ModelError(f"There is no model {text!r}: give {what}, or a hub id like organisation/name.")
    try:
        return hub_folder(text, SAFE_FILES, revision=revision, local_files_only=local_files_only), True
    except HubError as error:
        raise ModelError(str(error)) from error


def inside(folder: Path, name: object, where: str) -> Path:
    """The file or folder that a configuration names. Raises ModelError for a name that leads out of `folder`."""
    # By the letters alone: files of a hub's cache are links that lead elsewhere, and rightly so.
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    bad = not parts or ".." in parts or parts[0].startswith(("/", "~")) or any(c in str(name) for c in '\\:\0"')
    if bad:
        raise ModelError(f"{where} names {name!r}, which is no file inside {folder}; the model was not loaded.")
    return folder.joinpath(*parts)


def describe_weights(path: Path) -> dict[str, Any]:
    """Name, size and sha256 of a file of weights, as `config.json` holds them."""
    return {"file": path.name, "size": path.stat().st_size, "sha256": sha256(path)}


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder. Raises ModelError for one that is none, or of a newer release."""
    path = folder / CONFIG
    try:
        config = load_json(path)
        if int(config["format"]) > FORMAT:
            raise ModelError(
                f"{path} was written by a newer release (format {config['format']}); this one reads up to {FORMAT}. "
                "Update seps."
            )
        if as_object(encoders := config.get("encoders") or {}) != encoders:
            raise TypeError(f"encoders is {config['encoders']!r}, not places by name")
    except ModelError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is not the configuration of a seps model ({error}).") from error
    return config


def read_weights(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], Path]:
    """The tensors that `config.json` names, and their file.

    Raises ModelError for a file that is missing, damaged, a pickle, or outside the folder.
    """
    stated = config.get("weights") or {"file": WEIGHTS}
    path = inside(folder, as_object(stated).get("file", stated), str(folder / CONFIG))
    if path.suffix != ".safetensors":
        raise ModelError(f"{folder / CONFIG} names {path.name} as its weights; only .safetensors files are read.")
    if not path.is_file():
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        if pickled:
            raise ModelError(
                f"{folder} holds its weights as {pickled[0]}, a pickle, which can run any program and is not read. "
                "Save the model again with save_pretrained; a published model_best.pth is read by seps convert."
            )
        raise ModelError(f"{folder} has no {path.name}; copy it there, or save the model again.")
    if "sha256" in stated and describe_weights(path) != {key: stated.get(key) for key in ("file", "size", "sha256")}:
        raise ModelError(
            f"{path} cannot be read: it is not the file that config.json was saved with; it may be cut off or changed. "
            "Copy or save it again."
        )
    from safetensors.torch import load_file

    try:
        return load_file(path), path
    except Exception as error:  # a broken header surfaces as several types
        raise ModelError(f"{path} cannot be read ({error}); it may be cut off. Copy or save it again.") from error
