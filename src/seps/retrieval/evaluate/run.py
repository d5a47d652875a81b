"""Evaluation: encode a data set once, score every pair exactly, count ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from seps.metrics import RetrievalMetrics, five_fold, recall
from seps.retrieval.config import Protocol
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.data.streams import Pixels
from seps.retrieval.engine.codec import merge_words
from seps.retrieval.engine.zeroshot import ZeroShotModel, nat_of
from seps.retrieval.evaluate.encoding import StageProgress, encode_guides, encode_images, encode_zero_shot
from seps.retrieval.evaluate.extended import Extended, ExtendedFigures
from seps.retrieval.evaluate.protocol import PUBLISHED_WARNING, ProtocolError, View, view
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.ranking.bank import (
    CAPTION_STRENGTH,
    background,
    bank_of,
    bank_words,
    caption_levels,
    description_gap,
    image_levels,
    strength_without_labels,
    zero_shot_levels,
)
from seps.retrieval.ranking.confidence import STRENGTH
from seps.retrieval.ranking.lexical import InMemory, matches
from seps.scoring import score_matrix
from seps.scoring.blocks import scoring_memory

__all__ = [
    "EvaluationReport",
    "StageProgress",
    "add_lexical",
    "check_evaluation",
    "encode_guides",
    "encode_images",
    "evaluate",
    "evaluate_each",
    "score_dataset",
    "score_zero_shot",
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
def score_zero_shot(
    model: ZeroShotModel,
    dataset: RetrievalDataset,
    seen: View,
    *,
    tokens: Tensor | None = None,
    keep_words: int | None = None,
    bank: bool = False,
    progress: StageProgress | None = None,
) -> Tensor:
    """Similarities (images, captions) of a data set by a dual encoder such as CLIP; the arguments of `score_dataset`.

    `tokens` (B, C) are the vectors of `encode_zero_shot`. How much of an image's level over the bank is subtracted is
    estimated from the data set's own scores with the bank, without labels (`strength_without_labels`).
    """
    _check_pairing(model, seen, bank)
    if tokens is None:
        tokens = encode_zero_shot(model, dataset, progress=progress)
    query = model.query(seen.captions, described=seen.image_descriptions is not None)
    words, mask = model.describer.encode_descriptions(seen.image_descriptions or [None] * len(dataset))
    if keep_words is not None:
        words, mask = merge_words(words, mask, keep_words)
    images = (tokens, words, mask)
    scores = model.scores(*images, query)
    if not bank:
        return scores
    own = bank_of(model)
    strength = strength_without_labels(model.index_vectors(*images) @ own.vectors.T)
    return scores + _background(zero_shot_levels(model, *images, own), mask, strength)[:, None]


def add_lexical(scores: Tensor, seen: View, nat: float) -> Tensor:
    """Add to scores (images, captions) what `seps search` adds for rare words of a caption in an image's description.

    `nat` is what a score of the model changes by when a match becomes e times likelier (`nat_of`).
    """
    texts = InMemory({str(row): text for row, text in enumerate(seen.image_descriptions or [])})
    scores = scores.clone()
    for column, caption in enumerate(seen.captions):
        found = matches(caption, texts)
        for row in found.found:
            scores[int(row), column] += nat * found.of(row)
    return scores


@torch.no_grad()
def score_dataset(
    model: RetrievalModel,
    dataset: RetrievalDataset,
    seen: View,
    *,
    pixels: Pixels | None = None,
    tokens: Tensor | None = None,
    keep_words: int | None = None,
    bank: bool = False,
    memory: int | None = None,
    progress: StageProgress | None = None,
) -> Tensor:
    """Similarities (images, captions) of a data set under the protocol that `seen` was made for (`view`).

    Args:
        pixels: the images, decoded before (`decode_all`, or a stream); None reads their files.
        tokens: the images, encoded before (`encode_images`); then `pixels` is not needed.
        keep_words: merge each image's description to at most this many words, as `seps index --words` does.
        bank: subtract from each image's scores its level over the bank of background queries, as `seps search` does,
            and from each caption's scores how close it is to those queries. The bank is fixed and knows nothing of the
            data set.
        memory: bytes that the scorer may use; None: a default of the device.
        progress: called with the stage, how many are done, and of how many.

    Raises ProtocolError for a bank under protocol "published": its queries carry no descriptions.
    """
    _check_pairing(model, seen, bank)
    report = progress or (lambda stage, done, total: None)
    model.eval()
    guides = encode_guides(model, dataset)
    texts = model.encode_texts(seen.captions, progress=lambda done, total: report("captions", done, total))
    if tokens is None and model.head.uses_pixels:
        tokens = encode_images(model, dataset, pixels=pixels, progress=progress)
    elif tokens is None:
        tokens = torch.zeros(len(dataset), 1, model.config.embed_size, device=model.device)
    if seen.query_descriptions is not None:
        return _score_leaky(model, ImageFeatures(tokens, guides=guides), texts, seen.query_descriptions, memory)
    dense = mask = None
    if seen.image_descriptions is not None and model.head.uses_description:
        dense, mask = model.encode_descriptions(
            seen.image_descriptions, progress=lambda done, total: report("descriptions", done, total)
        )
        if keep_words is not None:
            dense, mask = merge_words(dense, mask, keep_words)
    images = ImageFeatures(tokens, dense, mask, guides)
    scores = model.score(images, texts, memory=memory)
    if not bank:
        return scores
    own = bank_of(model)
    # The first ranks images as a search does, the second captions: each is a constant for the other direction.
    scores = scores + _background(image_levels(model, images, own, memory=memory), mask, STRENGTH)[:, None]
    return scores - CAPTION_STRENGTH * caption_levels(texts, own)


def _background(levels: Tensor, mask: Tensor | None, strength: float) -> Tensor:
    """(B,) what a search adds to the scores of images with these levels, and words of descriptions by `mask` (B, L)."""
    told = torch.zeros(len(levels), dtype=torch.bool) if mask is None else mask.any(dim=1).cpu()
    gap = description_gap(levels.cpu()[told], levels.cpu()[~told])
    return torch.tensor(background(levels.tolist(), strength, told.tolist(), gap)).to(levels)


def _score_leaky(
    model: RetrievalModel, images: ImageFeatures, texts: TextFeatures, query_descriptions: list[str], memory: int | None
) -> Tensor:
    """Query-side descriptions: description t comes with caption t. Each distinct text is encoded once."""
    assert isinstance(model.head, SlimmingHead)  # `_check_pairing`
    distinct = sorted(set(query_descriptions))
    place = {text: i for i, text in enumerate(distinct)}
    features = model.encode_texts(distinct, max_words=model.config.max_dense_words)
    rows = torch.tensor([place[text] for text in query_descriptions], device=model.device)
    scores = []
    # The paired texts of a block of captions are spread out at a time: all of them at once would not fit.
    per_text = features.words.shape[1] * features.words.shape[2] * 4
    memory = scoring_memory(model.device) if memory is None else memory
    step = max(16, memory // 4 // per_text)
    for start in range(0, len(rows), step):
        chosen = rows[start : start + step]
        part = score_matrix(
            model.head.net,
            images.tokens,
            texts.words[start : start + step],
            texts.lengths[start : start + step],
            paired_dense=features.words[chosen],
            paired_dense_lengths=features.mask[chosen].sum(dim=1),
            guides=images.guides,
            memory=memory,
        )
        scores.append(cast(Tensor, part))  # not the best alone
    return torch.cat(scores, dim=1)


def _check_pairing(model: RetrievalModel | ZeroShotModel, seen: View, bank: bool) -> None:
    """Raise ProtocolError where queries carry descriptions, and the model or the bank cannot take them."""
    if seen.query_descriptions is None:
        return
    if isinstance(model, ZeroShotModel):
        raise ProtocolError(
            "Protocol 'published' pairs captions with descriptions inside a slimming head; a dual encoder has none. "
            "Use protocol 'none' or 'image'."
        )
    if bank:
        raise ProtocolError("Background queries carry no descriptions: the bank does not go with protocol 'published'.")
    if not isinstance(model.head, SlimmingHead) or not model.head.uses_description:
        raise ProtocolError(
            f"Protocol 'published' pairs captions with descriptions inside a slimming head with descriptions; head "
            f"{model.config.head!r} takes none. Use protocol 'none' or 'image'."
        )


def check_evaluation(
    dataset: RetrievalDataset,
    protocol: Protocol,
    *,
    model: RetrievalModel | ZeroShotModel | None = None,
    folds: int = 1,
    bank: bool = False,
    left_out: int = 0,
) -> View:
    """What `evaluate` may see of `dataset`; raises what it would raise, before anything is encoded.

    `left_out`: how many images of the data set were taken away, for the message about folds.
    """
    seen = view(dataset, protocol)
    if len(dataset) % folds:
        mend = f", or mend the {left_out} that were left out" if left_out else ""
        raise ValueError(
            f"{len(dataset)} images cannot be cut into {folds} equal folds; choose a divisor of {len(dataset)}{mend}."
        )
    if model is not None:
        _check_pairing(model, seen, bank)
    return seen


def evaluate(
    model: RetrievalModel | ZeroShotModel,
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

    `pixels`, `tokens`, `keep_words` and `bank`: as for `score_dataset`. `lexical`: see `add_lexical`; figures of models
    alone are without.
    `extended`: also the figures of ECCV Caption and CxC, over all images whatever `folds` says; see `eval.extended`.
    """
    for name, value in (("folds", folds), ("keep_words", keep_words), ("memory", memory)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    seen = check_evaluation(dataset, protocol, model=model, folds=folds, bank=bank)
    training = model.training
    try:
        if isinstance(model, ZeroShotModel):
            scores = score_zero_shot(
                model, dataset, seen, tokens=tokens, keep_words=keep_words, bank=bank, progress=progress
            )
        else:
            scores = score_dataset(
                model,
                dataset,
                seen,
                pixels=pixels,
                tokens=tokens,
                keep_words=keep_words,
                bank=bank,
                memory=memory,
                progress=progress,
            )
        if lexical:
            scores = add_lexical(scores, seen, nat_of(model))
    finally:
        model.train(training)
    owner = dataset.image_of_caption
    metrics = five_fold(scores, owner, folds) if folds > 1 else recall(scores, owner)
    sees = isinstance(model, ZeroShotModel) or model.head.uses_description
    shown = seen.image_descriptions if sees else None
    return EvaluationReport(
        metrics,
        protocol,
        dataset.label,
        sum(text is not None for text in shown or []),
        folds,
        PUBLISHED_WARNING if protocol == "published" else None,
        _bank_words(model) if bank else "",
        lexical,
        None if extended is None else extended.figures(scores),
    )


def evaluate_each(
    model: RetrievalModel, dataset: RetrievalDataset, protocols: Sequence[Protocol], *, pixels: Pixels | None = None
) -> list[EvaluationReport]:
    """`evaluate` under several protocols; the images are decoded and encoded once."""
    training = model.training
    model.eval()
    tokens = encode_images(model, dataset, pixels=pixels) if model.head.uses_pixels else None
    model.train(training)
    return [evaluate(model, dataset, protocol, tokens=tokens) for protocol in protocols]


def _bank_words(model: RetrievalModel | ZeroShotModel) -> str:
    if isinstance(model, ZeroShotModel):
        return bank_words("a strength without labels")
    return bank_words(captions=CAPTION_STRENGTH)
