"""Which patches of an image a sentence keeps, or its words choose, without the rest of an explanation."""

from __future__ import annotations

from typing import Any

from seps.photos.search.explaining import FACTS, indexed_photo
from seps.photos.search.searcher import Searcher
from seps.retrieval.engine.engine import Photo


def kept_patches(searcher: Searcher, identity: str, text: str) -> dict[str, Any] | None:
    """`grid`, `kept`: per cell of it "1" or "0", row by row, and a `note`. None where the store has no such image.

    Raises ValueError for a model that selects no patches.
    """
    if not searcher.engine.traits.selects_patches:
        raise ValueError("The model of this store selects no patches.")
    facts = (*FACTS, "thumbnail")
    images = searcher.store.select([identity], [*facts, *searcher.columns])
    if not len(images):
        return None
    (row,) = images.rows(facts)
    files: list[Photo] = []

    def photo() -> Photo:
        files.append(indexed_photo(searcher, row))
        return files[0]

    found = searcher.engine.explain(text, row["dense"], photo, stored=searcher.pictures(images))
    kept = "".join("1" if cell else "0" for cell in found.kept)
    return {"grid": found.grid, "kept": kept, "note": "".join(file.note for file in files)}
