"""A query over a store: scored, near-duplicates folded as `seps duplicates` groups them, and put into an order.

Every door of the software passes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from seps.photos.duplicates.likeness import joined, read_pictures
from seps.photos.search.query import Query, Sort, Term
from seps.photos.search.results import Hit
from seps.photos.search.searcher import Part, Searcher
from seps.photos.search.sums import search_combined
from seps.photos.store.store import Store
from seps.retrieval.embedded import near_duplicate_cosine

RELEVANT = 24
"""Best results that are put into an order of dates, good matches or not: those of the page's first view."""


def rank(searcher: Searcher, query: Query, pictures: Mapping[str, Part]) -> list[Hit]:
    """The best `query.k` pictures: scored, folded, and in the order that is asked for; ranks are those of the scores.

    `pictures` are encoded ones, by the names that parts of the query give them; others are files.
    """
    hits = _scored(searcher, query, pictures)
    if query.fold:
        hits = fold(searcher.store, hits)
    return in_order([replace(hit, rank=rank) for rank, hit in enumerate(hits[: query.k], 1)], query.sort)


def _scored(searcher: Searcher, query: Query, pictures: Mapping[str, Part]) -> list[Hit]:
    """The best `query.depth` pictures, best first."""
    among: dict[str, Any] = {"candidates": query.candidates, "exact": query.exact, "filters": query.filters}
    if query.sentence is not None:
        return searcher.search(query.sentence, query.depth, min_confidence=query.min_confidence, **among)
    parts = [_encoded(searcher, term, pictures) for term in query.parts]
    with searcher.running:
        return search_combined(searcher, parts, query.depth, [term.weight for term in query.parts], **among)


def _encoded(searcher: Searcher, term: Term, pictures: Mapping[str, Part]) -> Part:
    if not term.is_image:
        return searcher.part_of_text(term.text, term.sign)
    if term.text in pictures:
        return replace(pictures[term.text], sign=term.sign)
    return searcher.part_of_image(term.text, term.sign)


def in_order(hits: Sequence[Hit], sort: Sort) -> list[Hit]:
    """Hits, best first, in another order.

    By date only the relevant ones are ordered: the good matches, then the rest of the `RELEVANT` best. Those after
    them keep the order of their scores, so that no recent picture of something else comes before what was asked for.
    """
    if sort == "score":
        return list(hits)
    sign = -1 if sort == "newest" else 1
    cut = max(RELEVANT, sum(bool(hit.good) for hit in hits))
    return [*sorted(hits[:cut], key=lambda hit: (hit.good is False, sign * hit.when, hit.rank)), *hits[cut:]]


COMPARED = 1000
"""Results, from the first, among which near-duplicates are looked for."""
MARGIN = 0.15
"""Pictures whose cosine with every other result is lower than the threshold by more are not looked at: decoding their
thumbnails would take as long as the search."""


def fold(store: Store, hits: Sequence[Hit]) -> list[Hit]:
    """Each hit, in order, joins the first one before it that it is like, as one of its `folded`; the others stay.

    Only the first `COMPARED` hits are compared.
    """
    threshold = near_duplicate_cosine(store.settings.model_hash)
    near = _with_neighbours(store, [hit.id for hit in hits[:COMPARED]], threshold - MARGIN)
    if not near:
        return list(hits)
    by_id, gallery = {hit.id: hit for hit in hits}, read_pictures(store, near)
    names = [row["id"] for row in gallery.facts]
    groups = joined(gallery, "near", threshold)
    copies = {names[first]: tuple(by_id[names[place]] for place in others) for first, others in groups}
    hidden = {hit.id for group in copies.values() for hit in group}
    return [replace(hit, folded=copies.get(hit.id, ())) for hit in hits if hit.id not in hidden]


def _with_neighbours(store: Store, ids: Sequence[str], least: float) -> list[str]:
    """Those of the pictures, in order, that have another among them with at least this cosine."""
    layout, names, vectors = store.settings.layout, [], []
    for part in store.parts(ids, ["id", *store.settings.layout.appearance_columns]):
        if len(part):
            names += part.values("id")
            vectors.append(layout.appearance(part))
    if not names:
        return []
    every = np.concatenate(vectors)
    cosines = every @ every.T
    np.fill_diagonal(cosines, -1)
    near = set(np.array(names)[cosines.max(axis=1) >= least].tolist())
    return [identity for identity in ids if identity in near]
