"""A person's pictures: `Library`, its store, indexing, search, duplicates, descriptions and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.photos.search.searcher import Filters, Hit, Searcher

__all__ = ["Filters", "Hit", "Searcher"]


def __getattr__(name: str) -> Any:
    # The search needs packages of its own: importing the data readers must not ask for them.
    if name in __all__:
        from seps.photos.search import searcher as search

        return getattr(search, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
