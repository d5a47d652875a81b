"""The order in which results are shown: by score or date, page by page.

A ranking is made once, when the first page of a search is asked for, and kept: further pages are parts of the same
order, whatever is indexed in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from seps.photos.search.searcher import Hit
from seps.photos.serve.queries import Sort

RELEVANT = 24
"""Best results that are put into an order of dates, good matches or not: those of the page's first view."""


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
