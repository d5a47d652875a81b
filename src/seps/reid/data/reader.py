"""From records to pixels: decoding, splitting side-by-side images, resizing, checking, threads, an optional cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seps.files import open_regular
from seps.reid.data.records import ReidDataError, ReidRecord, Source

# Pillow is loaded where a file is read: drawn sets are trained on without it.
if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 89_478_485
"""Of one file, as Pillow bounds it."""
Bytes = NDArray[np.uint8]


class WrongShape(ValueError):
    """A side-by-side image that does not divide into its modalities."""


def read_record(record: ReidRecord, modalities: Sequence[str], size: tuple[int, int]) -> Tensor:
    """Pixels of one shot: (M, 3, H, W) uint8, bicubic resize to `size` (H, W), grey images on three channels.

    Raises ReidDataError for a modality the record does not have or a file that does not decode, by its name.
    """
    lacking = [modality for modality in modalities if modality not in record.sources]
    if lacking:
        raise ReidDataError(f"{record.name} has no {lacking}; it has {list(record.sources)}")
    wanted = [record.sources[modality] for modality in modalities]
    planes: dict[Source, Bytes] = {}
    for path, sources in group_by_file(wanted):
        planes.update(_read_file(path, sources, size))
    stacked = np.stack([planes[source] for source in wanted])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def _read_file(path: Path, sources: Sequence[Source], size: tuple[int, int]) -> dict[Source, Bytes]:
    """Each source's part of one file: (H, W, 3)."""
    from PIL import Image

    try:
        image = _opened_rgb(path)
        parts_of = {source: _part(image, source) for source in sources}
    except Exception as error:  # Pillow's decoders raise almost anything on broken bytes
        raise ReidDataError(
            f"cannot read {path} ({error}); replace the file, or leave out such shots with --data.on_problem skip "
            "--data.verify_files true"
        ) from error
    parts: dict[Source, Bytes] = {}
    for source, part in parts_of.items():
        if part.size != (size[1], size[0]):
            part = part.resize((size[1], size[0]), Image.Resampling.BICUBIC)
        parts[source] = np.asarray(part, dtype=np.uint8)
    return parts


def _opened_rgb(path: Path) -> Image.Image:
    """The image in a regular file. Raises ValueError for one of more than `MAX_PIXELS`, and what Pillow raises."""
    from PIL import Image

    with open_regular(path) as file, Image.open(file) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width} x {opened.height} pixels, and more than {MAX_PIXELS:,} are not read"
            )
        return to_rgb(opened)


def _part(image: Image.Image, source: Source) -> Image.Image:
    """What a source takes of its image. Raises ValueError where its box does not begin and end at a pixel."""
    if source.box is None:
        return image
    sides = [fraction * length for fraction, length in zip(source.box, 2 * image.size, strict=True)]
    left, top, right, bottom = (round(side) for side in sides)
    if max(abs(side - round(side)) for side in sides) > 1e-6:
        raise WrongShape(f"{image.width} pixels wide do not divide into equal parts, one for each modality")
    return image.crop((left, top, right, bottom))


def to_rgb(image: Image.Image) -> Image.Image:
    """Three channels of a byte; of 16-bit images (thermal cameras) the upper byte.

    Raises ValueError for wider numbers (converted by Pillow, everything above 255 would become white), and for bytes in
    more than 8 bits, of which the upper byte is black.
    """
    if image.mode.startswith("I"):
        from PIL import Image

        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"pixels from {values.min()} to {values.max()}: save them as 8 or 16 bits without sign")
        if 0 < values.max() <= 0xFF:
            raise ValueError(f"pixels from {values.min()} to {values.max()} in more than 8 bits: save them as 8 bits")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("pixels are floating point numbers: save them as 8 or 16 bits without sign")
    return image.convert("RGB")


def group_by_file(sources: Iterable[Source]) -> list[tuple[Path, list[Source]]]:
    """Sources by file, so that a side-by-side image is opened once."""
    groups: dict[Path, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.path, []).append(source)
    return list(groups.items())


def fault_of(record: ReidRecord) -> tuple[str, Path, str] | None:
    """(kind, file, detail) of the first file of the record that does not decode or split, else None."""
    for path, sources in group_by_file(record.sources.values()):
        try:
            image = _opened_rgb(path)
            for source in sources:
                _part(image, source)
        except WrongShape as error:
            return "wrong_shape", path, str(error)
        except Exception as error:  # Pillow's decoders raise almost anything on broken bytes
            return "undecodable", path, f"cannot be decoded ({error})"
    return None


class ReidReader:
    """Reads records with a pool of threads; keeps up to `cache_bytes` of decoded shots in memory.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        modalities: Sequence[str],
        size: tuple[int, int] = (256, 128),
        *,
        threads: int = 4,
        cache_bytes: int = 0,
    ) -> None:
        if min(size) < 1 or threads < 1 or cache_bytes < 0:
            raise ReidDataError(
                f"size and threads must be >= 1 and cache_bytes >= 0, not {size}, {threads}, {cache_bytes}"
            )
        self.modalities, self.size = tuple(modalities), size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reid-reader")
        self._room = cache_bytes // (len(self.modalities) * 3 * size[0] * size[1])
        self._cache: dict[tuple[Source, ...], Tensor] = {}

    def read(self, record: ReidRecord) -> Tensor:
        """(M, 3, H, W) uint8 of one record; do not write into it, it may be the cached one."""
        if not self._room:
            return read_record(record, self.modalities, self.size)
        key = tuple(record.sources.get(m, Source(Path())) for m in self.modalities)
        pixels = self._cache.get(key)
        if pixels is None:
            pixels = read_record(record, self.modalities, self.size)
            if len(self._cache) < self._room:
                self._cache[key] = pixels
        return pixels

    def batch(self, records: Sequence[ReidRecord]) -> Tensor:
        """(B, M, 3, H, W) uint8, in the order of `records`."""
        if not records:
            return torch.empty(0, len(self.modalities), 3, *self.size, dtype=torch.uint8)
        return torch.stack(list(self._pool.map(self.read, records)))

    def close(self) -> None:
        """Stop the threads and forget the cache."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cache.clear()

    def __enter__(self) -> ReidReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
