"""A bank of background queries: how high an image scores whatever is asked.

Some images score high for every sentence, and a description raises an image's scores for sentences of all kinds. The
*level* b of an image measures that: the mean of its `BEST` best scores with the sentences of the bank, one number per
image. A search ranks by `S - strength * b`; what descriptions raise b by on average is taken off whole (`background`).

The last `ASKED` sentences of the bank are asked of the whole gallery instead. They were written for other photos, so
their best scores are those of queries whose photo is not there: see `seps.retrieval.confidence`.

Shapes: B images, T sentences, C width.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from seps.memory import release_free_memory
from seps.recent import Recent
from seps.retrieval.engine.engine import BACKGROUND_STRENGTH, Digests, Engine, Pictures
from seps.retrieval.engine.queries import Array, Queries, as_array, cut_arrays, joined, packed_queries
from seps.retrieval.ranking import text_cache
from seps.retrieval.ranking.confidence import REFERENCE, Calibration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Scores = TypeVar("Scores", "Tensor", Array)
BEST = 10
"""Best scores whose mean is an image's level."""
SCORED_SENTENCES = 40
"""Sentences per image that are scored exactly, found by their vectors: the best are among them."""
ASKED = 64
"""Sentences at the end of the bank that calibrate the confidence and take no part in levels."""
CAPTION_STRENGTH = 1.0
"""Part of a caption's level that is taken off where images ask for captions, chosen on dev (docs/search-figures.md)."""
PRIOR = 10
"""Images that `BACKGROUND_STRENGTH` counts for where a gallery's own strength is found without labels."""
GOOD_CONFIDENCE = 0.3
"""Confidence from which a hit counts as a good match, chosen on dev (docs/search-figures.md)."""
NO_BANK = (
    "The store {} was made without the bank of background queries, so its results have no confidence and described "
    "pictures rank too high beside undescribed ones. To add it, run once more: seps index {} --store {}"
)
ARTICLES = ("a", "an", "the")
OUTDATED = (
    "The store {} was scored by another version of seps: its background queries or its calibration are others, so its "
    "scores do not compare. To bring them up to date, run once more: seps index --store {}"
)
CALIBRATION = 1
"""Version of the formulas of a calibration."""
KEPT_BANKS = 2
"""Encoded banks that a process keeps: 30 MB each at width 384."""
SENTENCES_AT_ONCE = 128
"""Sentences that are padded together."""
_LOCK = threading.Lock()


