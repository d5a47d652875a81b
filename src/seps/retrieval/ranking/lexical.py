"""Words of a query that stand in descriptions: names, places and numbers, which no encoder knows.

A word adds to the score of every image whose description has it. How much is a product of two ramps, so that ordinary
words add nothing:

    unusual(w) = (max(0, ln(N / (n_w + 1/2)) - ORDINARY) / (ln 2N - ORDINARY))^2
    rare(w)    = min(1, max(0, ln((D + PRIOR) / d_w) - COMMON) / RAMP)
    L(q, v)    = nat * strength(q) * sum over words w of q in the description of v of unusual(w) rare(w)

N images of a training set, n_w of them with the word in a caption; D descriptions of the store, d_w of them with the
word. A `nat` is what the model's score changes by when a match becomes e times likelier. Strength and ramps were chosen
on dev and dev-llava (docs/search-your-pictures.md). `tools/ordinary_words.py` counts the words of a training set.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Protocol

STRENGTH = 16.0
"""Nats that one name adds in a query of up to `SHORT` words; from twice as many words on, half of it."""
SHORT = 3
ORDINARY = 4.0
"""Nats: a word that the captions of more than e^-4 of the training images (1 in 55) have adds nothing."""
COMMON, RAMP = 1.5, 1.5
"""Nats: a word in more than 22 % of the descriptions adds nothing, one in less than 5 % adds all."""
PRIOR = 20
"""Descriptions without the word that a store is taken to have beside its own: a word of a single one is rare."""
LEAST = 1 / 32
"""A word less unusual than that would add less than half a nat: it adds nothing, and is not looked up."""
LIMIT = 20_000
"""Images that one word may find."""
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
"""Scripts that are written without spaces: words are found there as pairs of letters."""


class SearchedTexts(Protocol):
    """Where words are looked up: a store, or descriptions in memory."""

    def described(self) -> int:
        """How many images have a description."""
        ...

    def containing(self, word: str, limit: int) -> list[str]:
        """Ids of at most `limit` images whose description has the word, as `words_of` writes it."""
        ...


@dataclass(frozen=True)
class Matches:
    """What the words of one query add to the scores of images, in nats."""

    words: Mapping[str, float] = field(default_factory=dict)
    """What each word adds; words that add nothing are left out."""
    found: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By the id of an image: which of these words its description has."""

    def of(self, identity: str) -> float:
        """What they add to the score of one image."""
        return sum(self.words[word] for word in self.found.get(identity, ()))

    def best(self, count: int) -> list[str]:
        """Ids of the images that gain most; equal ones by their id."""
        return sorted(self.found, key=lambda identity: (-self.of(identity), identity))[:count]


NONE = Matches()


def words_of(text: str) -> list[str]:
    """The distinct words of a text in lower case; single Latin letters are none (the s of "Olga's")."""
    found: dict[str, None] = {}
    for run in _WORD.findall(unicodedata.normalize("NFC", text).lower()):
        for part in re.split(f"({_UNSPACED.pattern})", run):
            if is_unspaced(part) and len(part) > 1:
                found.update(dict.fromkeys(part[i : i + 2] for i in range(len(part) - 1)))
            elif len(part) > 1 or is_unspaced(part) or part.isdigit():
                found[part] = None
    return list(found)


def is_unspaced(word: str) -> bool:
    """Whether a word is of a script that is written without spaces."""
    return bool(word) and _UNSPACED.fullmatch(word) is not None


@cache
def ordinary_words() -> tuple[int, dict[str, int]]:
    """Images of the training set, and how many have each word in a caption; words of a single image are left out."""
    lines = (files("seps") / "assets" / "words.txt").read_text(encoding="utf-8").splitlines()
    total, *entries = [line for line in lines if not line.startswith("#")]
    return int(total), {word: int(count) for word, count in (entry.split() for entry in entries)}


def unusual(word: str) -> float:
    """0 for a word of everyday captions, 1 for one that they do not have."""
    total, counts = ordinary_words()
    above = math.log(total / (counts.get(word, 0) + 0.5)) - ORDINARY
    return float((max(0.0, above) / (math.log(2 * total) - ORDINARY)) ** 2)


def rare(count: int, described: int) -> float:
    """0 for a word of many descriptions, 1 for one of few; `count` of `described` have it."""
    return min(1.0, max(0.0, math.log((described + PRIOR) / max(1, count)) - COMMON) / RAMP)


def matches(text: str, where: SearchedTexts) -> Matches:
    """What the words of a query add to the images of `where`."""
    asked = words_of(text)
    wanted = {word: share for word in asked if (share := unusual(word)) >= LEAST}
    described = where.described() if wanted else 0
    if not described:
        return NONE
    strength = STRENGTH * min(1.0, max(0.5, SHORT / len(asked)))
    # More images than that have the word in too many descriptions for it to count.
    most = min(LIMIT, math.floor((described + PRIOR) * math.exp(-COMMON)))
    weights: dict[str, float] = {}
    found: dict[str, list[str]] = defaultdict(list)
    for word, share in wanted.items():
        ids = where.containing(word, most + 1)
        weight = strength * share * rare(len(ids), described) if 0 < len(ids) <= most else 0.0
        if weight:
            weights[word] = weight
            for identity in ids:
                found[identity].append(word)
    return Matches(weights, dict(found))


class InMemory:
    """Descriptions by id, for evaluations."""

    def __init__(self, texts: Mapping[str, str | None]) -> None:
        self._ids: dict[str, list[str]] = defaultdict(list)
        self._count = 0
        for identity, text in texts.items():
            self._count += text is not None
            for word in words_of(text or ""):
                self._ids[word].append(identity)

    def described(self) -> int:
        """How many have a description."""
        return self._count

    def containing(self, word: str, limit: int) -> list[str]:
        """Ids of at most `limit` descriptions with the word."""
        return self._ids.get(word, [])[:limit]
