"""Near-duplicates among results: each is folded under the first result that it is like, as `seps duplicates` groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from seps.photos.duplicates.duplicates import joined, read_pictures
from seps.photos.duplicates.likeness import near_duplicate_cosine
from seps.photos.search.hits import Hit
from seps.photos.store.store import AT_ONCE, Store

COMPARED = 1000
"""Results, from the first, among which near-duplicates are looked for."""

MARGIN = 0.15
"""Pictures whose cosine with every other result is lower than the threshold by more are not looked at: decoding their
thumbnails would take as long as the search."""


def fold(store: Store, hits: Sequence[Hit]) -> list[Hit]:
    """Each hit, in order, joins the first one before it that it is like, as one of its `folded`; the others stay.

    Only the first `COMPARED` hits are compared.
    """
    by_id = {hit.id: hit for hit in hits}
    threshold = near_duplicate_cosine(store.settings.model_hash)
    gallery = read_pictures(store, _with_neighbours(store, hits[:COMPARED], threshold - MARGIN))
    names = [row["id"] for row in gallery.facts]
    groups = joined(gallery, "near", threshold)
    copies = {names[first]: tuple(by_id[names[place]] for place in others) for first, others in groups}
    hidden = {hit.id for group in copies.values() for hit in group}
    return [replace(hit, folded=copies.get(hit.id, ())) for hit in hits if hit.id not in hidden]


def _with_neighbours(store: Store, hits: Sequence[Hit], least: float) -> list[str]:
    """Ids of the hits that have another with at least this cosine, in order."""
    ids = [hit.id for hit in hits]
    columns = ["id", *store.settings.layout.appearance_columns]
    parts = [store.select(ids[start : start + AT_ONCE], columns) for start in range(0, len(ids), AT_ONCE)]
    names = [name for part in parts for name in part.values("id")]
    if not names:
        return []
    vectors = np.concatenate([store.settings.layout.appearance(part) for part in parts if len(part)])
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -1)
    near = {name for name, alike in zip(names, cosines.max(axis=1) >= least, strict=True) if alike}
    return [identity for identity in ids if identity in near]
