"""Whether two pictures are one picture, saved again: by a hash of their shapes, then by their pixels at a small size.

n: pictures. Everything is made of the store's thumbnails; no file is read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

SIDE = 24
"""Pixels of the small picture's sides."""
HASH_BITS = 12
"""Bits of 64 that the hashes of one picture may differ in."""
CORRELATION = 0.97
"""Least correlation of the small pictures' pixels."""
CONTRAST = 2.5
"""How many times the contrast of one may be that of the other."""
SHAPE = 0.08
"""Largest difference of the logarithms of width / height."""
FLAT = 6.0
"""Deviation of the pixels, of 255, below which a picture is one colour; then colours are compared, not shapes."""
NEAR_DUPLICATE_COSINES = {"a30eb0ef8f39c1f714ded1a39c12332a": 0.9, "d61f73ed9a87c68a9dd3ac5a93acbf44": 0.9}
"""By digest of the weights that make pictures' states: the least cosine of nearly equal pictures, measured
(docs/formats-and-duplicates.md). These are `mini` and `base`."""
UNMEASURED_COSINE = 0.95
"""The same for other models, whose vectors of different photos may be closer."""
_HASH_SIDE, _LOW = 32, 8
Array = np.ndarray[Any, np.dtype[Any]]


def near_duplicate_cosine(model_hash: str) -> float:
    """The least cosine of the vectors of two nearly equal pictures, by the model with this digest."""
    return NEAR_DUPLICATE_COSINES.get(model_hash, UNMEASURED_COSINE)


def _cosines() -> Array:
    """(8, 32) float32: rows of the discrete cosine transform, the lowest frequencies first, without the mean."""
    steps = (np.arange(_HASH_SIDE) + 0.5) * np.pi / _HASH_SIDE
    return np.cos(np.arange(1, _LOW + 1)[:, None] * steps[None]).astype(np.float32)


_COSINES = _cosines()


@dataclass(frozen=True)
class Looks:
    """What pictures look like at a small size."""

    hashes: Array
    """(n,) uint64: signs of 64 low frequencies."""
    pixels: Array
    """(n, 3 x SIDE x SIDE) uint8, RGB."""
    means: Array
    deviations: Array
    """(n,) float32 of the pixels."""
    shapes: Array
    """(n,) float32: the logarithm of width / height."""

    def part(self, places: Array) -> Looks:
        """Those of some pictures, in another order."""
        return Looks(*(getattr(self, name)[places] for name in vars(self)))

    def same_picture(self, one: int) -> Array:
        """(m,) int64: places after `one` of the pictures that are the same, saved again, in order."""
        if self.deviations[one] < FLAT:
            near = self.deviations[one + 1 :] < FLAT
        else:
            near = _bits(self.hashes[one + 1 :] ^ self.hashes[one]) <= HASH_BITS
        places = np.flatnonzero(near) + one + 1
        places = places[np.abs(self.shapes[places] - self.shapes[one]) <= SHAPE]
        return np.asarray(places[self._same_pixels(one, places)])

    def _same_pixels(self, one: int, others: Array) -> Array:
        """(m,) bool: whether the small pictures agree."""
        if self.deviations[one] < FLAT:
            apart = self.pixels[others].astype(np.float32) - self.pixels[one].astype(np.float32)
            return np.asarray(np.sqrt((apart**2).mean(axis=1)) < FLAT / 2)
        contrast = np.abs(np.log(np.maximum(self.deviations[others], 1e-3) / self.deviations[one]))
        return np.asarray((self.correlations(one, others) >= CORRELATION) & (contrast <= np.log(CONTRAST)))

    def correlations(self, one: int, others: Array) -> Array:
        """(m,) float32: how far the pixels of `others` (m,) go up and down with those of `one`, from -1 to 1."""
        mine = self.pixels[one].astype(np.float32) - self.means[one]
        theirs = self.pixels[others].astype(np.float32) - self.means[others][:, None]
        scale = (
            self.pixels.shape[1] * np.maximum(self.deviations[others], 1e-3) * max(float(self.deviations[one]), 1e-3)
        )
        found: Array = (theirs @ mine) / scale
        return found


def _bits(numbers: Array) -> Array:
    """How many bits of each number are set."""
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(numbers))
    halves = np.unpackbits(np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 8), axis=1)  # numpy before 2.0
    return np.asarray(halves.sum(axis=1))


def looks_of(thumbnails: Iterable[Sequence[bytes]], sizes: Callable[[], Sequence[tuple[int, int]]]) -> Looks:
    """From batches of thumbnails (JPEG); `sizes` tells the pictures' (width, height) once all batches were read."""
    hashes: list[int] = []
    pixels: list[Array] = []
    with ThreadPoolExecutor(thread_name_prefix="seps-thumbnails") as pool:
        for batch in thumbnails:
            for number, small in pool.map(_look, batch):
                hashes.append(number)
                pixels.append(small)
    stacked = np.stack(pixels) if pixels else np.zeros((0, 3 * SIDE * SIDE), np.uint8)
    means, deviations = np.zeros(len(stacked), np.float32), np.zeros(len(stacked), np.float32)
    for start in range(0, len(stacked), 4096):  # a float copy of all would be four times as large
        part = stacked[start : start + 4096].astype(np.float32)
        means[start : start + 4096], deviations[start : start + 4096] = part.mean(axis=1), part.std(axis=1)
    ratios = [np.log(max(1, width) / max(1, height)) for width, height in sizes()]
    return Looks(np.array(hashes, np.uint64), stacked, means, deviations, np.array(ratios, np.float32))


def _look(thumbnail: bytes) -> tuple[int, Array]:
    """Hash and small picture of one thumbnail; of a damaged one those of a black picture."""
    try:
        image = Image.open(io.BytesIO(thumbnail), formats=("JPEG",)).convert("RGB")
        small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.uint8)
        grey = np.asarray(image.convert("L").resize((_HASH_SIDE, _HASH_SIDE), Image.Resampling.BOX), np.float32)
    except Exception:  # Pillow raises almost anything on broken bytes
        return 0, np.zeros(3 * SIDE * SIDE, np.uint8)
    signs = (_COSINES @ grey @ _COSINES.T).ravel() > 0
    return int.from_bytes(np.packbits(signs).tobytes(), "big"), small.reshape(-1)
