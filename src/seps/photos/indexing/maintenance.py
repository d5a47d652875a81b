"""What a run of indexing did, the bank after it, what a store holds, whether it is whole, and taking folders out."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource, row_id
from seps.photos.indexing.embedding import stored_levels
from seps.photos.indexing.gallery import Problem
from seps.photos.indexing.opening import stored_root
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError, shown_place
from seps.photos.store.store import Store, writer_lock
from seps.photos.store.tables import Columns
from seps.retrieval.engine.engine import BACKGROUND_STRENGTH, Engine
from seps.retrieval.engine.queries import as_array
from seps.retrieval.ranking.bank import (
    bank_of,
    calibration_name,
    description_gap,
    is_outdated,
    strength_without_labels,
)
from seps.retrieval.ranking.confidence import REFERENCE, Calibration
from seps.threads import computing_threads, cores_used

UNFINISHED = -1.0
"""Images of a calibration that is being made."""
PICTURES_AT_ONCE = 256
"""Images whose levels are written in one commit."""
CANDIDATES = 16
"""Images that are scored exactly per background query: the best one alone is wanted."""
SAMPLED = 1000
"""Images whose levels and scores with the bank stand for those of the whole gallery."""


@dataclass
class IndexReport:
    """What one run of indexing did."""

    new: int = 0
    changed: int = 0
    moved: int = 0
    """Images known under another name: their state was taken over, not computed."""
    unchanged: int = 0
    deleted: int = 0
    described: int = 0
    """Images of the store with a description."""
    former_size: tuple[int, int] | None = None
    """(height, width) that the store's pictures are encoded at, where the model takes others now."""
    problems: list[Problem] = field(default_factory=list)
    kept: int = 0
    """Rows kept although their file could not be read this time, or is in a place that is skipped."""
    description_problems: list[Problem] = field(default_factory=list)
    """Lines of descriptions that were not used, and descriptions that may be out of date."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """What of the folders is left out on purpose: names by reason."""
    excluded: int = 0
    """Rows of these folders that are kept and not found, because their places are left out."""
    away: list[str] = field(default_factory=list)
    """Folders of the store that are not there; their pictures stay."""
    unreadable: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of pictures that could not be read, by id."""
    rescored: int = 0
    """Images whose levels and calibration another version of seps or text side had made; they are made again."""
    seconds: float = 0.0
    decoding: float = 0.0
    encoding: float = 0.0
    own: float = 0.0
    """Processor seconds of decoding pictures, of the encoders and packing, and of everything else."""

    @property
    def unread(self) -> dict[str, int]:
        """How many could not be indexed, by the reason in a few words, the most frequent first."""
        return dict(Counter(problem.kind or "not readable" for problem in self.problems).most_common())


def refresh_background(store: Store, engine: Engine, *, changed: bool) -> None:
    """Fill in missing levels, and calibrate again where the gallery has `changed`; the caller holds the lock."""
    missing = store.without_level()
    for start in range(0, len(missing), PICTURES_AT_ONCE):
        columns = list(dict.fromkeys(["id", "vector", *store.settings.layout.columns]))
        images = store.select(missing[start : start + PICTURES_AT_ONCE], columns)
        levels = zip(images.values("id"), stored_levels(engine, images, store.settings.layout), strict=True)
        store.put_levels({identity: value for identity, value in levels if value is not None})
    known = Calibration.from_dict(store.settings.calibration)
    count = len(store) - store.settings.excluded
    outdated = is_outdated(store.settings.bank, store.settings.calibration_tag)
    if changed or missing or outdated or known is None or known.images != count:
        weight = engine.traits.background_weight
        strength = gallery_strength(store, engine) if weight is None else weight
        gap = gallery_gap(store)
        # Until the new one is there the last calibration goes on; if this run ends before, its images are not those.
        former = {} if known is None else {**known.as_dict(), "images": UNFINISHED}
        making = {**former, "strength": strength, "gap": gap}
        store.set_settings(replace(store.settings, calibration=making, calibrated=calibration_name()))
        searcher = Searcher(store, engine)
        found = calibrate(searcher, count)
        searcher.close()
        calibration = {} if found is None else {**found.as_dict(), "gap": gap}
        store.set_settings(replace(store.settings, calibration=calibration))


def _shown(searcher: Searcher) -> Iterator[Columns]:
    """The images that can be found, with what their scores need."""
    return searcher.store.scan(["id", *searcher.columns], searcher.store.allowed(None))


def calibrate(searcher: Searcher, images: int) -> Calibration | None:
    """Ask the gallery the last sentences of the bank. None for a gallery without anything that the engine scores."""
    if not images or (not searcher.engine.traits.reads_pixels and not searcher.store.described()):
        return None
    bank = bank_of(searcher.engine, searcher.engine.digests())
    if images < REFERENCE:
        parts = [searcher.query_scores(part, bank.asked) for part in _shown(searcher)]
        return Calibration.of_scores(np.concatenate(parts), searcher.strength)
    # One query leaves cores idle while it reads the table, so some are asked at once.
    with computing_threads(max(1, min(8, cores_used())), "seps-calibrate") as pool:
        best = pool.map(
            lambda text: searcher.search_parts([searcher.part_of_query(text)], 1, CANDIDATES), bank.each_asked()
        )
        return Calibration.of([hits[0].score for hits in best], images, searcher.strength)


