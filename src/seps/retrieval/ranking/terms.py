"""What a search adds to the scores of an engine: `TERMS`, each a `RankingTerm`, composed here alone.

Search, sums of queries, explanations, calibration and evaluation add the same terms.

A word of a query that stands in a description adds to the score of the image: names, places and numbers, which no
encoder knows. How much is a product of two ramps, so that ordinary words add nothing:

    unusual(w) = (max(0, ln(N / (n_w + 1/2)) - ORDINARY) / (ln 2N - ORDINARY))^2
    rare(w)    = min(1, max(0, ln((D + PRIOR) / d_w) - COMMON) / RAMP)
    L(q, v)    = nat * strength(q) * sum over words w of q in the description of v of unusual(w) rare(w)

N images of a training set, n_w of them with the word in a caption; D descriptions of the store, d_w of them with the
word. A `nat` is what the model's score changes by when a match becomes e times likelier. Strength and ramps are chosen
on dev and dev-llava (docs/search-your-pictures.md). `tools/ordinary_words.py` counts the words of a training set.

Shapes: B images, T texts.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from seps.retrieval.engine.queries import Array
from seps.retrieval.languages import words_of
from seps.retrieval.ranking.bank import background

if TYPE_CHECKING:
    from torch import Tensor

Scores = TypeVar("Scores", "Tensor", Array)

WORD_STRENGTH = 16.0
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


NO_MATCHES = Matches()


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


def matches_of(text: str, where: SearchedTexts) -> Matches:
    """What the words of a query add to the images of `where`."""
    asked = words_of(text)
    wanted = {word: share for word in asked if (share := unusual(word)) >= LEAST}
    described = where.described() if wanted else 0
    if not described:
        return NO_MATCHES
    strength = WORD_STRENGTH * min(1.0, max(0.5, SHORT / len(asked)))
    # More images than that have the word in too many descriptions for it to count.
    most = min(LIMIT, math.floor((described + PRIOR) * math.exp(-COMMON)))
    weights: dict[str, float] = {}
    words_of_image: dict[str, list[str]] = defaultdict(list)
    for word, share in wanted.items():
        ids = where.containing(word, most + 1)
        weight = strength * share * rare(len(ids), described) if 0 < len(ids) <= most else 0.0
        if weight:
            weights[word] = weight
            for identity in ids:
                words_of_image[identity].append(word)
    return Matches(weights, dict(words_of_image))


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


@dataclass(frozen=True)
class ImageFacts:
    """What terms know of B images."""

    ids: Sequence[str]
    described: Sequence[bool]
    levels: Sequence[float | None] | None = None
    """Over the bank of background queries; None: there is no bank."""


@dataclass(frozen=True)
class GalleryFacts:
    """What terms know of the gallery and the engine."""

    score_unit: float
    """What a score changes by when a match becomes e times likelier."""
    strength: float
    """Part of an image's level that is taken off."""
    gap: float
    """How much higher the levels of described images are."""


class RankingTerm(Protocol):
    """One term, in units of the score. It is the same for all sentences (`of_images`), or each has its own."""

    name: str
    """In the terms of a hit."""

    def of_images(self, images: ImageFacts, gallery: GalleryFacts) -> Sequence[float] | None:
        """(B,) what it adds for any sentence; None where it adds nothing."""
        ...

    def of_query(self, matches: Matches, gallery: GalleryFacts) -> Mapping[str, float]:
        """What it adds for one sentence, by id of an image; 0 for all others."""
        ...


class Lexical:
    """Rare words of the query that occur in a description."""

    name = "lexical"

    def of_images(self, images: ImageFacts, gallery: GalleryFacts) -> None:
        """See `RankingTerm`."""
        return None

    def of_query(self, matches: Matches, gallery: GalleryFacts) -> dict[str, float]:
        """See `RankingTerm`."""
        return {identity: gallery.score_unit * matches.of(identity) for identity in matches.found}


class Background:
    """Minus what an image scores for unrelated queries (hubness correction)."""

    name = "background"

    def of_images(self, images: ImageFacts, gallery: GalleryFacts) -> list[float] | None:
        """See `RankingTerm`."""
        if images.levels is None:
            return None
        return background(images.levels, gallery.strength, images.described, gallery.gap)

    def of_query(self, matches: Matches, gallery: GalleryFacts) -> dict[str, float]:
        """See `RankingTerm`."""
        return {}


TERMS: tuple[RankingTerm, ...] = (Lexical(), Background())
"""In the order in which they are added."""


def added_terms(
    images: ImageFacts, matches: Matches, gallery: GalleryFacts, *, is_sentence: bool = True
) -> list[dict[str, float]]:
    """Per image what each term adds to its score for one query, by name.

    `is_sentence`: for a picture as a query what is the same for all sentences takes no part.
    """
    terms_of_images: list[dict[str, float]] = [{} for _ in images.ids]
    for term in TERMS:
        own = term.of_query(matches, gallery)
        alike = term.of_images(images, gallery) if is_sentence else None
        for row, (terms, identity) in enumerate(zip(terms_of_images, images.ids, strict=True)):
            if alike is not None:
                terms[term.name] = alike[row] + own.get(identity, 0.0)
            elif value := own.get(identity):
                terms[term.name] = value
    return terms_of_images


def add_to_scores(
    scores_BT: Scores, images: ImageFacts, queries: Sequence[Matches] | None, gallery: GalleryFacts
) -> Scores:
    """(B, T) scores with the terms that are the same for all sentences, and with those of each of the `queries`."""
    for term in TERMS:
        alike = term.of_images(images, gallery)
        if alike is not None:
            if isinstance(scores_BT, np.ndarray):
                scores_BT = scores_BT + np.asarray(alike, scores_BT.dtype)[:, None]
            else:
                scores_BT = scores_BT + scores_BT.new_tensor(alike)[:, None]
    if queries is None:
        return scores_BT
    scores_BT = copy.deepcopy(scores_BT)
    rows = {identity: row for row, identity in enumerate(images.ids)}
    for column, matches in enumerate(queries):
        for term in TERMS:
            for identity, value in term.of_query(matches, gallery).items():
                scores_BT[rows[identity], column] += value
    return scores_BT
