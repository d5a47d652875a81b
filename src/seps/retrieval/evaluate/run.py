"""Evaluation: encode a data set once, score every pair exactly, count ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from seps.metrics import RetrievalMetrics, five_fold, recall
from seps.retrieval.config import Protocol
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.data.streams import Pixels
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.queries import as_array
from seps.retrieval.evaluate.encoding import StageProgress, encode_guides, encode_images
from seps.retrieval.evaluate.extended import Extended, ExtendedFigures
from seps.retrieval.evaluate.protocol import PUBLISHED_WARNING, ProtocolError, View, view
from seps.retrieval.ranking.bank import (
    CAPTION_STRENGTH,
    bank_of,
    bank_words,
    caption_levels,
    description_gap,
    strength_without_labels,
)
from seps.retrieval.ranking.terms import GalleryFacts, ImageFacts, InMemory, add_to_scores, matches_of

__all__ = [
    "EvaluationReport",
    "StageProgress",
    "check_evaluation",
    "encode_guides",
    "encode_images",
    "evaluate",
    "evaluate_each",
    "score_dataset",
]


@dataclass(frozen=True)
class EvaluationReport:
    """The figures of one evaluation, and the protocol they were taken under."""

    metrics: RetrievalMetrics
    protocol: Protocol
    dataset: str
    images_with_description: int
    folds: int = 1
    warning: str | None = None
    bank: str = ""
    """The correction by background queries that the figures hold; empty: none, as in others' figures."""
    lexical: bool = False
    """Whether the scores have what a search adds for rare words that occur in a description."""
    extended: ExtendedFigures | None = None
    """Figures of COCO's test split with the right answers of ECCV Caption and CxC, where they were asked for."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.metrics.as_dict(),
            "protocol": self.protocol,
            "dataset": self.dataset,
            "images_with_description": self.images_with_description,
            **({"lexical": True} if self.lexical else {}),
            **({"bank": self.bank} if self.bank else {}),
            **({"extended": self.extended.as_dict()} if self.extended else {}),
            **({"warning": self.warning} if self.warning else {}),
        }


@torch.no_grad()
def score_dataset(
    model: object,
    dataset: RetrievalDataset,
    seen: View,
    *,
    pixels: Pixels | None = None,
    tokens: Tensor | None = None,
    keep_words: int | None = None,
    bank: bool = False,
    lexical: bool = False,
    memory: int | None = None,
    progress: StageProgress | None = None,
) -> Tensor:
    """Similarities (images, captions) of a data set under the protocol that `seen` was made for (`view`).

    Args:
        model: a model of ours, an `Embedder` such as CLIP, or an engine.
        pixels: the images, decoded before (`decode_all`, or a stream); None reads their files.
        tokens: the images, encoded before (`encode_images`); then `pixels` is not needed.
        keep_words: merge each image's description to at most this many words, as small stores do.
        bank: subtract from each image's scores its level over the bank of background queries, as `seps search` does,
            and of a model of ours from each caption's scores how close it is to those queries. The bank is fixed and
            does not depend on the data set. Where the engine has no weight of levels, it is estimated from the scores
            of the data set with the bank, without labels (`strength_without_labels`).
        lexical: add what `seps search` adds for rare words of a caption in an image's description.
        memory: bytes that the scorer may use; None: a default of the device.
        progress: called with the stage, how many are done, and of how many.

    Raises ProtocolError for a bank under protocol "published": its queries carry no descriptions.
    """
    engine = engine_of(model)
    _check_pairing(engine, seen, bank)
    traits = engine.traits
    guides = encode_guides(engine, dataset)
    queries = engine.encode_texts(seen.captions, progress=progress)
    if tokens is None and traits.reads_pixels:
        tokens = encode_images(engine, dataset, pixels=pixels, progress=progress)
    elif tokens is None:
        tokens = torch.zeros(len(dataset), 1, traits.width, device=engine.device)
    described = None if seen.query_descriptions is not None else seen.image_descriptions
    pictures = engine.pictures(tokens, described, guides=guides, keep_words=keep_words, progress=progress)
    scores: Tensor = engine.score(pictures, queries, paired=seen.query_descriptions, memory=memory)
    ids, levels, strength, gap = [str(row) for row in range(len(dataset))], None, 0.0, 0.0
    is_described = pictures.described.tolist()
    if bank:
        own = bank_of(engine)
        vectors = engine.vectors(pictures)
        weight = traits.background_weight
        strength = strength_without_labels(vectors @ own.vectors.T) if weight is None else weight
        found = own.levels(engine, pictures, vectors, memory)
        told = as_array(pictures.described)
        gap, levels = description_gap(found[told].tolist(), found[~told].tolist()), found.tolist()
    gallery, images = GalleryFacts(traits.score_unit, strength, gap), ImageFacts(ids, is_described, levels)
    # The background ranks images as a search does, the captions' levels captions: each is a constant for the other.
    scores = add_to_scores(scores, images, None, gallery)
    if bank and traits.background_weight is not None:
        scores = scores - CAPTION_STRENGTH * caption_levels(engine.vectors(queries), own)
    if lexical:
        texts = InMemory(dict(zip(ids, seen.image_descriptions or [], strict=False)))
        found_words = [matches_of(caption, texts) for caption in seen.captions]
        scores = add_to_scores(scores, replace(images, levels=None), found_words, gallery)
    return scores


def _check_pairing(engine: Engine, seen: View, bank: bool) -> None:
    """Raise ProtocolError where queries carry descriptions, and the engine or the bank cannot take them."""
    if seen.query_descriptions is None:
        return
    if bank and not engine.traits.pairs_queries:
        raise ProtocolError("Background queries carry no descriptions: the bank does not go with protocol 'published'.")
    if engine.traits.pairs_queries:
        raise ProtocolError(engine.traits.pairs_queries)


def check_evaluation(
    dataset: RetrievalDataset,
    protocol: Protocol,
    *,
    model: object = None,
    folds: int = 1,
    bank: bool = False,
    left_out: int = 0,
) -> View:
    """What `evaluate` may see of `dataset`; raises what it would raise, before anything is encoded.

    `left_out`: how many images of the data set were taken away, for the message about folds.
    """
    seen = view(dataset, protocol)
    if len(dataset) % folds:
        fix = f", or fix the {left_out} that were skipped" if left_out else ""
        raise ValueError(
            f"{len(dataset)} images cannot be divided into {folds} equal folds; "
            f"choose a divisor of {len(dataset)}{fix}."
        )
    if model is not None:
        _check_pairing(engine_of(model), seen, bank)
    return seen


def evaluate(
    model: object,
    dataset: RetrievalDataset,
    protocol: Protocol = "image",
    *,
    folds: int = 1,
    pixels: Pixels | None = None,
    tokens: Tensor | None = None,
    keep_words: int | None = None,
    bank: bool = False,
    memory: int | None = None,
    lexical: bool = False,
    extended: Extended | None = None,
    progress: StageProgress | None = None,
) -> EvaluationReport:
    """R@1/5/10 both ways, ranks and rSum of `dataset` under `protocol`; `folds=5` gives COCO's 1K figures.

    `pixels`, `tokens`, `keep_words`, `bank` and `lexical`: as for `score_dataset`; figures of models alone are without.
    `extended`: also the figures of ECCV Caption and CxC, over all images whatever `folds` says; see `eval.extended`.
    """
    for name, value in (("folds", folds), ("keep_words", keep_words), ("memory", memory)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    training = _training(model)
    try:
        engine = engine_of(model)
        seen = check_evaluation(dataset, protocol, model=engine, folds=folds, bank=bank)
        scores = score_dataset(
            engine,
            dataset,
            seen,
            pixels=pixels,
            tokens=tokens,
            keep_words=keep_words,
            bank=bank,
            lexical=lexical,
            memory=memory,
            progress=progress,
        )
    finally:
        if training:
            cast(nn.Module, model).train()
    owner = dataset.image_of_caption
    metrics = five_fold(scores, owner, folds) if folds > 1 else recall(scores, owner)
    shown = seen.image_descriptions if engine.traits.reads_descriptions else None
    return EvaluationReport(
        metrics,
        protocol,
        dataset.label,
        sum(text is not None for text in shown or []),
        folds,
        PUBLISHED_WARNING if protocol == "published" else None,
        _bank_words(engine) if bank else "",
        lexical,
        None if extended is None else extended.figures(scores),
    )


def evaluate_each(
    model: nn.Module, dataset: RetrievalDataset, protocols: Sequence[Protocol], *, pixels: Pixels | None = None
) -> list[EvaluationReport]:
    """`evaluate` under several protocols; the images are decoded and encoded once."""
    training = _training(model)
    engine = engine_of(model)
    tokens = encode_images(engine, dataset, pixels=pixels) if engine.traits.reads_pixels else None
    if training:
        model.train()
    return [evaluate(model, dataset, protocol, tokens=tokens) for protocol in protocols]


def _training(model: object) -> bool:
    """Whether the object is a module in training mode."""
    return bool(getattr(model, "training", False))


def _bank_words(engine: Engine) -> str:
    if engine.traits.background_weight is None:
        return bank_words("a strength without labels")
    return bank_words(captions=CAPTION_STRENGTH)
