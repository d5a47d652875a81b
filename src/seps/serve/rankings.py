"""The order in which results are shown: by score or date, near-duplicates folded, page by page.

A ranking is made once, when the first page of a search is asked for, and kept: further pages are parts of the same
order, whatever is indexed in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from seps.library.duplicates import NEAR, NEAR_OTHER_MODELS
from seps.retrieval.index.codec import restore
from seps.retrieval.index.search import Hit, Searcher
from seps.serve.queries import Sort

COMPARED = 1000
"""Images of a ranking, from the first, among which near-duplicates are looked for."""
RELEVANT = 24
"""Best results that are put into an order of dates, good matches or not: those of the page's first view."""
_AT_ONCE = 200


@dataclass(frozen=True)
class Entry:
    """One result, and the near-duplicates that follow it in the ranking."""

    hit: Hit
    folded: tuple[Hit, ...] = ()


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


def fold(hits: Sequence[Hit], vectors: np.ndarray | None, alike: float) -> list[Entry]:
    """Each hit, in order, joins the first one before it that it is like; the others are entries of their own.

    `vectors` (n, C) of length one are those of the first n hits; the others are not compared. A vector of zeros is
    like none.
    """
    if vectors is None:
        return [Entry(hit) for hit in hits]
    leaders: list[int] = []
    folded: dict[int, list[Hit]] = {}
    for place, hit in enumerate(hits):
        if leaders and place < len(vectors):
            like = np.flatnonzero(vectors[leaders] @ vectors[place] >= alike)
            if len(like):
                folded[leaders[like[0]]].append(hit)
                continue
        folded[place] = []
        if place < len(vectors):
            leaders.append(place)
    return [Entry(hits[place], tuple(more)) for place, more in folded.items()]


def likeness(searcher: Searcher) -> float:
    """The cosine from which two pictures of this store are near-duplicates."""
    return NEAR if searcher.store.settings.kind == "patches" else NEAR_OTHER_MODELS


def picture_vectors(searcher: Searcher, ids: Sequence[str]) -> np.ndarray:
    """(n, C) vectors of length one of the pixels alone: the mean patch, or a dual encoder's vector.

    Not the column `vector`, in which descriptions take part: a copy without description must be found as well. An id
    that is gone has zeros.
    """
    store = searcher.store
    settings, found = store.settings, dict[str, np.ndarray]()
    columns = ["vector"] if settings.kind == "vectors" else list(settings.state)
    for start in range(0, len(ids), _AT_ONCE):
        images = store.select(ids[start : start + _AT_ONCE], ["id", *columns])
        if not len(images):
            continue
        if settings.kind == "vectors":
            means = torch.from_numpy(np.array(images.vectors()[:, : settings.width], np.float32))
        else:
            stored = restore(images, settings)
            tokens = stored.features.tokens[:, settings.num_prefix_tokens :]
            means = tokens.float().mean(dim=1) if stored.mean is None else stored.mean
        found.update(zip(images.values("id"), F.normalize(means, dim=-1).numpy(), strict=True))
    return np.stack([found.get(identity, np.zeros(settings.width, np.float32)) for identity in ids])
