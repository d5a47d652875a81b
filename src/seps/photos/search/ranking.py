"""A query over a store: its ranking, put into an order and folded. Every door of the software passes here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from seps.photos.search.folding import fold
from seps.photos.search.hits import Hit, Part
from seps.photos.search.query import Query, Sort, Term
from seps.photos.search.searcher import Searcher
from seps.photos.search.sums import search_combined

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