def _sample(store: Store, columns: list[str]) -> Columns:
    """Some columns of at most `SAMPLED` images, spread over the ids."""
    ids = sorted(identity for some in store.scan(["id"], batch_size=8192) for identity in some.values("id"))
    return store.select(ids[:: max(1, len(ids) // SAMPLED)][:SAMPLED], columns)


def gallery_strength(store: Store, engine: Engine) -> float:
    """`strength_without_labels` of at most `SAMPLED` images, with the scores of their vectors, nearly the exact."""
    images = _sample(store, ["vector"])
    bank = bank_of(engine)
    return strength_without_labels(images.vectors() @ as_array(bank.vectors).T) if len(images) else BACKGROUND_STRENGTH


def gallery_gap(store: Store) -> float:
    """`description_gap` of at most `SAMPLED` images."""
    rows = [row for row in _sample(store, ["bank", "dense"]).rows() if row["bank"] is not None]
    some, others = ([row["bank"] for row in rows if (row["dense"] is not None) == told] for told in (True, False))
    return description_gap(some, others)


def status(store: Store) -> dict[str, Any]:
    """What the store holds, as plain values."""
    count = described = thumbnails = read = with_text = 0
    for images in store.scan(["dense", "ocr", "thumbnail"], batch_size=4096):
        count += len(images)
        described += sum(text is not None for text in images.values("dense"))
        texts = images.values("ocr")
        read += len(texts) - texts.count(None)
        with_text += sum(map(bool, texts))
        thumbnails += sum(map(len, images.values("thumbnail")))
    disk = store.disk_bytes()
    settings = store.settings
    return {
        "store": store.location,
        "folder": settings.root,
        **({"folders": list(settings.roots)} if settings.more_roots else {}),
        "images": count,
        "excluded": settings.excluded,
        "described": described,
        **({"text_looked_for": read, "with_text": with_text} if read else {}),
        "model": settings.model,
        "model_hash": settings.model_hash,
        **({"text_hash": settings.text_hash} if settings.text_hash else {}),
        "size": settings.layout.size,
        **settings.layout.facts,
        "bank": bool(settings.bank),
        "approximate_index": store.indexed(),
        "format": settings.format,
        "disk_bytes": disk,
        "disk_bytes_per_image": round(disk / count) if count else 0,
        "thumbnail_bytes_per_image": round(thumbnails / count) if count else 0,
    }


def verify(store: Store, *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """What is wrong with the store: broken or doubled rows, and images whose files are not as indexed."""
    problems: list[Problem] = []
    seen: set[str] = set()
    total, done = len(store), 0
    facts = ("id", "path", "member", "sha256", "thumbnail", "vector")
    columns = list(dict.fromkeys([*facts, *store.settings.layout.columns]))
    for images in store.scan(columns, batch_size=128):
        for row in images.rows():
            name = shown_place(row["path"], row["member"])
            problems += [Problem(name, why) for why in _faults(store, row)]
            if row["id"] in seen:
                problems.append(Problem(name, "it is in the store twice; run seps index again"))
            seen.add(row["id"])
            problems += [Problem(name, why) for why in _file_faults(store, row)]
        done += len(images)
        if progress is not None:
            progress(done, total)
    return problems


def _faults(store: Store, row: dict[str, Any]) -> list[str]:
    wrong_id = row["id"] != row_id(row["path"], row["member"])
    faults = ["its id does not belong to its path"] if wrong_id else []
    return faults + store.settings.layout.faults(row) + _thumbnail_faults(row)


def _thumbnail_faults(row: dict[str, Any]) -> list[str]:
    return [] if row["thumbnail"].startswith(b"\xff\xd8") else ["its thumbnail is damaged"]


def _file_faults(store: Store, row: dict[str, Any]) -> list[str]:
    if store.settings.root_of(row["path"]) in store.settings.removed_roots:
        return []
    try:
        data = read_source(ImageSource(store.settings.file(row["path"]), row["member"]))
    except UnreadableImage as error:
        return [f"{error.why} Run seps index again."]
    if hashlib.sha256(data).hexdigest() != row["sha256"]:
        return ["the file has changed since it was indexed; run seps index again"]
    return []


def remove_root(location: str | os.PathLike[str], folder: str, *, prune: bool = False) -> tuple[str, int]:
    """Take a folder out of a store: its rows are kept, excluded, until it is added again, or with `prune` deleted.

    Returns the folder as the store names it, and how many pictures go. No file is touched. Raises StoreError where
    `folder` is not exactly one of the store's, or its only one.
    """
    Store.open(location)  # the lock would make a folder where there is no store
    with writer_lock(str(location)):
        store = Store.open(location)
        settings = store.settings
        root = stored_root(folder, settings.roots) or stored_root(os.path.realpath(folder), settings.roots)
        listed = ", ".join(settings.roots)
        if root is None:
            raise StoreError(
                f"The store {location} does not hold the folder {folder}. Name one of its folders exactly: {listed}. "
                "Nothing was changed."
            )
        if len(settings.roots) == 1:
            raise StoreError(
                f"{root} is the only folder of the store {location}; it was not removed. To remove the whole store, "
                f"delete {location}."
            )
        base = "" if root == settings.root else root
        ids = [row.id for row in store.known().values() if settings.base_of(row.path) == base]
        removed = (*settings.removed_roots, root)
        if prune:
            store.delete(ids)
            more = tuple(other for other in settings.more_roots if other != root)
            removed = tuple(other for other in removed if other in (settings.root, *more))
            store.set_settings(replace(store.settings, more_roots=more, removed_roots=removed))
            store.put_excluded({})
        else:
            store.put_excluded(dict.fromkeys(ids, True))
            store.set_settings(replace(store.settings, removed_roots=removed))
        store.tidy(always=True)
    return root, len(ids)
