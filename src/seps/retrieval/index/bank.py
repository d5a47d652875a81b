"""A bank of background queries: how high an image scores whatever is asked, and what a score is worth in a gallery.

Some images score high for every sentence, and a description raises an image's scores for sentences of all kinds. The
*level* b of an image measures that: the mean of its `BEST` best scores with the sentences of the bank, one number per
image. A search ranks by `S - strength * b`.

The last `ASKED` sentences of the bank are asked of the whole gallery instead. They were written for other photos, so
their best scores are those of queries whose photo is not there. A Gumbel distribution, that of maxima, is fitted to
them; the *confidence* of a score is the part of such queries whose best score is lower.

Shapes: B images, T sentences, C width.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from statistics import fmean, pstdev

import torch
from torch import Tensor

from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.index.codec import StoredScorer, image_vectors, restore, text_vectors
from seps.retrieval.index.rows import Columns, StoreSettings
from seps.retrieval.model import RetrievalModel

BEST = 10
"""Best scores whose mean is an image's level."""
NEAR = 64
"""Sentences per image that are scored exactly, found by their vectors: the best are among them."""
ASKED = 64
"""Sentences at the end of the bank that calibrate the confidence and take no part in levels."""
STRENGTH = 0.75
"""Part of the level that is taken off, chosen on dev with `mini` (docs/search-figures.md)."""
GOOD = 0.3
"""Confidence from which a hit counts as a good match, chosen on dev (docs/search-figures.md)."""
NO_BANK = (
    "The store {} was made without the bank of background queries, so its results have no confidence and described "
    "pictures rank too high beside undescribed ones. To add it, run once more: seps index {} --store {}"
)
KEPT_BANKS = 2
"""Encoded banks that a process keeps: 40 MB each at width 384."""
_EULER = 0.5772156649015329
_LOCK = threading.Lock()


