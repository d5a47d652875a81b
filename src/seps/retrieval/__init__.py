"""Text <-> image retrieval: data, model, evaluation, index, search and explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.retrieval.index.search import Filters, Hit, Searcher

__all__ = ["Filters", "Hit", "Searcher"]


def __getattr__(name: str) -> Any:
    # The search needs packages of its own: importing the data readers must not ask for them.
    if name in __all__:
        from seps.retrieval.index import search

        return getattr(search, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
