"""Searches of several parts: the score of a sum of sentences and pictures.

Scores of different parts have different scales, those of pictures above all, so beside other parts each is counted in
standard deviations, and the score of a picture v is their weighted mean:

    S(v) = sum over parts p of w_p sign_p z_p(v) / sum of all w_p,        z_p(v) = (s_p(v) - mean_p) / deviation_p

s_p is what a search for the part alone gives: of a sentence the model's score, plus what rare words of the description
add, minus the picture's level over the bank of background queries. The weights are 1, unless the page's slider says
otherwise. Mean and deviation are those of the `SAMPLE` pictures of the store that are nearest to each part, also to
what is subtracted, so that filters and the number of candidates change no score. One part alone is exactly the plain
search for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from seps.photos.search.results import Hit
from seps.photos.search.searcher import Part, Searcher
from seps.photos.store.tables import Columns

SAMPLE = 100
"""Pictures per part over which scores are standardised: those nearest to it."""


def search_combined(
    searcher: Searcher, parts: Sequence[Part], k: int = 10, weights: Sequence[float] | None = None, **among: Any
) -> list[Hit]:
    """The `k` images with the highest S, for encoded parts with their weights w_p (default: 1 each).

    `Hit.parts` are in the order of `parts`, whose order changes nothing else; `among` as of `Searcher.search_parts`.

    Raises ValueError for weights that are negative, or all zero.
    """
    if len(parts) == 1:
        return searcher.search_parts(parts, k, **among)
    scaled = standardised(searcher, parts, [1.0] * len(parts) if weights is None else weights)
    # Sums of floats depend on their order, and the order of the parts must change nothing.
    order = sorted(range(len(parts)), key=lambda number: _sorting_key(scaled[number]))
    hits = searcher.search_parts([scaled[number] for number in order], k, **among)
    places = [order.index(number) for number in range(len(parts))]
    return [replace(hit, parts=tuple(hit.parts[place] for place in places)) for hit in hits]


def standardised(searcher: Searcher, parts: Sequence[Part], weights: Sequence[float]) -> list[Part]:
    """The parts with `scale` and `mean`, which make of a part's score what it adds to S.

    A part that gives all pictures one score adds nothing. Raises ValueError for weights that are negative, or all zero.
    """
    total = math.fsum(weights)
    if min(weights) < 0 or not total > 0:
        raise ValueError(f"The weights of a query's parts are {list(weights)}; none may be negative, nor all zero.")
    scores: list[list[float]] = [[] for _ in parts]
    for images in _sample(searcher, parts):
        for own, part in zip(scores, parts, strict=True):
            own += [score + sum(terms.values()) for score, terms in searcher.scored(images, part)]
    scaled = []
    for part, own, weight in zip(parts, scores, weights, strict=True):
        deviation = pstdev(own) if len(own) > 1 else 0.0
        scale = weight / total / deviation if deviation else 0.0
        scaled.append(replace(part, scale=scale, mean=fmean(own) if own else 0.0))
    return scaled


def _sample(searcher: Searcher, parts: Sequence[Part]) -> Iterator[Columns]:
    """The pictures nearest to each part, and those whose descriptions have most of its rare words; each once."""
    store, every = searcher.store, searcher.store.allowed(None)
    ids: set[str] = set()
    for part in parts:
        estimate = searcher.estimate(part.strength) if part.described else None
        ids.update(store.nearest(part.vector, SAMPLE, ["id"], every, estimate).values("id"))
        ids.update(store.among(part.matches.best(SAMPLE), every))
    return store.parts(sorted(ids), ["id", *searcher.columns])


def _sorting_key(part: Part) -> tuple[Any, ...]:
    """Puts parts in one order, however they came; parts with one key add the same."""
    return part.described, part.sign, part.scale, part.mean
