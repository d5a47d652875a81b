"""A bank of background queries: how high an image scores whatever is asked.

Some images score high for every sentence, and a description raises an image's scores for sentences of all kinds. The
*level* b of an image measures that: the mean of its `BEST` best scores with the sentences of the bank, one number per
image. A search ranks by `S - strength * b`; what descriptions raise b by on average is taken off whole (`background`).

The last `ASKED` sentences of the bank are asked of the whole gallery instead. They were written for other photos, so
their best scores are those of queries whose photo is not there: see `seps.retrieval.ranking.confidence`.

Shapes: B images, T sentences, C width.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from seps.method.encoded import ImageSide
from seps.method.network import PatchSlimming
from seps.retrieval.engine.codec import (
    StoredScorer,
    image_side,
    image_vectors,
    restore,
    short_hash,
    text_hash,
    text_vectors,
    unpack_padded,
)
from seps.retrieval.engine.zeroshot import Query, ZeroShotModel, words_digest
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.ranking import text_cache
from seps.retrieval.ranking.confidence import REFERENCE, STRENGTH, Calibration
from seps.scoring.own_texts import TextPool, can_score, images_at_once, score_own_texts
from seps.training.batches import map_tensors

if TYPE_CHECKING:
    from seps.photos.store.rows import Columns, StoreSettings

BEST = 10
"""Best scores whose mean is an image's level."""
NEAR = 40
"""Sentences per image that are scored exactly, found by their vectors: the best are among them."""
ASKED = 64
"""Sentences at the end of the bank that calibrate the confidence and take no part in levels."""
CAPTION_STRENGTH = 1.0
"""Part of a caption's level that is taken off where images ask for captions, chosen on dev (docs/search-figures.md)."""
PRIOR = 10
"""Images that `STRENGTH` counts for where a gallery's own strength is found without labels."""
GOOD = 0.3
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
"""Encoded banks that a process keeps: 70 MB each at width 384."""
SearchModel = RetrievalModel | ZeroShotModel
AnyTexts = TextFeatures | Query
_LOCK = threading.Lock()