@functools.cache
def sentences() -> tuple[str, ...]:
    """The sentences that ship with the package; the last `ASKED` of them are for `calibrate`."""
    text = (files("seps") / "assets" / "bank" / "sentences.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line.strip())


@functools.cache
def bank_name() -> str:
    """A tag of the sentences and of how a level is made of them: levels under one tag can be compared."""
    return hashlib.sha256("\n".join([f"{BEST} {ASKED}", *sentences()]).encode()).hexdigest()[:16]


def bank_words() -> str:
    """The correction in words, for figures."""
    return f"S - {STRENGTH:g} x the mean of the {BEST} best of {len(sentences()) - ASKED} background queries"


class Bank:
    """The sentences of the bank as a model sees them; made once per run.

    `texts` make the levels; the last `ASKED` sentences (`asked`) calibrate.
    """

    def __init__(self, model: RetrievalModel, texts: Sequence[str] | None = None) -> None:
        found = model.encode_texts(list(sentences() if texts is None else texts))
        self.texts, self.asked = _rows(found, slice(None, -ASKED)), _rows(found, slice(-ASKED, None))
        self.vectors = text_vectors(self.texts)

    def near_scores(self, vectors_BC: Tensor, score: Callable[[int, TextFeatures], Tensor]) -> Tensor:
        """(B, `NEAR`) exact scores with each image's nearest sentences: `score(i, texts)` gives image i's (T,).

        `vectors_BC` are the images' vectors (`image_vectors`), by which the nearest sentences are found.
        """
        pooled = vectors_BC.float().to(self.vectors.device) @ self.vectors.T
        nearest = pooled.topk(min(NEAR, pooled.shape[1]), dim=1).indices
        found = [score(i, _rows(self.texts, rows)) for i, rows in enumerate(nearest)]
        return torch.stack(found) if found else torch.zeros(nearest.shape)


def _rows(texts: TextFeatures, rows: Tensor | slice) -> TextFeatures:
    """Some of the sentences, without padding that none of them needs."""
    mask = texts.mask[rows]
    longest = int(mask.sum(dim=1).max())
    return TextFeatures(texts.words[rows][:, :longest], mask[:, :longest])


def bank_of(model: RetrievalModel, digest: str) -> Bank:
    """The bank of a model whose weights have this `model_hash`, encoded once per process, from any thread."""
    key = (digest, str(model.device))
    with _LOCK:
        if key not in _MADE:
            while len(_MADE) >= KEPT_BANKS:
                del _MADE[next(iter(_MADE))]
            _MADE[key] = Bank(model)
        return _MADE[key]


_MADE: dict[tuple[str, str], Bank] = {}
"""Banks of this process, by digest of the weights and device."""


def level(scores_BT: Tensor, best: int = BEST) -> Tensor:
    """(B,) mean of the `best` largest of each image's scores with the bank."""
    return scores_BT.topk(min(best, scores_BT.shape[1]), dim=1).values.mean(dim=1)


@torch.no_grad()
def image_levels(model: RetrievalModel, images: ImageFeatures, bank: Bank, *, memory: int | None = None) -> Tensor:
    """(B,) levels of images that are in no store."""
    return level(
        bank.near_scores(
            image_vectors(model, images),
            lambda i, texts: model.score(images.rows(i, i + 1), texts, memory=memory)[0],
        )
    )


@torch.no_grad()
def stored_levels(
    model: RetrievalModel, images: Columns, vectors_BC: Tensor, settings: StoreSettings
) -> list[float | None]:
    """The level of each image, from its state as a store with these settings keeps it.

    None for all where the head scores descriptions alone and none of them has one.
    """
    stored = restore(images, settings, model.device)
    if not model.head.uses_pixels and stored.features.dense is None:
        return [None] * len(images)
    scorer = StoredScorer(model, settings)
    bank = bank_of(model, settings.model_hash)
    scores = bank.near_scores(vectors_BC, lambda i, texts: scorer.score(stored.rows(i, i + 1), texts)[0])
    return [float(value) for value in level(scores)]


def strength_without_labels(scores_BT: Tensor, best: int = BEST) -> float:
    """A strength for a model without measured queries, from the scores of its gallery with the bank alone.

    Half of the sentences (the even ones) give each image's level, the others stand for queries. The strength is the
    slope, within [0, 1], with which an image's mean score of the second half's sentences grows with its level: as
    much as a level says about queries that it was not made of. Meant for zero-shot models, and not measured on any of
    them. Raises ValueError for fewer than two images or sentences.
    """
    if min(scores_BT.shape) < 2:
        raise ValueError(f"The scores are {tuple(scores_BT.shape)}; at least two images and two sentences are needed.")
    levels, others = level(scores_BT[:, ::2], best), scores_BT[:, 1::2].mean(dim=1)
    spread = levels - levels.mean()
    variance = float((spread * spread).sum())
    return min(1.0, max(0.0, float((spread * (others - others.mean())).sum()) / variance)) if variance else 0.0


@dataclass(frozen=True)
class Calibration:
    """What scores are worth in one gallery: the distribution of the best scores of queries that are not about it."""

    place: float
    """Mode of the Gumbel distribution."""
    scale: float
    images: float
    """How many images it was made with."""

    @classmethod
    def of(cls, best: Sequence[float], images: int) -> Calibration:
        """Fitted by moments to the `best` scores of the background queries. Raises ValueError without any."""
        if not best:
            raise ValueError("A calibration needs at least one background query.")
        scale = max(pstdev(best) * math.sqrt(6) / math.pi, 1e-6)
        return cls(fmean(best) - _EULER * scale, scale, float(images))

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Calibration | None:
        """What `as_dict` wrote; None where there is nothing, or what another release wrote."""
        return cls(**values) if values.keys() == {part.name for part in fields(cls)} else None

    def as_dict(self) -> dict[str, float]:
        """Plain values for the store's settings."""
        return asdict(self)

    def confidence(self, score: float) -> float:
        """The part of queries that are not about the gallery whose best score is lower: in [0, 1]."""
        return math.exp(-math.exp(min(50.0, -(score - self.place) / self.scale)))


def background(levels: Sequence[float | None]) -> list[float]:
    """What the bank adds to each image's score: less `STRENGTH` times its level.

    An image without one, which a release that knows no bank has added, is taken to have the mean level of the others.
    """
    known = [value for value in levels if value is not None]
    usual = fmean(known) if known else 0.0
    return [-STRENGTH * (usual if value is None else value) for value in levels]
