"""What a score is worth in a gallery: the distribution of the best scores of queries whose photo is not there.

A Gumbel distribution, that of maxima, is fitted to the best scores of background queries (`retrieval.ranking.bank`);
the *confidence* of a score is the part of such queries whose best score is lower. Among few images the best score of
such a query is low, and no sign of a match if it is higher than others': there the scores are those of a gallery of
`REFERENCE` images instead, as far as the spread of the queries' scores tells.

That is the confidence of a sentence. What people type, "dog" or "a red car", has lower scores. Of a word the question
is: does the picture show that, or rather one of many other things? The search vector v of a picture is compared with
the query's q and with those of `seps.retrieval.ranking.bank.nouns`, in the form of the query (with an article or not):

    fit(v) = (v q - mean of the largest v n over the nouns n) / unit

in nats, and `word_confidence` makes a confidence of it, without labels and without the rest of the gallery. A picture's
fit need not fall with its rank. The order of results is that of their scores, so the fits are made non-increasing,
`RANKS` ranks at a time (`falling`): the good matches come first. Of two words it is the mean of both kinds,
or that of words alone where an engine reads short queries apart from sentences.

Shapes: B images, T background queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist, fmean, pstdev
from typing import TYPE_CHECKING

import numpy as np

from seps.retrieval.engine.engine import BACKGROUND_STRENGTH, FIT
from seps.retrieval.engine.queries import as_array
from seps.retrieval.languages import content_words

if TYPE_CHECKING:
    from torch import Tensor

    from seps.retrieval.engine.queries import Array

REFERENCE = 400
"""Images that confidences in a smaller gallery are computed for, chosen on dev (docs/search-figures.md)."""
RANKS = 50
"""Neighbouring ranks whose fits are made non-increasing together."""
_EULER = 0.5772156649015329


def expected_largest(count: int) -> float:
    """About the mean of the largest of `count` values of the standard normal distribution (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def word_confidence(nats: float, fit: float = FIT) -> float:
    """In [0, 1], of a word that fits a picture by so many nats better than other things do."""
    return 1 / (1 + math.exp(min(50.0, fit - nats)))


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-increasing values nearest to these, by least squares: neighbours that rise become their mean."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, length = value, 1
        while blocks and blocks[-1][0] < mean:
            before, count = blocks.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]


def falling(values: Sequence[float]) -> list[float]:
    """`isotonic`, group by group of `RANKS`; no value is above one before it."""
    fitted: list[float] = []
    for start in range(0, len(values), RANKS):
        most = fitted[-1] if fitted else math.inf
        fitted += [min(most, value) for value in isotonic(values[start : start + RANKS])]
    return fitted


def ranked(k: int, most: int | None) -> int:
    """How many hits give the `k` best their confidences: whole groups of `RANKS`, of at most `most` candidates."""
    depth = -(-k // RANKS) * RANKS
    return depth if most is None else min(depth, most)


def sentence_share(text: str) -> float:
    """How much of a sentence a query is: 0 for one word beside articles and the like, 1/2 for two, 1 for more."""
    return min(1.0, max(0, content_words(text) - 1) / 2)


@dataclass(frozen=True)
class Calibration:
    """What scores are worth in one gallery: the distribution of the best scores of queries that are not about it."""

    place: float
    """Mode of the Gumbel distribution."""
    scale: float
    images: float
    """How many images it was made with."""
    strength: float = BACKGROUND_STRENGTH
    """Part of the level that searches take off: `BACKGROUND_STRENGTH`, or what `strength_without_labels` gave."""
    gap: float = 0.0
    """How much higher the levels of described images are (`seps.retrieval.ranking.bank.description_gap`)."""

    @classmethod
    def of(
        cls, best: Sequence[float], images: int, strength: float = BACKGROUND_STRENGTH, spread: float = 0.0
    ) -> Calibration:
        """Fitted by moments to the `best` scores of the background queries. Raises ValueError without any.

        `spread` is the standard deviation of one query's scores over the images. In a gallery of fewer than `REFERENCE`
        the best scores are raised by what normal scores of that spread would gain in one of `REFERENCE`.
        """
        if not best:
            raise ValueError("A calibration needs at least one background query.")
        scale = max(pstdev(best) * math.sqrt(6) / math.pi, 1e-6)
        gain = spread * (expected_largest(REFERENCE) - expected_largest(min(images, REFERENCE)))
        return cls(fmean(best) + gain - _EULER * scale, scale, float(images), strength)

    @classmethod
    def of_scores(cls, scores_BT: Tensor | Array, strength: float = BACKGROUND_STRENGTH) -> Calibration:
        """From the scores of all images of a gallery with the background queries."""
        scores, images = as_array(scores_BT).astype(np.float64), len(scores_BT)
        best = scores.max(axis=0).tolist()
        # One image alone shows no spread over images: that over the queries stands for it.
        spread = math.sqrt(scores.var(axis=0, ddof=1).mean()) if images > 1 else pstdev(best)
        return cls.of(best, images, strength, spread)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Calibration | None:
        """What `as_dict` wrote; None where there is nothing, or what another release wrote."""
        names = {part.name for part in fields(cls)}
        return cls(**values) if names - {"strength", "gap"} <= values.keys() <= names else None

    def as_dict(self) -> dict[str, float]:
        """Plain values for the store's settings."""
        return asdict(self)

    def confidence(self, score: float) -> float:
        """In [0, 1]: the part of queries that are about nothing in the gallery whose best score is lower."""
        return math.exp(-math.exp(min(50.0, -(score - self.place) / self.scale)))
