"""One search as plain values: the same in this process and from a running `seps serve`. Imports nothing heavy."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.retrieval.index.search import Hit, Searcher

SIGNS = "+ and - were read as part of the sentence; seps find and the page of seps serve add and subtract."


@dataclass(frozen=True)
class Question:
    """A sentence, and among which pictures it is asked; see `Searcher.search`."""

    text: str
    k: int = 10
    candidates: int = 200
    exact: bool = False
    folder: str | None = None
    after: int | None = None
    before: int | None = None
    """File times in nanoseconds."""
    min_size: int | None = None
    min_confidence: float | None = None
    thumbnails: bool = False
    """Whether the answer holds the pictures' thumbnails."""
    fold: bool = False
    """Whether near-duplicates are folded under the best of them."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Question:
        """What `as_dict` wrote. Raises ValueError for anything else."""
        kinds: dict[str, tuple[type, ...]] = {"text": (str,), "folder": (str, type(None)), "exact": (bool,)}
        kinds |= {
            "thumbnails": (bool,),
            "fold": (bool,),
            "k": (int,),
            "candidates": (int,),
            "min_confidence": (int, float, type(None)),
        }
        for field in dataclasses.fields(cls):
            if field.name not in values:
                raise ValueError(f"The question lacks {field.name}.")
            if not isinstance(values[field.name], kinds.get(field.name, (int, type(None)))):
                raise ValueError(f"{field.name} of the question is {values[field.name]!r}.")
        if len(values) != len(dataclasses.fields(cls)):
            raise ValueError("The question has fields that this release does not know.")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def answer(searcher: Searcher, question: Question) -> dict[str, Any]:
    """`hits` (`Entry.as_dict`), how many of them are `good` (None: not known), `note`, `warning` and `thumbnails`."""
    from seps.library.folding import best_entries
    from seps.library.query import has_signs
    from seps.retrieval.index.search import Filters

    hits = searcher.search(
        question.text,
        max(question.k, question.candidates) if question.fold else question.k,
        candidates=question.candidates,
        exact=question.exact,
        filters=Filters(question.folder, question.after, question.before, question.min_size),
        min_confidence=question.min_confidence,
    )
    entries = best_entries(searcher.store, hits, question.k, folded=question.fold)
    hits = [entry.hit for entry in entries]
    return {
        "hits": [entry.as_dict() for entry in entries],
        "good": None if any(hit.good is None for hit in hits) else sum(bool(hit.good) for hit in hits),
        "note": " ".join(filter(None, (searcher.note(question.text), SIGNS * has_signs(question.text)))),
        "warning": searcher.without_bank,
        "thumbnails": thumbnails_of(searcher, hits) if question.thumbnails else [],
    }


def thumbnails_of(searcher: Searcher, hits: Sequence[Hit]) -> list[str]:
    """The thumbnail of each hit, JPEG in base64; empty for one that was taken out meanwhile."""
    rows = [searcher.store.get(hit.id, ["thumbnail"]) for hit in hits]
    return [base64.b64encode(row["thumbnail"]).decode() if row else "" for row in rows]
