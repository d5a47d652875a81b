"""Which pictures are one picture, or nearly: by a hash of their shapes, by their small pixels, and by their vectors.

Pictures are taken best first. Each takes, of those after it that are in no group yet, all that are like it: so every
picture of a group is like the first, which is the one to keep, and a chain of small differences joins nothing.

n: pictures; B: pictures that are compared with all others at once; C: width of a vector. Memory: n x (C + B) floats and
n small pictures. Everything is made of the store's thumbnails and vectors.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from seps.images.formats import is_video
from seps.photos.store.filters import Filters
from seps.photos.store.rows import StoreSettings
from seps.photos.store.store import Store
from seps.photos.store.tables import Columns

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
_HASH_SIDE, _LOW = 32, 8
Array = np.ndarray[Any, np.dtype[Any]]


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


CopyKind = Literal["file", "picture", "near"]
"""Why pictures are in one group: the same bytes; the same picture, encoded or sized again; nearly the same picture."""
KINDS: tuple[CopyKind, ...] = get_args(CopyKind)
LAYOUT = 0.4
"""Least correlation of the small pictures of nearly equal ones: models find two dogs on two lawns much alike."""
NEAR_SHAPE = 0.3
"""Most that the logarithms of width / height of nearly equal pictures differ by: upright and lying ones are two."""
PICTURES_AT_ONCE = 256
_FACTS = ["id", "path", "member", "size", "mtime", "sha256", "width", "height"]


@dataclass(frozen=True)
class ComparedPictures:
    """Pictures, best first, and what is compared of them."""

    facts: Sequence[dict[str, Any]]
    looks: Looks
    vectors: Array
    """(n, C) float32 of length 1, of the pixels alone (`Layout.appearance`)."""
    videos: Array
    """(n,) int64: the number of the video that a frame is of; -1 for what is no frame."""


def read_gallery(store: Store, filters: Filters | None = None) -> ComparedPictures:
    """The pictures of a store that can be found, best first."""
    columns = [*_FACTS, "thumbnail", *store.settings.layout.appearance_columns]
    gallery = compared(store.scan(columns, store.allowed(filters), batch_size=1024), store.settings)
    order = np.array(sorted(range(len(gallery.facts)), key=lambda place: _rank(gallery.facts[place])), np.int64)
    facts = [gallery.facts[place] for place in order]
    return ComparedPictures(facts, gallery.looks.part(order), gallery.vectors[order], gallery.videos[order])


def read_pictures(store: Store, ids: Sequence[str]) -> ComparedPictures:
    """The pictures with these ids, in their order; those that are gone are left out. Frames count as photos."""
    columns = [*_FACTS, "thumbnail", *store.settings.layout.appearance_columns]
    gallery = compared(store.parts(ids, columns), store.settings)
    places = {row["id"]: place for place, row in enumerate(gallery.facts)}
    order = np.array([places[identity] for identity in ids if identity in places], np.int64)
    facts = [gallery.facts[place] for place in order]
    return ComparedPictures(facts, gallery.looks.part(order), gallery.vectors[order], np.full(len(order), -1))


def compared(parts: Iterable[Columns], settings: StoreSettings) -> ComparedPictures:
    """What is compared of pictures, as they come; thumbnails are decoded on all cores and not kept."""
    facts: list[dict[str, Any]] = []
    vectors: list[Array] = [np.zeros((0, settings.layout.width), np.float32)]

    def thumbnails() -> Iterator[list[bytes]]:
        for images in parts:
            facts.extend(images.rows(_FACTS))
            vectors.append(settings.layout.appearance(images))
            yield images.values("thumbnail")

    looks = looks_of(thumbnails(), lambda: [(row["width"], row["height"]) for row in facts])
    numbers: dict[str, int] = {}
    videos = [numbers.setdefault(row["path"], len(numbers)) if is_frame(row) else -1 for row in facts]
    return ComparedPictures(facts, looks, np.concatenate(vectors), np.array(videos, np.int64))


def is_frame(row: dict[str, Any]) -> bool:
    return row["member"] is not None and is_video(row["path"])


def _rank(row: dict[str, Any]) -> tuple[bool, int, int, str, str]:
    """Best first: photos before frames, more pixels, more bytes (a member has only its shard's), then by name."""
    size = row["size"] if row["member"] is None else 0
    return is_frame(row), -row["width"] * row["height"], -size, row["path"], row["member"] or ""


def joined(
    gallery: ComparedPictures,
    kind: CopyKind,
    threshold: float,
    within: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, dict[int, tuple[CopyKind, float]]]]:
    """Places of the first picture of each group, and of the others with their kind and likeness, in order."""
    total = len(gallery.facts)
    taken = np.zeros(total, bool)
    same_bytes: dict[str, list[int]] = defaultdict(list)
    for place, facts in enumerate(gallery.facts):
        same_bytes[facts["sha256"]].append(place)
    times = np.array([facts["mtime"] for facts in gallery.facts], np.int64)
    for start in range(0, total, PICTURES_AT_ONCE):
        block = np.flatnonzero(~taken[start : start + PICTURES_AT_ONCE]) + start
        cosines = gallery.vectors[block] @ gallery.vectors[start:].T if kind == "near" else None
        for row, one in enumerate(block.tolist()):
            if taken[one]:
                continue
            found: dict[int, tuple[CopyKind, float]] = {
                place: ("file", 1.0) for place in same_bytes[gallery.facts[one]["sha256"]] if place > one
            }
            if kind != "file":
                same = gallery.looks.same_picture(one)
                _add(found, "picture", same, gallery.looks.correlations(one, same))
            if cosines is not None:
                near = np.flatnonzero(cosines[row, one + 1 - start :] >= threshold) + one + 1
                if within is not None:
                    near = near[np.abs(times[near] - times[one]) <= within * 1e9]
                near = near[np.abs(gallery.looks.shapes[near] - gallery.looks.shapes[one]) <= NEAR_SHAPE]
                near = near[gallery.looks.correlations(one, near) >= LAYOUT]
                _add(found, "near", near, cosines[row, near - start])
            others = [
                place
                for place in sorted(found)
                if not taken[place] and (gallery.videos[one] < 0 or gallery.videos[place] != gallery.videos[one])
            ]
            if others:
                taken[[one, *others]] = True
                yield one, {place: found[place] for place in others}
        if progress is not None:
            progress(min(total, start + PICTURES_AT_ONCE), total)


def _add(found: dict[int, tuple[CopyKind, float]], kind: CopyKind, places: Array, likeness: Array) -> None:
    """Take in what an earlier, stricter kind did not find."""
    for place, value in zip(places.tolist(), likeness.tolist(), strict=True):
        found.setdefault(place, (kind, min(1.0, value)))
