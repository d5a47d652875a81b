"""A person's pictures: `Library`, its store, indexing, search, duplicates, descriptions and the page."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.photos.library import Library
    from seps.photos.search.query import Query
    from seps.photos.search.results import Hit
    from seps.photos.search.searcher import Searcher
    from seps.photos.store.filters import Filters

__all__ = ["Filters", "Hit", "Library", "Query", "Searcher"]
_HOMES = {
    "Filters": "store.filters",
    "Hit": "search.results",
    "Library": "library",
    "Query": "search.query",
    "Searcher": "search.searcher",
}


def __getattr__(name: str) -> Any:
    # The search needs packages of its own: importing the data readers must not ask for them.
    if name in _HOMES:
        return getattr(importlib.import_module(f"seps.photos.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
