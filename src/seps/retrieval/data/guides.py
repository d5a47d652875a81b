"""Guides from data: vectors that come with an image, written into its line or kept in a file of its own.

    {"image": "cat.jpg", "captions": [...], "guides": {"audio": [0.1, -2.0, 0.3]}}
    {"image": "dog.jpg", "captions": [...], "guides": {"audio": "audio/dog.npy"}}

A file is .npy or .safetensors (with one tensor, or one of the guide's name), relative to the JSONL file and inside its
folder. It holds numbers alone: nothing in it is unpickled. An image without a vector has zeros, which guide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seps.images.sources import DataError
from seps.parsing import as_list

from .lines import Root, checked_text
from .records import RetrievalDataset

MOST_VALUES = 65_535
"""Values of one vector: more are no guide but a mistake."""


@dataclass(frozen=True)
class GuideSource:
    """Where one vector is: in the line itself, or in a file."""

    values: tuple[float, ...] = ()
    path: Path | None = None

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The vector. Raises DataError for a file that cannot be read, and for anything but finite numbers."""
        if self.path is None:
            return np.asarray(self.values, np.float32)
        try:
            vectors = _tensor_of(self.path, name)
        except DataError:
            raise
        except Exception as error:  # whatever a damaged file makes its reader raise
            raise DataError(f"The guide {name!r} in {self.path} cannot be read: {error}") from error
        vector = np.asarray(vectors).squeeze()
        vector = vector[None] if vector.ndim == 0 else vector
        if vector.ndim != 1 or vector.dtype.kind not in "fiu" or not 1 <= len(vector) <= MOST_VALUES:
            raise DataError(
                f"The guide {name!r} in {self.path} has the shape {tuple(vectors.shape)} and the type {vectors.dtype}; "
                f"write one vector of at most {MOST_VALUES} numbers."
            )
        plain = vector.astype(np.float32)
        if not np.isfinite(plain).all():
            raise DataError(f"The guide {name!r} in {self.path} holds values that are not finite numbers.")
        return plain


def _tensor_of(path: Path, name: str) -> Any:
    if not path.is_file():
        raise DataError(f"There is no file {path}, which a line names as the guide {name!r}.")
    if path.suffix == ".npy":
        # Mapped: a header that promises more than the file holds is refused before memory is taken for it.
        return np.load(path, mmap_mode="r", allow_pickle=False)
    from safetensors.numpy import load_file

    tensors = load_file(path)
    if name in tensors or len(tensors) == 1:
        return tensors[name] if name in tensors else next(iter(tensors.values()))
    raise DataError(f"{path} holds the tensors {sorted(tensors)}; name one of them {name!r}, or keep one alone.")


def parse_guides(value: object, root: Root, place: str) -> dict[str, GuideSource]:
    """The "guides" of a line, by name; files are not opened here. Raises DataError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f'{place}: "guides" must be an object like {{"audio": [0.1, 0.2]}}, one vector per name.')
    return {
        checked_text(name, "the name of a guide", place): _source(name, v, root, place) for name, v in value.items()
    }


def _source(name: str, value: object, root: Root, place: str) -> GuideSource:
    if isinstance(value, str):
        if not value.endswith((".npy", ".safetensors")):
            raise DataError(f"{place}: the guide {name!r} is {value!r}; name a .npy or a .safetensors file.")
        return GuideSource(path=root(value, place))
    listed = as_list(value)
    if not 1 <= len(listed) <= MOST_VALUES or not all(type(x) in (int, float) for x in listed):
        raise DataError(f"{place}: the guide {name!r} must be a list of numbers, or the name of a file.")
    values = tuple(float(x) if abs(x) < 1e300 else math.inf for x in listed)
    if not all(map(math.isfinite, values)) or max(map(abs, values)) > 3e38:
        raise DataError(f"{place}: the guide {name!r} holds a value that is not a finite number.")
    return GuideSource(values)


def stacked(
    images: Sequence[Mapping[str, GuideSource]],
    names: Sequence[str],
    where: str,
    failed: Callable[[int, DataError], None] | None = None,
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """By name of a guide (images, its width) float32, zeros for images without it.

    `failed` is told of an image whose file cannot be read, which then has none; without it that is an error, too.
    Raises DataError where no image has one of the guides, and where their widths differ.
    """
    return {name: _stack([image.get(name) for image in images], name, where, failed) for name in names}


def _stack(
    sources: Sequence[GuideSource | None],
    name: str,
    where: str,
    failed: Callable[[int, DataError], None] | None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    vectors: list[np.ndarray[Any, np.dtype[np.float32]] | None] = []
    for number, source in enumerate(sources):
        try:
            vectors.append(None if source is None else source.read(name))
        except DataError as error:
            if failed is None:
                raise
            failed(number, error)
            vectors.append(None)
    widths = sorted({len(vector) for vector in vectors if vector is not None})
    if not widths:
        raise DataError(
            f"The model reads the guide {name!r}, and no image of {where} has it. Write it into the JSONL lines, "
            f'"guides": {{{name!r}: [0.1, ...]}} or the name of a .npy file, or register a guide that makes it '
            f"(@seps.register_guide({name!r}, from_patches=True))."
        )
    if len(widths) > 1:
        raise DataError(f"The guide {name!r} of {where} has vectors of {widths} values; all must have as many.")
    rows = np.zeros((len(vectors), widths[0]), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        if vector is not None:
            row[:] = vector
    return rows


def dataset_guides(dataset: RetrievalDataset, names: Sequence[str]) -> dict[str, Tensor] | None:
    """The vectors of a data set's images, by name (images, width); None where no guide is asked for."""
    if not names:
        return None
    made = stacked([record.guides for record in dataset.records], names, dataset.label)
    return {name: torch.from_numpy(rows) for name, rows in made.items()}
