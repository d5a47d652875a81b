"""The data of a training run: data sets read, described, checked and decoded in one pass over the photos.

Sets whose decoded photos fit `data.memory` stay in memory; of the others the first photos do (`data.streams`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seps.images.decoding import Mode, decode_image
from seps.images.sources import ImageSource
from seps.retrieval.config import RunConfig
from seps.retrieval.data import (
    CheckReport,
    NothingDescribed,
    RetrievalDataset,
    attach_dense,
    check_dataset,
    drop_bad,
    load_data,
)
from seps.retrieval.data.streams import PictureStream, Pixels, rows_to_keep, streaming_sentence
from seps.retrieval.data.streams.pictures import checksum
from seps.training.checkpoint import Log


@dataclass(frozen=True)
class SharedData:
    """What the runs of one recipe share: the recipe, the data sets and their decoded photos."""

    recipe: RunConfig
    train: RetrievalDataset
    dev: list[RetrievalDataset]
    pixels: Pixels
    """(images, 3, h, w) uint8 of the training set, of the size at which training keeps photos."""
    dev_pixels: Sequence[Pixels]
    """The same of each dev set, as the model sees them."""
    files: tuple[Path, ...] = ()
    """The .npy files that hold the photos, the training set's first; none where they are in memory."""
    image_size: tuple[int, int] | None = None
    """Of the model that the photos were read for."""

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
    there; without, to memory, as many as `data.memory` allows. Raises DataError.
    """
    ways: list[tuple[tuple[int, int], Mode]] = [(config.data.size_to_decode(image_size), "resize")]
    ways += [(image_size, "model")] * (len(sets) - 1)
    shapes = [(len(part), 3, *size) for part, (size, _) in zip(sets, ways, strict=True)]
    files = tuple(folder / f"pixels-{number}.npy" for number in range(len(sets))) if folder else ()
    rows = [len(part) for part in sets] if folder else rows_to_keep(shapes, config.data.memory << 20)
    for part, shape, kept in zip(sets, shapes, rows, strict=True):
        if kept < len(part):
            log(streaming_sentence(part.label, shape, kept, config.data.memory << 20))
    if folder is None:
        arrays: list[Any] = [np.empty((kept, *shape[1:]), np.uint8) for kept, shape in zip(rows, shapes, strict=True)]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        pairs = zip(files, shapes, strict=True)
        arrays = [np.lib.format.open_memmap(path, "w+", np.uint8, shape) for path, shape in pairs]
    checksums = [np.zeros(len(part), np.uint32) for part in sets]

    def decode(number: int, index: int, data: bytes, source: ImageSource) -> None:
        # Also where the pixels are not kept: what is bad must not depend on the memory.
        pixels = decode_image(data, source, *ways[number]).numpy()
        if index < rows[number]:
            arrays[number][index] = pixels
        else:
            checksums[number][index] = checksum(data)

    try:
        report = check_dataset(*sets, verify_images="decode", visit=decode)
        report.raise_if(config.data.strict)
        # First: where nothing is left the error names every fault.
        kept_sets = [drop_bad(part, report) for part in sets]
        for sentence in report.sentences(left_out=True):
            log(sentence)
        found = [
            _kept_photos(part, report, way, array, sums)
            for part, way, array, sums in zip(sets, ways, arrays, checksums, strict=True)
        ]
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    return SharedData(config, kept_sets[0], kept_sets[1:], found[0], found[1:], files, image_size)


def _kept_photos(
    part: RetrievalDataset,
    report: CheckReport,
    way: tuple[tuple[int, int], Mode],
    array: Any,
    checksums: NDArray[np.uint32],
) -> Pixels:
    """The photos of a set without those that the report finds fault with; `array` holds its first ones."""
    bad = {finding.index for finding in report.findings if finding.dataset == part.label}
    good = [index for index in range(len(part)) if index not in bad]
    held = sum(index < len(array) for index in good)
    if bad:  # moved up in place: a copy would need the memory twice
        for row, index in enumerate(good[:held]):
            array[row] = array[index]
    if isinstance(array, np.memmap):
        array.flush()
    pixels = torch.from_numpy(array[:held])
    if held == len(good):
        return pixels
    sources = [part.records[index].source for index in good]
    return PictureStream(sources, *way, kept=pixels, checksums=checksums[good])


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
