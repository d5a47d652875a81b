"""Weights of an embedded model as arrays, read from its folder without torch.

A tensor of an encoder is stored as its 8-bit difference from the pretrained one, or whole in 8 bits; both have a scale
per row (`seps.retrieval.embedded`).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from seps.files import read_json

Array = np.ndarray[Any, np.dtype[Any]]


class LightWeights:
    """The tensors of one embedded model, read one at a time.

    Raises OSError or ValueError for a folder that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self._own: Any = safe_open(folder / self.config["weights"]["file"], "np")
        self._text: Any = safe_open(text_folder() / "model.safetensors", "np")
        self._names = frozenset(self._own.keys())  # type: ignore[no-untyped-call]

    @property
    def model(self) -> dict[str, Any]:
        """The fields of its `ModelConfig`."""
        values: dict[str, Any] = self.config["model"]
        return values

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str) -> Array:
        """A tensor by its name in the model, float32. Raises ValueError where the folder has none of that name."""
        own = self._own.get_tensor
        if name in self._names:
            return _single(own(name))
        if f"int8.{name}" in self._names:
            values = _single(own(f"int8.{name}"))
            values *= own(f"scale.{name}").reshape(-1, *[1] * (values.ndim - 1))
            return values
        if not name.startswith("text.model."):
            raise ValueError(f"{self.folder} holds no tensor {name!r}.")
        found = _single(self._text.get_tensor(name.removeprefix("text.model.")))
        if f"delta.{name}" not in self._names:
            return found
        difference = _single(own(f"delta.{name}"))
        if difference.ndim > 1:
            difference *= own(f"scale.{name}")[:, None]
        found += difference
        return found

    def linear(self, name: str) -> tuple[Array, Array]:
        """Weight (in, out) and bias (out,) of a linear layer."""
        return np.ascontiguousarray(self.tensor(f"{name}.weight").T), self.tensor(f"{name}.bias")


def _single(values: Array) -> Array:
    found: Array = values.astype(np.float32)
    return found


def text_folder() -> Path:
    """Where the pretrained text encoder of the embedded models is."""
    return Path(str(files("seps"))) / "assets" / "minilm"