@functools.cache
def sentences() -> tuple[str, ...]:
    """The sentences that ship with the package; the last `ASKED` of them are for `calibrate`."""
    text = (files("seps") / "assets" / "bank" / "sentences.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line.strip())


@functools.cache
def bank_name() -> str:
    """A tag of the sentences and of how a level is made of them: levels under one tag can be compared."""
    return hashlib.sha256("\n".join([f"{BEST} {SCORED_SENTENCES} {ASKED}", *sentences()]).encode()).hexdigest()[:16]


@functools.cache
def calibration_name() -> str:
    """A tag of how a calibration is made. Raise `CALIBRATION` where a formula changes and no constant does."""
    names = sorted(part.name for part in fields(Calibration))
    made = [CALIBRATION, BACKGROUND_STRENGTH, REFERENCE, PRIOR, ASKED, *names]
    return hashlib.sha256("\n".join(map(str, made)).encode()).hexdigest()[:16]


def is_outdated(bank: str, calibrated: str | None) -> bool:
    """Whether levels and a calibration with these tags are made in another way than this version makes them.

    Without a bank its tag is empty; without a calibration that is None.
    """
    return bool(bank) and (bank != bank_name() or calibrated not in (None, calibration_name()))


def bank_words(strength: str = f"{BACKGROUND_STRENGTH:g}", captions: float = 0.0) -> str:
    """The correction in words, for figures; `captions` is the strength of the captions' levels."""
    both = f" - {captions:g} x the mean of the caption's {BEST} largest cosines with them" if captions else ""
    gap = ", for described images with all that descriptions raise it by"
    return f"S - {strength} x the mean of the {BEST} best of {len(sentences()) - ASKED} background queries{gap}{both}"


@dataclass(frozen=True)
class Bank:
    """The sentences of the bank as an engine sees them."""

    texts: Queries
    """They make the levels."""
    asked: Queries
    """The last `ASKED`; they calibrate."""
    vectors: Tensor | Array
    """(T, width) search vectors of `texts`."""

    @classmethod
    def of(cls, engine: Engine, values: Mapping[str, Array]) -> Bank:
        """The bank of an engine, from the arrays of all sentences as it encodes them (`Queries.arrays`)."""
        count, device = len(values["counts"] if "counts" in values else values["vectors"]) - ASKED, engine.device
        some = (
            cut_arrays(values, start, min(count, start + SENTENCES_AT_ONCE))
            for start in range(0, count, SENTENCES_AT_ONCE)
        )
        vectors = [engine.vectors(Queries.of_arrays(part).to(device)) for part in some]
        asked = Queries.of_arrays(cut_arrays(values, count, count + ASKED)).to(device)
        return cls(packed_queries(cut_arrays(values, 0, count), device), asked, joined(vectors))

    def to(self, device: torch.device | str) -> Bank:
        """The same on another device."""
        texts = self.texts.to(device)
        vectors = self.vectors if isinstance(self.vectors, np.ndarray) else self.vectors.to(device)
        return Bank(texts, self.asked.to(device), vectors)

    def each_asked(self) -> list[Queries]:
        """The sentences of the calibration, one at a time."""
        return [self.asked.rows(slice(i, i + 1)) for i in range(ASKED)]

    def levels(
        self, engine: Engine, pictures: Pictures, vectors_BC: Tensor | Array, memory: int | None = None
    ) -> Array:
        """(B,) levels of pictures, whose search vectors, as a store has them, find the nearest sentences."""
        own = as_array(vectors_BC).astype(np.float32, copy=False)
        # By torch where it computes: the cores of NumPy's library wait for each other in a loop, which took twice the
        # time of all the rest.
        rows = own if isinstance(self.vectors, np.ndarray) else self.vectors.new_tensor(own)
        pooled = as_array(rows @ self.vectors.T)
        nearest = np.argsort(-pooled, axis=1, kind="stable")[:, :SCORED_SENTENCES].copy()
        return level(as_array(engine.score(pictures, self.texts, chosen=nearest, memory=memory)))


def encode_sentences(engine: Engine) -> Queries:
    """All sentences of the bank as queries."""
    # No level depends on the projection of short queries, though some of the sentences are short.
    return engine.encode_texts(list(sentences()), as_sentences=True)


_MADE: Recent[Bank] = Recent(KEPT_BANKS)
"""Banks of this process, by key of the engine and device."""
_NOUNS: Recent[Array] = Recent(KEPT_BANKS)
"""Vectors of nouns of this process, by key of the engine: 1.5 MB each at width 384."""


def bank_of(engine: Engine, digests: Digests | None = None) -> Bank:
    """The bank of an engine: encoded once, then read from the user's cache; one per process, from any thread.

    `digests` of the engine, where the caller has them: those of a store whose levels are of this text side.
    """
    key = _key(engine, digests, bank_name())
    with _LOCK:
        made = _MADE.get((key, str(engine.device)))
        if made is None:
            values = text_cache.read(f"{key}.bank")
            if values is None:
                values = encode_sentences(engine).arrays()
                text_cache.write(f"{key}.bank", values)
            made = Bank.of(engine, values)
            _MADE.put((key, str(engine.device)), made)
            del values
            release_free_memory()
        return made


def _key(engine: Engine, digests: Digests | None, texts: str) -> str:
    """What encodings depend on: the tag of their `texts`, weights, and settings of the model."""
    weights = engine.digests() if digests is None else digests
    own = (weights.texts,) if weights.texts else (weights.pictures, weights.words)
    return hashlib.sha256("\n".join([texts, *own, engine.traits.settings]).encode()).hexdigest()[:32]


@functools.cache
def nouns() -> tuple[str, ...]:
    """Things that a picture may show, each with its article where it takes one, for confidences of words."""
    lines = (files("seps") / "assets" / "nouns.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def has_article(text: str) -> bool:
    """Whether a query or a noun begins with one."""
    return text.split(maxsplit=1)[0].lower() in ARTICLES


def noun_vectors(engine: Engine, digests: Digests | None = None) -> Array:
    """(2, T, C): search vectors of the nouns with their articles, and without. Encoded once per model and user."""
    texts = [*nouns(), *(noun.split(maxsplit=1)[1] if has_article(noun) else noun for noun in nouns())]
    own = engine.digests().short
    key = _key(engine, digests, hashlib.sha256("\n".join([own, *texts]).encode()).hexdigest())
    with _LOCK:
        made = _NOUNS.get(key)
        if made is None:
            values = text_cache.read(f"{key}.nouns")
            if values is None:
                values = {"vectors": as_array(engine.vectors(engine.encode_texts(texts)))}
                text_cache.write(f"{key}.nouns", values)
            made = values["vectors"].reshape(2, len(nouns()), -1)
            _NOUNS.put(key, made)
        return made


def level(scores_BT: Scores, best: int = BEST) -> Scores:
    """(B,) mean of the `best` largest of each image's scores with the bank."""
    if isinstance(scores_BT, np.ndarray):
        levels: Array = np.sort(scores_BT, axis=1)[:, -best:].mean(axis=1)
        return levels
    return scores_BT.topk(min(best, scores_BT.shape[1]), dim=1).values.mean(dim=1)


def caption_levels(vectors_TC: Tensor, bank: Bank) -> Tensor:
    """(T,) how ordinary captions are: the mean of the `BEST` largest products of their search vectors with the bank's.

    An ordinary caption scores high with every image. Where captions are ranked, that is what levels are for images; for
    one query of a search it is a constant.
    """
    return level(vectors_TC @ vectors_TC.new_tensor(as_array(bank.vectors)).T)


def strength_without_labels(scores_BT: Tensor | Array, best: int = BEST) -> float:
    """A strength for a model without measured queries, from the scores of its gallery with the bank alone.

    Two levels are made of each image, one of the even sentences and one of the others. The strength is the slope,
    within [0, 1], with which the second grows with the first: what a level says about queries that it was not made of.
    It counts as much as there are images, beside `PRIOR` images with `BACKGROUND_STRENGTH`, which is what it gives for
    our own models (docs/search-figures.md). It is that of zero-shot models, and not measured on real weights of any.
    Raises ValueError for fewer than two sentences.
    """
    scores = as_array(scores_BT).astype(np.float64)
    images, texts = scores.shape
    if texts < 2:
        raise ValueError(f"The scores are {scores.shape}; at least two sentences are needed.")
    first, second = (level(scores[:, start::2], max(1, best // 2)) for start in (0, 1))
    spread = first - first.mean()
    variance = float((spread * spread).sum())
    if not variance:  # no image, one, or all alike
        return BACKGROUND_STRENGTH
    slope = min(1.0, max(0.0, float((spread * (second - second.mean())).sum()) / variance))
    return float((images * slope + PRIOR * BACKGROUND_STRENGTH) / (images + PRIOR))


def description_gap(described: Sequence[float], others: Sequence[float]) -> float:
    """How much higher the levels of described images are than those of the others, on average; 0 without either.

    Where there are few of either the difference is drawn to 0, which counts as `PRIOR` images.
    """
    if not len(described) or not len(others):
        return 0.0
    counted = len(described) * len(others) / (len(described) + len(others))
    return (fmean(map(float, described)) - fmean(map(float, others))) * counted / (counted + PRIOR)


def background(
    levels: Sequence[float | None],
    strength: float = BACKGROUND_STRENGTH,
    described: Sequence[bool] | None = None,
    gap: float = 0.0,
) -> list[float]:
    """What the bank adds to each image's score: less `strength` times its level, and the rest of `gap` if `described`.

    So what descriptions raise the levels by on average (`description_gap`) is taken off whole, and `strength` of what
    else images differ in. An image without a level, added by a release without a bank, is taken to have the
    mean level of the others.
    """
    known = [value for value in levels if value is not None]
    usual = fmean(known) if known else 0.0
    rest = (1 - strength) * gap
    return [
        -strength * (usual if value is None else value) - rest * told
        for value, told in zip(levels, described or [False] * len(levels), strict=True)
    ]
