"""The photos of a data set as if they were decoded in memory: some are, the others are decoded when they are asked for.

A picture comes out of the same decoding either way, so that a batch has the same bits. Which pictures stay in memory
is fixed: an epoch visits each once in a new order, and a cache of the pictures used last would hold those that are
asked for last again.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seps.images.decoding import ImageReader, Mode, PixelMaker, decode_image
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import DataError, ImageSource

_BEGAN = (
    "It could be read when the run began: put it back as it was and give the same command again, which goes on from "
    "the last checkpoint."
)


class PictureStream:
    """(images, 3, height, width) uint8 of a data set, read from its files and shards by threads.

    It is indexed by rows, as the tensor of `decode_all` is, and gives the same values. Use it in a `with` block, call
    `close`, or let it go: its threads then end.

    size, mode: as for `read_image`; a `PixelMaker` as mode is for `pictures` alone.
    kept: (k, 3, height, width), the first k pictures, which are not read again.
    checksums: (images,) of `checksum`, where the files were read before. A picture whose bytes are others now is
        refused: a run would go on with other data, and could not be repeated.
    """

    def __init__(
        self,
        sources: Sequence[ImageSource],
        size: tuple[int, int],
        mode: Mode | PixelMaker = "model",
        *,
        kept: Tensor | None = None,
        checksums: NDArray[np.uint32] | None = None,
        workers: int | None = None,
    ) -> None:
        self.sources, self.size, self.mode = sources, size, mode
        self.kept = torch.empty(0, 3, *size, dtype=torch.uint8) if kept is None else kept
        self.checksums = checksums
        if len(self.kept) > len(sources) or self.kept.shape[1:] != (3, *size):
            raise DataError(f"{tuple(self.kept.shape)} is no part of {len(sources)} pictures of {size}.")
        if checksums is not None and len(checksums) != len(sources):
            raise DataError(f"There are {len(sources)} pictures and {len(checksums)} checksums.")
        self._reader = ImageReader(workers=workers)

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def shape(self) -> torch.Size:
        """As that of the tensor it stands for."""
        return torch.Size((len(self), 3, *self.size))

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """(rows, 3, height, width) uint8 of the pictures with these numbers, in their order.

        Raises UnreadableImage, which names the file, at the first that cannot be read.
        """
        numbers = torch.arange(len(self))[rows].tolist()
        pixels = torch.empty(len(numbers), *self.shape[1:], dtype=torch.uint8)
        read = []
        for place, number in enumerate(numbers):
            if number < len(self.kept):
                pixels[place] = self.kept[number]
            else:
                read.append((place, number))
        for (place, _), picture in zip(read, self._reader.map(self._read, [n for _, n in read]), strict=True):
            pixels[place] = picture
        return pixels

    def pictures(self, faults: dict[int, UnreadableImage] | None = None) -> Iterator[Any]:
        """Every picture in order; threads read ahead.

        Raises UnreadableImage; with `faults` such a picture is left out, and noted there by its number.
        """

        def take(number: int) -> Any:
            try:
                return self.kept[number] if number < len(self.kept) else self._read(number)
            except UnreadableImage as error:
                return error

        for number, picture in enumerate(self._reader.map(take, range(len(self)))):
            if not isinstance(picture, UnreadableImage):
                yield picture
            elif faults is None:
                raise picture
            else:
                faults[number] = picture

    def _read(self, number: int) -> Any:
        source = self.sources[number]
        try:
            data = read_source(source)
            if self.checksums is not None and checksum(data) != self.checksums[number]:
                raise UnreadableImage(source, "its file has changed.", "changed")
            return decode_image(data, source, self.size, self.mode)
        except UnreadableImage as error:
            if self.checksums is None:
                raise
            raise UnreadableImage(source, f"{error.why} {_BEGAN}", error.kind) from error

    def close(self) -> None:
        """Stop the threads."""
        self._reader.close()

    def __enter__(self) -> PictureStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Pixels = Tensor | PictureStream
"""(images, 3, height, width) uint8 of a data set: in memory, or read from its files."""


def checksum(data: bytes) -> int:
    """32 bits of a file's bytes, to see that it has changed; no protection against intent."""
    return zlib.crc32(data)


def in_batches(pixels: Pixels, batch_size: int) -> Iterator[Tensor]:
    """(batch_size or fewer, 3, height, width) at a time, in order. Raises UnreadableImage."""
    if isinstance(pixels, Tensor):
        yield from (pixels[start : start + batch_size] for start in range(0, len(pixels), batch_size))
        return
    yield from stacked(pixels.pictures(), batch_size)


def stacked(pictures: Iterator[Tensor], batch_size: int) -> Iterator[Tensor]:
    """As `in_batches`, of pictures that come one by one."""
    while batch := list(itertools.islice(pictures, batch_size)):
        yield torch.stack(batch)


def rows_to_keep(shapes: Sequence[tuple[int, ...]], budget: int) -> list[int]:
    """How many pictures of each set stay in memory, for sets of these shapes (images, 3, height, width).

    Together they take at most `budget` bytes; the smallest sets come first, so that as many as possible are whole.
    """
    sizes = [int(np.prod(shape[1:])) for shape in shapes]
    rows = [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: shapes[place][0] * sizes[place]):
        rows[place] = min(shapes[place][0], budget // sizes[place])
        budget -= rows[place] * sizes[place]
    return rows


def streaming_sentence(label: str, shape: tuple[int, ...], kept: int, budget: int) -> str:
    """What happens to a set that does not fit."""
    whole = math.prod(shape)
    size = f"{whole / 2**30:.1f} GiB" if whole >= 2**30 else f"{whole / 2**20:.1f} MiB"
    held = f"{kept:,} stay in memory and the others" if kept else "they"
    return (
        f"{label}: {shape[0]:,} photos take {size} decoded, with the other sets more than data.memory = "
        f"{budget >> 20} MiB: {held} are read from their files each time."
    )
