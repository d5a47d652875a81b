"""A saved model as a folder, on disk or on a model hub; nothing in it is ever unpickled.

    config.json          what to build, and which file of weights belongs to it, with its size and sha256
    model.safetensors    the weights
    README.md            the model card
    vision/, text/       configuration and tokenizer of the encoders, where they are not found by name

`config.json` is replaced last and names its weights, so that a folder holds the old model or the new one, whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from seps.hub import HubError, hub_folder

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FORMAT = 1
SAFE_FILES = ("*.safetensors", "*.json", "README.md", "vocab.txt", "merges.txt", "*.model")
"""What is fetched from a hub: tensors, configurations and tokenizers; never pickles, never code."""
_LEFT_BEHIND = re.compile(r"\.saving-.+|model(-\d+)?\.safetensors|(vision|text)(-\d+)?")
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


def write_folder(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: str,
    encoders: Callable[[Path], Mapping[str, str]] | None = None,
) -> None:
    """Write a model folder; a reader, or a crash, finds the model before or the model after, never a mixture.

    `encoders(folder)` writes the encoders' files there and returns their places for `config["encoders"]`.
    Raises ModelError when the folder cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    except OSError as error:
        raise ModelError(f"The model was not saved: {folder} cannot be written ({error}).") from error
    before = _named(folder)
    try:
        save_file(dict(tensors), staged / WEIGHTS, metadata={"format": "pt"})
        weights = {**describe_weights(staged / WEIGHTS), "file": _free_name(folder, WEIGHTS)}
        places = dict(encoders(staged)) if encoders is not None else {}
        moved = {kind: _free_name(folder, place) for kind, place in places.items()}
        for kind, place in places.items():
            os.replace(staged / place, folder / moved[kind])
        os.replace(staged / WEIGHTS, folder / weights["file"])
        content = {"format": FORMAT, **config, "weights": weights, **({"encoders": moved} if moved else {})}
        (staged / CARD).write_text(card, encoding="utf-8")
        (staged / CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(staged / CARD, folder / CARD)
        os.replace(staged / CONFIG, folder / CONFIG)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The model was not saved to {folder}: {error}. Make room, then save it again.") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    _tidy(folder, before)


def _named(folder: Path) -> list[Path]:
    """The files and folders that belong to the model that is in `folder`, if there is one."""
    try:
        config = read_config(folder)
        names = [(config.get("weights") or {"file": WEIGHTS})["file"], *(config.get("encoders") or {}).values()]
        return [inside(folder, name, str(folder / CONFIG)) for name in names]
    except (ModelError, AttributeError, TypeError, KeyError):
        return []


def _tidy(folder: Path, before: Sequence[Path]) -> None:
    """Remove what the model before consisted of, and what a save that was killed left behind."""
    current = _named(folder)
    killed = [path for path in folder.iterdir() if _LEFT_BEHIND.fullmatch(path.name)]
    # A folder of weights is not ours: an encoder's files here are its configuration alone.
    killed = [path for path in killed if path.name.startswith(".") or not list(path.glob("*.safetensors"))]
    for old in {*before, *killed} - set(current):
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def _free_name(folder: Path, name: str) -> str:
    """`name`, or one like it: what the model that is there consists of must stay readable until the end."""
    stem, suffix = Path(name).stem, Path(name).suffix
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"{stem}-{number}{suffix}"
    return name


def describe_weights(path: Path) -> dict[str, Any]:
    """Name, size and sha256 of a file of weights, as `config.json` holds them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return {"file": path.name, "size": path.stat().st_size, "sha256": digest.hexdigest()}


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder. Raises ModelError for one that is none, or of a newer release."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if int(config["format"]) > FORMAT:
            raise ModelError(
                f"{path} was written by a newer release (format {config['format']}); this one reads up to {FORMAT}. "
                "Update seps."
            )
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not the configuration of a seps model ({error}).") from error
    return dict(config)


def read_weights(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], Path]:
    """The tensors that `config.json` names, and their file.

    Raises ModelError for a file that is missing, damaged, a pickle, or outside the folder.
    """
    stated = config.get("weights") or {"file": WEIGHTS}
    path = inside(folder, stated.get("file") if isinstance(stated, dict) else stated, str(folder / CONFIG))
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
    try:
        return load_file(path), path
    except Exception as error:  # a broken header surfaces as several types
        raise ModelError(f"{path} cannot be read ({error}); it may be cut off. Copy or save it again.") from error
