"""Evaluation: encode a data set once, score every pair exactly, count ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seps.metrics import RetrievalMetrics, five_fold, recall
from seps.retrieval.config import Protocol
from seps.retrieval.data import ImageReader, RetrievalDataset, read_source
from seps.retrieval.data.guides import dataset_guides
from seps.retrieval.data.images import decode_image
from seps.retrieval.eval.extended import Extended, ExtendedFigures
from seps.retrieval.eval.protocol import PUBLISHED_WARNING, ProtocolError, View, view
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.index.bank import (
    CAPTION_STRENGTH,
    STRENGTH,
    bank_of,
    bank_words,
    caption_levels,
    image_levels,
    strength_without_labels,
    zero_shot_levels,
)
from seps.retrieval.index.codec import merge_words
from seps.retrieval.index.lexical import InMemory, matches
from seps.retrieval.index.zeroshot import ZeroShotModel, nat_of
from seps.retrieval.model import RetrievalModel
from seps.scoring import score_matrix
from seps.scoring.blocks import scoring_memory

StageProgress = Callable[[str, int, int | None], None]
"""Called with what is encoded, how many are done, and of how many."""


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
    """Whether the scores have what a search adds for rare words that stand in a description."""
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
def encode_images(
    model: RetrievalModel,
    dataset: RetrievalDataset,
    *,
    pixels: Tensor | None = None,
    batch_size: int | None = None,
    progress: StageProgress | None = None,
) -> Tensor:
    """Tokens (B, P + N, C) of all images; photos are decoded in threads.

    `pixels` (B, 3, H, W) uint8 are images decoded before, by `decode_all(dataset, model.image_size)`. Raises ValueError
    for pixels of another size: to resize them here would be a second way to make them.
    """
    height, width = model.image_size
    if pixels is not None and pixels.shape[-2:] != (height, width):
        raise ValueError(
            f"The pixels are {pixels.shape[-2]} x {pixels.shape[-1]}, and the model takes {height} x {width}: decode "
            "them with decode_all(dataset, model.image_size)."
        )
    # On a CPU large activations are paid for in page faults: a few images at a time are about three times faster.
    batch_size = batch_size or (64 if model.device.type == "cuda" else 4)
    tokens = []
    total = len(dataset)
    with ImageReader() as reader:
        for start in range(0, total, batch_size):
            stop = min(start + batch_size, total)
            part = (
                pixels[start:stop]
                if pixels is not None
                else reader.read_many(dataset.sources[start:stop], (height, width))
            )
            part = part.to(model.device).float() / 255
            tokens.append(model.encode_pixels(part))
            if progress is not None:
                progress("images", stop, total)
    return torch.cat(tokens)


def encode_guides(model: RetrievalModel, dataset: RetrievalDataset) -> dict[str, Tensor] | None:
    """By name the vectors (B, width) that the model's head reads beside the images; None where it reads none."""
    guides = dataset_guides(dataset, model.head.guides)
    return None if guides is None else {name: rows.to(model.device) for name, rows in guides.items()}


@torch.no_grad()
def score_zero_shot(
    model: ZeroShotModel,
    dataset: RetrievalDataset,
    seen: View,
    *,
    keep_words: int | None = None,
    bank: bool = False,
    progress: StageProgress | None = None,
) -> Tensor:
    """As `score_dataset`, for a dual encoder; the strength of the `bank` is that of `strength_without_labels`."""
    report = progress or (lambda stage, done, total: None)
    if seen.query_descriptions is not None:
        raise ProtocolError(
            "Protocol 'published' pairs captions with descriptions inside a slimming head; a dual encoder has none. "
            "Use protocol 'none' or 'image'."
        )
    vectors = []
    with ImageReader() as reader:
        pictures = reader.map(
            lambda source: decode_image(read_source(source), source, model.image_size, model.embedder.prepare),
            dataset.sources,
        )
        for done, prepared in enumerate(pictures, 1):
            vectors.append(model.images([prepared]))
            report("images", done, len(dataset))
    query = model.query(seen.captions, described=seen.image_descriptions is not None)
    words, mask = model.describer.encode_descriptions(seen.image_descriptions or [None] * len(dataset))
    if keep_words is not None:
        words, mask = merge_words(words, mask, keep_words)
    images = (torch.cat(vectors), words, mask)
    scores = model.scores(*images, query)
    if not bank:
        return scores
    own = bank_of(model)
    strength = strength_without_labels(model.index_vectors(*images) @ own.vectors.T)
    return scores - strength * zero_shot_levels(model, *images, own)[:, None]