@functools.cache
def sentences() -> tuple[str, ...]:
    """The sentences that ship with the package; the last `ASKED` of them are for `calibrate`."""
    text = (files("seps") / "assets" / "bank" / "sentences.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line.strip())


@functools.cache
def bank_name() -> str:
    """A tag of the sentences and of how a level is made of them: levels under one tag can be compared."""
    return hashlib.sha256("\n".join([f"{BEST} {NEAR} {ASKED}", *sentences()]).encode()).hexdigest()[:16]


@functools.cache
def calibration_name() -> str:
    """A tag of how a calibration is made. Raise `CALIBRATION` where a formula changes and no constant does."""
    names = sorted(part.name for part in fields(Calibration))
    made = [CALIBRATION, STRENGTH, REFERENCE, PRIOR, ASKED, *names]
    return hashlib.sha256("\n".join(map(str, made)).encode()).hexdigest()[:16]


def is_outdated(settings: StoreSettings) -> bool:
    """Whether the levels or the calibration of a store are made in another way than this version makes them."""
    if not settings.bank:
        return False
    return settings.bank != bank_name() or bool(settings.calibration and settings.calibrated != calibration_name())


def bank_words(strength: str = f"{STRENGTH:g}", captions: float = 0.0) -> str:
    """The correction in words, for figures; `captions` is the strength of the captions' levels."""
    both = f" - {captions:g} x the mean of the caption's {BEST} largest cosines with them" if captions else ""
    gap = ", for described images with all that descriptions raise it by"
    return f"S - {strength} x the mean of the {BEST} best of {len(sentences()) - ASKED} background queries{gap}{both}"


class Bank:
    """The sentences of the bank as a model sees them: `texts` make the levels, `asked` (the last `ASKED`) calibrate.

    `found`: all sentences as the model encoded them earlier. Without, they are encoded now.
    """

    def __init__(self, model: SearchModel, found: AnyTexts | None = None) -> None:
        if found is None:
            found = encode_sentences(model)
        self.texts, self.asked = _rows(found, slice(None, -ASKED)), _rows(found, slice(-ASKED, None))
        self.vectors = search_vectors(model, self.texts)

    def near_scores(
        self,
        vectors_BC: Tensor,
        score: Callable[[int, AnyTexts], Tensor],
        net: PatchSlimming | None = None,
        side: Callable[[int, int], ImageSide] | None = None,
    ) -> Tensor:
        """(B, `NEAR`) exact scores with each image's nearest sentences: `score(i, texts)` gives image i's (T,).

        `vectors_BC` are the images' vectors as a store has them, by which the nearest sentences are found. With `net`
        and its state `side(i, j)` of images i to j, some images are scored at once where the network is a known one.
        """
        pooled = vectors_BC.float().to(self.vectors.device) @ self.vectors.T
        nearest = pooled.topk(min(NEAR, pooled.shape[1]), dim=1).indices
        found, left = torch.zeros_like(nearest, dtype=torch.float32), list(range(len(nearest)))
        if net is not None and side is not None and can_score(net):
            left = []
            step = images_at_once(nearest.device)
            for start in range(0, len(nearest), step):
                some = nearest[start : start + step]
                scores, unsafe = score_own_texts(net, side(start, start + len(some)), self.pool, some)
                found[start : start + step] = scores
                left += [start + i for i, flag in enumerate(unsafe.tolist()) if flag]
        for i in left:
            found[i] = score(i, _rows(self.texts, nearest[i]))
        return found

    @functools.cached_property
    def pool(self) -> TextPool:
        """`texts` as many images are scored with them at once."""
        texts = cast(TextFeatures, self.texts)
        return TextPool(texts.words, texts.mask)

    def to(self, device: torch.device | str) -> Bank:
        """The same on another device."""
        moved = copy.copy(self)
        for name in ("texts", "asked", "vectors"):
            setattr(moved, name, map_tensors(getattr(self, name), lambda tensor: tensor.to(device)))
        moved.__dict__.pop("pool", None)
        return moved

    def each_asked(self) -> list[AnyTexts]:
        """The sentences of the calibration, one at a time."""
        return [_rows(self.asked, slice(i, i + 1)) for i in range(ASKED)]


def encode_sentences(model: SearchModel) -> AnyTexts:
    """All sentences of the bank as queries of the model."""
    return encode(model, list(sentences()))


def encode(model: SearchModel, texts: list[str]) -> AnyTexts:
    """Texts as queries of the model."""
    return model.query(texts) if isinstance(model, ZeroShotModel) else model.encode_texts(texts)


def search_vectors(model: SearchModel, texts: AnyTexts) -> Tensor:
    """(T, vector width) of queries: their products with images' vectors find the nearest."""
    if isinstance(texts, Query):
        return cast(ZeroShotModel, model).search_vectors(texts)
    return text_vectors(texts)


def _rows(texts: AnyTexts, rows: Tensor | slice) -> AnyTexts:
    """Some of the sentences, without padding that none of them needs."""
    if isinstance(texts, Query):
        return Query(texts.vectors[rows], None if texts.words is None else cast(TextFeatures, _rows(texts.words, rows)))
    mask = texts.mask[rows]
    longest = int(mask.sum(dim=1).max())
    return TextFeatures(texts.words[:, :longest][rows], mask[:, :longest])


def bank_of(model: SearchModel, settings: StoreSettings | None = None) -> Bank:
    """The bank of a model: encoded once, then read from the user's cache; one per process, from any thread.

    `settings` of a store whose levels are of this text side: they hold its digests, which are computed otherwise.
    """
    key = _key(model, settings, bank_name())
    with _LOCK:
        made = _MADE.get((key, str(model.device)))
        if made is None:
            found = _read_cache(key, model)
            if found is None:
                found = encode_sentences(model)
                _write_cache(key, found)
            while len(_MADE) >= KEPT_BANKS:
                del _MADE[next(iter(_MADE))]
            made = _MADE[key, str(model.device)] = Bank(model, found)
        return made


_MADE: dict[tuple[str, str], Bank] = {}
"""Banks of this process, by key of the model and device."""


def _key(model: SearchModel, settings: StoreSettings | None, texts: str) -> str:
    """What encodings depend on: the tag of their `texts`, weights, and settings of the model."""
    own = model.describer if isinstance(model, ZeroShotModel) else model
    if not isinstance(model, ZeroShotModel):
        digests = [settings.text_hash if settings is not None and settings.text_hash else text_hash(own)]
    elif settings is not None:
        digests = [settings.model_hash, settings.words_hash]
    else:
        digests = [model.embedder.digest(), words_digest(own)]
    return hashlib.sha256("\n".join([texts, *digests, repr(own.config)]).encode()).hexdigest()[:32]


def _write_cache(key: str, found: AnyTexts) -> None:
    """Keep encoded sentences."""
    words = found.words if isinstance(found, Query) else found
    values = {"vectors": found.vectors} if isinstance(found, Query) else {}
    if words is not None:
        values |= {"words": words.words[words.mask], "counts": words.mask.sum(dim=1)}
    text_cache.write(f"{key}.bank", values)


def _read_cache(key: str, model: SearchModel) -> AnyTexts | None:
    """What `_write_cache` kept under the key; None where there is nothing, or it is not whole."""
    values = text_cache.read(f"{key}.bank")
    if values is None:
        return None
    counts = values["counts"]
    mask = torch.arange(int(counts.max())) < counts[:, None]
    words = torch.zeros(*mask.shape, values["words"].shape[1])
    words[mask] = values["words"]
    texts = TextFeatures(words, mask)
    found = Query(values["vectors"], texts) if isinstance(model, ZeroShotModel) else texts
    return cast(AnyTexts, map_tensors(found, lambda tensor: tensor.to(model.device)))


@functools.cache
def nouns() -> tuple[str, ...]:
    """Things that a picture may show, each with its article where it takes one, for confidences of words."""
    lines = (files("seps") / "assets" / "nouns.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def has_article(text: str) -> bool:
    """Whether a query or a noun begins with one."""
    return text.split(maxsplit=1)[0].lower() in ARTICLES


def noun_vectors(model: SearchModel, settings: StoreSettings | None = None) -> Tensor:
    """(2, T, C): search vectors of the nouns with their articles, and without. Encoded once per model and user."""
    texts = [*nouns(), *(noun.split(maxsplit=1)[1] if has_article(noun) else noun for noun in nouns())]
    own = "" if isinstance(model, ZeroShotModel) else short_hash(model)
    key = _key(model, settings, hashlib.sha256("\n".join([own, *texts]).encode()).hexdigest())
    place = key, str(model.device)
    with _LOCK:
        if place not in _NOUNS:
            values = text_cache.read(f"{key}.nouns")
            if values is None:
                values = {"vectors": search_vectors(model, encode(model, texts))}
                text_cache.write(f"{key}.nouns", values)
            while len(_NOUNS) >= KEPT_BANKS:
                del _NOUNS[next(iter(_NOUNS))]
            _NOUNS[place] = values["vectors"].to(model.device).reshape(2, len(nouns()), -1)
        return _NOUNS[place]


_NOUNS: dict[tuple[str, str], Tensor] = {}
"""Vectors of nouns of this process, by key of the model and device: 1.5 MB each at width 384."""


def level(scores_BT: Tensor, best: int = BEST) -> Tensor:
    """(B,) mean of the `best` largest of each image's scores with the bank."""
    return scores_BT.topk(min(best, scores_BT.shape[1]), dim=1).values.mean(dim=1)


@torch.no_grad()
def image_levels(model: RetrievalModel, images: ImageFeatures, bank: Bank, *, memory: int | None = None) -> Tensor:
    """(B,) levels of images that are in no store."""
    net = model.head.net if isinstance(model.head, SlimmingHead) else None
    return level(
        bank.near_scores(
            image_vectors(model, images),
            lambda i, texts: model.score(images.rows(i, i + 1), cast(TextFeatures, texts), memory=memory)[0],
            net,
            lambda i, j: image_side(cast(PatchSlimming, net), images.rows(i, j)),
        )
    )


def caption_levels(texts: TextFeatures, bank: Bank) -> Tensor:
    """(T,) how ordinary captions are: the mean of the `BEST` largest cosines of each with sentences of the bank.

    An ordinary caption scores high with every image. Where captions are ranked, that is what levels are for images; for
    one query of a search it is a constant.
    """
    return level(text_vectors(texts) @ bank.vectors.T)


@torch.no_grad()
def zero_shot_levels(model: ZeroShotModel, vectors: Tensor, words: Tensor, mask: Tensor, bank: Bank) -> Tensor:
    """(B,) levels of pictures, vectors (B, C), with their descriptions' words (B, L, E) and mask (B, L)."""
    return level(
        bank.near_scores(
            model.index_vectors(vectors, words, mask),
            lambda i, texts: model.scores(vectors[i : i + 1], words[i : i + 1], mask[i : i + 1], cast(Query, texts))[0],
        )
    )


@torch.no_grad()
def stored_levels(
    model: SearchModel, images: Columns, vectors_BC: Tensor, settings: StoreSettings, bank: Bank | None = None
) -> list[float | None]:
    """The level of each image, from its state as a store with these settings keeps it.

    None for all where the head scores descriptions alone and none of them has one. `bank`: that of the model, where
    the caller has it.
    """
    if isinstance(model, ZeroShotModel):
        words, mask = unpack_padded(images.values("words"), settings.words_width or settings.width)
        vectors, words, mask = (value.to(model.device) for value in (vectors_BC[:, : settings.width], words, mask))
        return [
            float(value) for value in zero_shot_levels(model, vectors, words, mask, bank or bank_of(model, settings))
        ]
    stored = restore(images, settings, model.device)
    if not model.head.uses_pixels and stored.features.dense is None:
        return [None] * len(images)
    scorer = StoredScorer(model, settings)
    scores = (bank or bank_of(model, settings)).near_scores(
        vectors_BC,
        lambda i, texts: scorer.score(stored.rows(i, i + 1), cast(TextFeatures, texts))[0],
        scorer.net,
        lambda i, j: scorer.side(stored.rows(i, j)),
    )
    return [float(value) for value in level(scores)]


def strength_without_labels(scores_BT: Tensor, best: int = BEST) -> float:
    """A strength for a model without measured queries, from the scores of its gallery with the bank alone.

    Two levels are made of each image, one of the even sentences and one of the others. The strength is the slope,
    within [0, 1], with which the second grows with the first: what a level says about queries that it was not made of.
    It counts as much as there are images, beside `PRIOR` images with `STRENGTH`, which is what it gives for our own
    models (docs/search-figures.md). It is that of zero-shot models, and not measured on real weights of any.
    Raises ValueError for fewer than two sentences.
    """
    images, texts = scores_BT.shape
    if texts < 2:
        raise ValueError(f"The scores are {tuple(scores_BT.shape)}; at least two sentences are needed.")
    first, second = (level(scores_BT[:, start::2].double(), max(1, best // 2)) for start in (0, 1))
    spread = first - first.mean()
    variance = float((spread * spread).sum())
    if not variance:  # no image, one, or all alike
        return STRENGTH
    slope = min(1.0, max(0.0, float((spread * (second - second.mean())).sum()) / variance))
    return (images * slope + PRIOR * STRENGTH) / (images + PRIOR)


def description_gap(described: Tensor, others: Tensor) -> float:
    """How much higher the levels of described images are than those of the others, on average; 0 without either.

    Where there are few of either the difference is drawn to 0, which counts as `PRIOR` images.
    """
    if not len(described) or not len(others):
        return 0.0
    counted = len(described) * len(others) / (len(described) + len(others))
    return float(described.double().mean() - others.double().mean()) * counted / (counted + PRIOR)


def background(
    levels: Sequence[float | None],
    strength: float = STRENGTH,
    described: Sequence[bool] | None = None,
    gap: float = 0.0,
) -> list[float]:
    """What the bank adds to each image's score: less `strength` times its level, and the rest of `gap` if `described`.

    So what descriptions raise the levels by on average (`description_gap`) is taken off whole, and `strength` of what
    else images differ in. An image without a level, which a release that knows no bank has added, is taken to have the
    mean level of the others.
    """
    known = [value for value in levels if value is not None]
    usual = fmean(known) if known else 0.0
    rest = (1 - strength) * gap
    return [
        -strength * (usual if value is None else value) - rest * told
        for value, told in zip(levels, described or [False] * len(levels), strict=True)
    ]


def stored_background(images: Columns, strength: float, gap: float) -> list[float]:
    """`background` of images of a store, read with `bank` and `words`."""
    return background(images.values("bank"), strength, [words is not None for words in images.values("words")], gap)
