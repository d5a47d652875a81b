"""What a store holds, and whether all of it is whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from seps.retrieval.data import ImageSource, UnreadableImage, read_source
from seps.retrieval.data.gallery import Problem, shown_place
from seps.retrieval.index.codec import PackingError, packed_shape
from seps.retrieval.index.rows import row_id
from seps.retrieval.index.store import Store


def status(store: Store) -> dict[str, Any]:
    """What the store holds, as plain values."""
    count = described = thumbnails = 0
    for images in store.scan(["dense", "thumbnail"], batch_size=4096):
        count += len(images)
        described += sum(text is not None for text in images.values("dense"))
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
        "model": settings.model,
        "model_hash": settings.model_hash,
        "precision": settings.precision,
        "patches": 0 if settings.kind == "vectors" else settings.keep_patches or settings.grid[0] * settings.grid[1],
        "words": settings.keep_words,
        "pixels": settings.pixels,
        "kind": settings.kind,
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
    columns = [
        "id",
        "path",
        "member",
        "sha256",
        "thumbnail",
        *(["vector"] if store.settings.kind == "vectors" else []),
        *store.settings.state,
    ]
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
    settings = store.settings
    patches = settings.keep_patches or settings.grid[0] * settings.grid[1]
    faults = []
    if row["id"] != row_id(row["path"], row["member"]):
        faults.append("its id does not belong to its path")
    try:
        if settings.kind == "vectors":
            length = np.linalg.norm(row["vector"][: settings.width])
            if not abs(length - 1) < 1e-3:
                faults.append(f"its vector has the length {length:.3f}, not 1; run seps index into another store")
            if row["words"] is not None and packed_shape(row["words"])[1] != settings.words_width:
                faults.append("its description has another width")
            return faults + _thumbnail_faults(row)
        shape = packed_shape(row["tokens"])
        if shape != (settings.num_prefix_tokens + patches, settings.width):
            faults.append(f"its state holds {shape[0]} tokens of width {shape[1]}, not {patches} of {settings.width}")
        if row["words"] is not None and packed_shape(row["words"])[1] != settings.width:
            faults.append("its description has another width")
    except PackingError as error:
        faults.append(f"its state is damaged: {error}")
    if settings.keep_patches is not None and (row["mean"] is None or len(row["positions"] or b"") != 2 * patches):
        faults.append("the positions of its patches are missing")
    if row.get("guides") is not None and len(row["guides"]) != 4 * sum(settings.guides.values()):
        faults.append("its guides are damaged")
    return faults + _thumbnail_faults(row)


def _thumbnail_faults(row: dict[str, Any]) -> list[str]:
    return [] if row["thumbnail"].startswith(b"\xff\xd8") else ["its thumbnail is damaged"]


def _file_faults(store: Store, row: dict[str, Any]) -> list[str]:
    if store.settings.root_of(row["path"]) in store.settings.removed_roots:
        return []
    try:
        data = read_source(ImageSource(Path(store.settings.root) / row["path"], row["member"]))
    except UnreadableImage as error:
        return [f"{error.why} Run seps index again."]
    if hashlib.sha256(data).hexdigest() != row["sha256"]:
        return ["the file has changed since it was indexed; run seps index again"]
    return []