def add_lexical(scores: Tensor, seen: View, nat: float) -> Tensor:
    """The scores (images, captions), and what a search adds for rare words of a caption that stand in a description."""
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
    pixels: Tensor | None = None,
    keep_words: int | None = None,
    bank: bool = False,
    memory: int | None = None,
    progress: StageProgress | None = None,
) -> Tensor:
    """Similarities (images, captions) with what the view lets each side see.

    `keep_words` merges each image's description to so many words, as an index may. `bank` takes off what an image
    scores for background queries, as a search does, and how near a caption is to them; both know nothing of the data
    set. Raises ProtocolError for a bank under a protocol with query-side descriptions.
    """
    if bank and seen.query_descriptions is not None:
        raise ProtocolError("Background queries carry no descriptions: the bank does not go with protocol 'published'.")
    report = progress or (lambda stage, done, total: None)
    model.eval()
    guides = encode_guides(model, dataset)
    texts = model.encode_texts(seen.captions, progress=lambda done, total: report("captions", done, total))
    if model.head.uses_pixels:
        tokens = encode_images(model, dataset, pixels=pixels, progress=progress)
    else:
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
    scores = scores - STRENGTH * image_levels(model, images, own, memory=memory)[:, None]
    return scores - CAPTION_STRENGTH * caption_levels(texts, own)


def _score_leaky(
    model: RetrievalModel, images: ImageFeatures, texts: TextFeatures, query_descriptions: list[str], memory: int | None
) -> Tensor:
    """Query-side descriptions: description t comes with caption t. Each distinct text is encoded once."""
    if not isinstance(model.head, SlimmingHead) or not model.head.uses_description:
        raise ProtocolError(
            f"Protocol 'published' pairs captions with descriptions inside a slimming head with descriptions; head "
            f"{model.config.head!r} takes none. Use protocol 'none' or 'image'."
        )
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
        if not isinstance(part, Tensor):
            raise TypeError("score_matrix without topk returns a tensor")
        scores.append(part)
    return torch.cat(scores, dim=1)


def evaluate(
    model: RetrievalModel | ZeroShotModel,
    dataset: RetrievalDataset,
    protocol: Protocol = "image",
    *,
    folds: int = 1,
    pixels: Tensor | None = None,
    keep_words: int | None = None,
    bank: bool = False,
    memory: int | None = None,
    lexical: bool = False,
    extended: Extended | None = None,
    progress: StageProgress | None = None,
) -> EvaluationReport:
    """R@1/5/10 both ways, ranks and rSum of `dataset` under `protocol`; `folds=5` gives COCO's 1K figures.

    `keep_words` and `bank`: as for `score_dataset`. `lexical`: see `add_lexical`; figures of models alone are without.
    `extended`: also the figures of ECCV Caption and CxC, over all images whatever `folds` says; see `eval.extended`.
    """
    for name, value in (("folds", folds), ("keep_words", keep_words), ("memory", memory)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    seen = view(dataset, protocol)
    training = model.training
    try:
        if isinstance(model, ZeroShotModel):
            scores = score_zero_shot(model, dataset, seen, keep_words=keep_words, bank=bank, progress=progress)
        else:
            scores = score_dataset(
                model, dataset, seen, pixels=pixels, keep_words=keep_words, bank=bank, memory=memory, progress=progress
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


def _bank_words(model: RetrievalModel | ZeroShotModel) -> str:
    if isinstance(model, ZeroShotModel):
        return bank_words("a strength without labels")
    return bank_words(captions=CAPTION_STRENGTH)
