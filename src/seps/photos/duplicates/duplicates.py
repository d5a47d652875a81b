"""Groups of pictures of a store that are one picture, or nearly: the same file, saved again, or taken together.

Pictures are taken best first. Each takes, of those after it that are in no group yet, all that are like it: so every
picture of a group is like the first, which is the one to keep, and a chain of small differences joins nothing.

n: pictures; B: pictures that are compared with all others at once; C: width of a vector. Memory: n x (C + B) floats and
n small pictures. Nothing is deleted, and no file is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from seps.images.formats import is_video
from seps.images.shards import shown_place
from seps.photos.duplicates.likeness import Array, Looks, looks_of, near_duplicate_cosine
from seps.photos.store.filters import Filters
from seps.photos.store.rows import Columns, StoreError, StoreSettings
from seps.photos.store.store import Store

CopyKind = Literal["file", "picture", "near"]
"""Why pictures are in one group: the same bytes; the same picture, encoded or sized again; nearly the same picture."""
KINDS: tuple[CopyKind, ...] = get_args(CopyKind)
LAYOUT = 0.4
"""Least correlation of the small pictures of nearly equal ones: models find two dogs on two lawns much alike."""
NEAR_SHAPE = 0.3
"""Most that the logarithms of width / height of nearly equal pictures differ by: upright and lying ones are two."""
AT_ONCE = 256
_FACTS = ["id", "path", "member", "size", "mtime", "sha256", "width", "height"]


@dataclass(frozen=True)
class Copy:
    """A picture of a group."""

    id: str
    path: str
    member: str | None
    width: int
    height: int
    size: int
    """Bytes of its file; of a member those of its shard or video."""
    mtime: int
    sha256: str
    kind: CopyKind | None
    """What it is to the first of the group; None for the first."""
    likeness: float
    """To the first: 1 for the same file, the correlation of pixels for the same picture, else the cosine of vectors."""

    def __str__(self) -> str:
        return shown_place(self.path, self.member)


@dataclass(frozen=True)
class Group:
    """Pictures that are like the first of them, best first: the most pixels, then the largest file."""

    pictures: tuple[Copy, ...]

    @property
    def keep(self) -> Copy:
        """The best."""
        return self.pictures[0]

    @property
    def others(self) -> tuple[Copy, ...]:
        """All but the best."""
        return self.pictures[1:]

    @property
    def kind(self) -> CopyKind:
        """The loosest that joins it."""
        return max((copy.kind for copy in self.others if copy.kind is not None), key=KINDS.index)

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": self.kind, "keep": asdict(self.keep), "others": [asdict(copy) for copy in self.others]}


@dataclass(frozen=True)
class ComparedPictures:
    """Pictures, best first, and what is compared of them."""

    facts: Sequence[dict[str, Any]]
    looks: Looks
    vectors: Array
    """(n, C) float32 of length 1, of the pixels alone (`Layout.appearance`)."""
    videos: Array
    """(n,) int64: the number of the video that a frame is of; -1 for what is no frame."""


def find_duplicates(
    store: Store,
    *,
    kind: CopyKind = "near",
    threshold: float | None = None,
    within: float | None = None,
    filters: Filters | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """Groups of the same file, then of the same picture, then of nearly the same; each group once, by its first.

    `kind` is the loosest to look for. `threshold` is the least cosine of vectors for "near" (default: that of the
    model, `near_duplicate_cosine`), `within` the most seconds between the files' times for it. Frames of one video are
    not compared with each other. Raises StoreError for a kind or a number that is none.
    """
    if kind not in KINDS:
        raise StoreError(f"The kind of duplicates is {kind!r}; it must be one of {', '.join(KINDS)}.")
    if threshold is not None and not 0 < threshold <= 1:
        raise StoreError(f"The threshold is {threshold}; it must be above 0 and at most 1.")
    if within is not None and not within >= 0:
        raise StoreError(f"The time between two pictures is {within} s; it must be 0 or more.")
    least = threshold or near_duplicate_cosine(store.settings.model_hash)
    return group(read_gallery(store, filters), kind, least, within, progress)


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
    parts = (store.select(ids[start : start + AT_ONCE], columns) for start in range(0, len(ids), AT_ONCE))
    gallery = compared(parts, store.settings)
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
    videos = [numbers.setdefault(row["path"], len(numbers)) if _is_frame(row) else -1 for row in facts]
    return ComparedPictures(facts, looks, np.concatenate(vectors), np.array(videos, np.int64))


def _is_frame(row: dict[str, Any]) -> bool:
    return row["member"] is not None and is_video(row["path"])


def _rank(row: dict[str, Any]) -> tuple[bool, int, int, str, str]:
    """Best first: photos before frames, more pixels, more bytes (a member has only its shard's), then by name."""
    size = row["size"] if row["member"] is None else 0
    return _is_frame(row), -row["width"] * row["height"], -size, row["path"], row["member"] or ""


def group(
    gallery: ComparedPictures,
    kind: CopyKind,
    threshold: float,
    within: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """As `find_duplicates`, of what was read already."""
    return _sorted(
        [
            Group(
                (
                    _copy(gallery.facts[first], None, 1.0),
                    *(_copy(gallery.facts[place], *why) for place, why in others.items()),
                )
            )
            for first, others in joined(gallery, kind, threshold, within, progress)
        ]
    )


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
    for start in range(0, total, AT_ONCE):
        block = np.flatnonzero(~taken[start : start + AT_ONCE]) + start
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
            progress(min(total, start + AT_ONCE), total)


def _add(found: dict[int, tuple[CopyKind, float]], kind: CopyKind, places: Array, likeness: Array) -> None:
    """Take in what an earlier, stricter kind did not find."""
    for place, value in zip(places.tolist(), likeness.tolist(), strict=True):
        found.setdefault(place, (kind, min(1.0, value)))


def _copy(row: dict[str, Any], kind: CopyKind | None, likeness: float) -> Copy:
    return Copy(**row, kind=kind, likeness=likeness)


def _sorted(groups: Sequence[Group]) -> list[Group]:
    """By kind and name; of two videos that share several frames the first pair alone."""
    ordered = sorted(groups, key=lambda found: (KINDS.index(found.kind), found.keep.path, found.keep.member or ""))
    kept: list[Group] = []
    seen: set[tuple[str, ...]] = set()
    for found in ordered:
        files = tuple(sorted({copy.path for copy in found.pictures}))
        frames = all(_is_frame({"path": copy.path, "member": copy.member}) for copy in found.pictures)
        if not (frames and files in seen):
            kept.append(found)
        if frames:
            seen.add(files)
    return kept
