"""Groups of pictures of a store that are one picture, or nearly: the same file, saved again, or taken together.

Nothing is deleted, and no file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from seps.photos.duplicates.likeness import (
    KINDS,
    ComparedPictures,
    CopyKind,
    is_frame,
    joined,
    read_gallery,
)
from seps.photos.store.filters import Filters
from seps.photos.store.rows import StoreError, shown_place
from seps.photos.store.store import Store
from seps.retrieval.embedded import near_duplicate_cosine


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


def _copy(row: dict[str, Any], kind: CopyKind | None, likeness: float) -> Copy:
    return Copy(**row, kind=kind, likeness=likeness)


def _sorted(groups: Sequence[Group]) -> list[Group]:
    """By kind and name; of two videos that share several frames the first pair alone."""
    ordered = sorted(groups, key=lambda one: (KINDS.index(one.kind), one.keep.path, one.keep.member or ""))
    kept: list[Group] = []
    seen: set[tuple[str, ...]] = set()
    for one in ordered:
        files = tuple(sorted({copy.path for copy in one.pictures}))
        frames = all(is_frame({"path": copy.path, "member": copy.member}) for copy in one.pictures)
        if not (frames and files in seen):
            kept.append(one)
        if frames:
            seen.add(files)
    return kept
