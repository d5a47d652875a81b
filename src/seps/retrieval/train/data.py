"""The data of a training run: data sets read, described, checked and decoded in one pass over the photos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seps.retrieval.config import RunConfig
from seps.retrieval.data import (
    ImageSource,
    Mode,
    NothingDescribed,
    RetrievalDataset,
    attach_dense,
    check_dataset,
    drop_bad,
    load_data,
)
from seps.retrieval.data.images import decode_image

Log = Callable[[str], None]


@dataclass(frozen=True)
class SharedData:
    """What the runs of one recipe share: the recipe, the data sets and their decoded photos."""

    recipe: RunConfig
    train: RetrievalDataset
    dev: list[RetrievalDataset]
    pixels: Tensor
    """(images, 3, h, w) uint8 of the training set, of the size at which training keeps photos."""
    dev_pixels: list[Tensor]
    """The same of each dev set, as the model sees them."""
    files: tuple[Path, ...] = ()
    """The .npy files that hold the photos, the training set's first; none where they are in memory."""

    def without_photos(self) -> SharedData:
        """The same, small enough to be sent to another process; `with_photos` maps the files there."""
        return replace(self, pixels=torch.empty(0), dev_pixels=[])

    def with_photos(self) -> SharedData:
        """The same, its photos mapped from the files: processes share the memory, and a write stays private."""
        sets = [self.train, *self.dev]
        mapped = [np.load(path, mmap_mode="c")[: len(part)] for path, part in zip(self.files, sets, strict=True)]
        first, *others = map(torch.from_numpy, mapped)
        return replace(self, pixels=first, dev_pixels=others)


def read_data(
    config: RunConfig,
    sets: list[RetrievalDataset],
    image_size: tuple[int, int],
    log: Log,
    *,
    folder: Path | None = None,
) -> SharedData:
    """The sets of `load_sets`, the training set first, with their photos for a model that takes `image_size`.

    What is bad is left out and named to `log`, or refused if `data.strict`. With `folder` the photos go to .npy files
    there. Raises DataError.
    """
    ways: list[tuple[tuple[int, int], Mode]] = [(config.data.size_to_decode(image_size), "resize")]
    ways += [(image_size, "model")] * (len(sets) - 1)
    shapes = [(len(part), 3, *size) for part, (size, _) in zip(sets, ways, strict=True)]
    files = tuple(folder / f"pixels-{number}.npy" for number in range(len(sets))) if folder else ()
    if folder is None:
        arrays: list[Any] = [np.empty(shape, np.uint8) for shape in shapes]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        pairs = zip(files, shapes, strict=True)
        arrays = [np.lib.format.open_memmap(path, "w+", np.uint8, shape) for path, shape in pairs]

    def decode(number: int, index: int, data: bytes, source: ImageSource) -> None:
        arrays[number][index] = decode_image(data, source, *ways[number]).numpy()

    try:
        report = check_dataset(*sets, verify_images="decode", visit=decode)
        report.raise_if(config.data.strict)
        for sentence in report.sentences():
            log(sentence)
        kept = [drop_bad(part, report) for part in sets]
        for array, part in zip(arrays, sets, strict=True):
            bad = {finding.index for finding in report.findings if finding.dataset == part.label}
            if bad:  # moved up in place: a copy would need the memory twice
                for row, index in enumerate(index for index in range(len(part)) if index not in bad):
                    array[row] = array[index]
            if folder is not None:
                array.flush()
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    first, *others = (torch.from_numpy(array[: len(part)]) for array, part in zip(arrays, kept, strict=True))
    return SharedData(config, kept[0], kept[1:], first, others, files)


def load_sets(config: RunConfig) -> list[RetrievalDataset]:
    """The training set and the dev sets, with their descriptions, as their files say; no photo is read.

    Raises DataError, and ValueError where no training data is named.
    """
    data = config.data
    if not data.train:
        raise ValueError("data.train is empty; give the JSONL file of the training images, or FOLDER:train.")
    sets = [load_data(name, images_root=data.images_root) for name in (data.train, *data.dev)]
    for path in data.dense:
        sets = _described(sets, path)
    return sets


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
