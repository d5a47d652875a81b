"""What a search adds to the scores of an engine: `TERMS`, each a `RankingTerm`, composed here alone.

Search, sums of queries, explanations, calibration and evaluation add the same terms.

Shapes: B images, T texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seps.retrieval.ranking.bank import background
from seps.retrieval.ranking.lexical import Matches


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
    found: list[dict[str, float]] = [{} for _ in images.ids]
    for term in TERMS:
        own = term.of_query(matches, gallery)
        alike = term.of_images(images, gallery) if is_sentence else None
        for row, (terms, identity) in enumerate(zip(found, images.ids, strict=True)):
            if alike is not None:
                terms[term.name] = alike[row] + own.get(identity, 0.0)
            elif value := own.get(identity):
                terms[term.name] = value
    return found


def add_to_scores(
    scores_BT: Tensor, images: ImageFacts, queries: Sequence[Matches] | None, gallery: GalleryFacts
) -> Tensor:
    """(B, T) scores with the terms that are the same for all sentences, and with those of each of the `queries`."""
    for term in TERMS:
        alike = term.of_images(images, gallery)
        if alike is not None:
            scores_BT = scores_BT + torch.tensor(alike).to(scores_BT)[:, None]
    if queries is None:
        return scores_BT
    scores_BT = scores_BT.clone()
    rows = {identity: row for row, identity in enumerate(images.ids)}
    for column, matches in enumerate(queries):
        for term in TERMS:
            for identity, value in term.of_query(matches, gallery).items():
                scores_BT[rows[identity], column] += value
    return scores_BT
