"""What can be seen without a query: the pictures by date, the folders, and sentences to try."""

from __future__ import annotations

import hashlib
import heapq
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from seps.images.dates import local_time
from seps.photos.search.query import Sort
from seps.photos.search.results import SHOWN, Hit
from seps.photos.search.searcher import Searcher
from seps.photos.serve.places import shown_path
from seps.photos.store.filters import Filters

LISTED = 10_000
"""Pictures that can be reached by scrolling without a query."""
FOLDERS = 500
EXAMPLES = 6
_LOOKED_AT = 20_000
"""Rows among which descriptions for examples are looked for."""
_DRAWN = 200
PLAIN = ("people outdoors", "a dog", "food on a table", "a street at night")
"""Sentences to try in a store without descriptions."""
_OPENING = re.compile(
    r"^(the|this) (image|photo|photograph|picture)\s+(shows|features|depicts|captures|is of)\s+", re.I
)
_BREAK = re.compile(r"[,.;:!?()]| (?:with|while|as|that|who|which|is|are) ", re.I)
_WEAK = frozenset(
    re.findall(r"\w+", "a an the of and or in on at to by for from into near over under his her its their")
)
_MOST_WORDS = 9


def listed(searcher: Searcher, filters: Filters, sort: Sort) -> list[str]:
    """Ids of at most `LISTED` images, newest (or oldest) first; those of one time by id."""
    sign = 1 if sort == "oldest" else -1
    best: list[tuple[int, str]] = []
    for some in searcher.store.scan(["id", "mtime", "taken"], searcher.store.allowed(filters), batch_size=8192):
        pairs = ((sign * when(row), row["id"]) for row in some.rows())
        best = heapq.nsmallest(LISTED, [*best, *pairs])
    return [identity for _, identity in best]


def when(row: Mapping[str, Any]) -> int:
    """Nanoseconds since 1970 at which a picture was taken, or else the time of its file."""
    return int(row["mtime"] if row.get("taken") is None else row["taken"])


def shown(searcher: Searcher, ids: list[str], first: int) -> list[Hit]:
    """The images with these ids, in order, as hits without a score; those that are gone are left out."""
    rows = {row["id"]: row for row in searcher.store.select(ids, SHOWN).rows(SHOWN)} if ids else {}
    return [Hit(first + place, 0.0, **rows[identity]) for place, identity in enumerate(ids) if identity in rows]


def overview(searcher: Searcher) -> dict[str, Any]:
    """Number of pictures, the folders with most of them, the span of dates, and sentences to try."""
    counts: Counter[str] = Counter()
    images, first, last = 0, None, None
    for some in searcher.store.scan(
        ["path", "member", "mtime", "taken"], searcher.store.allowed(None), batch_size=8192
    ):
        times = [when(row) for row in some.rows()]
        images += len(times)
        first = min(times) if first is None else min(first, *times)
        last = max(times) if last is None else max(last, *times)
        for path, member in zip(some.values("path"), some.values("member"), strict=True):
            counts.update(_folders(shown_path(searcher.store.settings, path), member))
    folders = sorted(heapq.nsmallest(FOLDERS, counts, key=lambda name: (-counts[name], name)))
    return {
        "images": images,
        "folders": [{"path": name, "images": counts[name]} for name in folders],
        "oldest": "" if first is None else local_time(first),
        "newest": "" if last is None else local_time(last),
        "examples": examples(searcher),
    }


def _folders(path: str, member: str | None) -> Iterator[str]:
    """The folders above a picture, and its shard."""
    place = path if member is not None else posixpath.dirname(path)
    while place:
        yield place
        place = posixpath.dirname(place)


def examples(searcher: Searcher) -> list[str]:
    """Sentences to try: the beginnings of some descriptions, the same ones each time."""
    phrases: dict[str, str] = {}
    looked = 0
    for some in searcher.store.scan(["id", "dense"], searcher.store.allowed(None)):
        looked += len(some)
        for identity, text in zip(some.values("id"), some.values("dense"), strict=True):
            phrase = beginning(text or "")
            if phrase:
                phrases.setdefault(phrase, hashlib.sha256(identity.encode()).hexdigest())
        if len(phrases) >= _DRAWN or looked >= _LOOKED_AT:
            break
    return sorted(phrases, key=lambda phrase: phrases[phrase])[:EXAMPLES] or list(PLAIN)


def beginning(description: str) -> str:
    """What a description is about: its first words, up to a comma or the like. Empty where they are too few or many."""
    text = _OPENING.sub("", " ".join(description.split()))
    words = _BREAK.split(text, maxsplit=1)[0].split()
    while words and words[-1].lower() in _WEAK:
        words.pop()
    if not 2 + (words[:1] != [] and words[0].lower() in _WEAK) <= len(words) <= _MOST_WORDS:
        return ""
    return " ".join([words[0].lower() if words[0].lower() in _WEAK else words[0], *words[1:]])
