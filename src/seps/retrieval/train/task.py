"""Training a retrieval model: what `seps.training.train` needs to know.

With several processes each encodes and scores its own images against the captions of all; the rows are gathered, so
that every process sees the whole similarity matrix and the loss is that of a single process, within rounding. Dropout
and Gumbel noise are drawn by each process for its own rows: with them the loss is as good as that of one, not the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seps.encoders import parameters_by_depth
from seps.method.encoded import map_tensors
from seps.method.losses import InfoNCELoss, SEPSLoss, distillation
from seps.retrieval.config import Protocol, RunConfig
from seps.retrieval.data import ImageAugment, RetrievalDataset, augment_tokens, decode_all, epoch_batches, mixed_seed
from seps.retrieval.data.batches import BatchIndices, mixed_texts, own_texts
from seps.retrieval.data.guides import dataset_guides
from seps.retrieval.data.streams import Pixels
from seps.retrieval.evaluate.run import evaluate
from seps.retrieval.heads import ImageFeatures, Scores, TextFeatures, checked_scores
from seps.retrieval.model import RetrievalModel, freeze_parts
from seps.training.distributed import gather_with_gradient
from seps.training.task import Figures

_PARTS = ("fused", "pixels", "description")
Array = NDArray[np.int64]


@dataclass
class StepBatch:
    """One rank's rows of a step."""

    pixels: Tensor
    """(b, 3, h, w) uint8, as decoded."""
    ids: Tensor
    mask: Tensor
    """(b, M) caption tokens."""
    description_ids: Tensor
    description_mask: Tensor
    """(b, L) description tokens; an image without one has a mask of False alone."""
    images: Tensor
    """(b,) image numbers: rows that share one are no negatives of each other."""
    seed: int
    first: int
    """Where these rows start in the whole batch."""
    guides: dict[str, Tensor] = field(default_factory=dict)
    """By name (b, width): what guides the selection beside the texts."""
    word_counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    description_counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Words of each caption and description of the whole batch, of all ranks, in the processor's memory: to read them
    from a GPU is to wait for it. 0: no description."""


class TrainingModule(nn.Module):
    """The model and what learns beside it: the temperature of each part's loss."""

    def __init__(self, model: RetrievalModel, config: RunConfig) -> None:
        super().__init__()
        self.model = model
        loss = replace(config.loss, temperature=config.loss.temperature * model.head.score_range)
        self.criteria = nn.ModuleDict(
            {name: SEPSLoss.from_config(loss) for name in _PARTS if getattr(config.parts, name) > 0}
        )


def _described_pairs(rows: Tensor, ids: Tensor, counts: Array) -> tuple[Tensor, Tensor]:
    """The scores and ids of described images and of their captions: the others' rows are computed on padding.

    Where fewer than two are described, nothing is left to compare, and the rows come back as zeros.
    """
    places = np.flatnonzero(counts)
    if len(places) < 2:
        return rows * 0.0, ids
    chosen = torch.from_numpy(places).to(rows.device, non_blocking=True)
    return rows[chosen][:, chosen], ids[chosen]


def _scale(criterion: nn.Module) -> Tensor:
    """One over the learned temperature of a loss; `RunConfig` lets InfoNCE alone be distilled."""
    return cast(InfoNCELoss, cast(SEPSLoss, criterion).contrastive_loss).scale


def _depth_groups(encoder: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    """The encoder's parameters, each block at the rate of the next one times `decay`."""
    if decay == 1:
        return [{"params": list(encoder.parameters()), "lr": lr}]
    groups = parameters_by_depth(encoder)
    last = len(groups) - 1
    return [{"params": group, "lr": lr * decay ** (last - place)} for place, group in enumerate(groups) if group]


class RetrievalTask:
    """Implements `seps.training.Task` and `CachedTask`."""

    def __init__(
        self,
        model: RetrievalModel,
        config: RunConfig,
        train: RetrievalDataset,
        dev: list[RetrievalDataset],
        *,
        pixels: Pixels | None = None,
        dev_pixels: Sequence[Pixels] | None = None,
    ) -> None:
        freeze_parts(model, config)
        self.model = TrainingModule(model, config)
        self.config, self.data, self.dev = config, train, dev
        self.guides = dataset_guides(train, model.head.guides) or {}
        size = config.data.size_to_decode(model.image_size)
        self.pixels: Pixels = decode_all(train, size, mode="resize") if pixels is None else pixels
        self.dev_pixels: Sequence[Pixels] = (
            [decode_all(part, model.image_size) for part in dev] if dev_pixels is None else dev_pixels
        )
        self.augment = ImageAugment(model.image_size, scale=config.data.crop_scale, jitter=config.data.jitter)
        self._order: tuple[int, list[BatchIndices]] = (-1, [])

    @property
    def protocol(self) -> Protocol:
        """The one the head is made for; dev is scored under it."""
        return "image" if self.model.model.head.uses_description else "none"

    @property
    def labels(self) -> dict[str, str]:
        """What every line of the run's log says beside its figures."""
        return {"protocol": self.protocol}

    @property
    def begins_trained(self) -> bool:
        """Whether dev is scored before the first step: of a run that starts with a trained model."""
        return bool(self.config.start and self.dev)

    def steps_per_epoch(self, world: int) -> int:
        """Whole batches in the training set. Raises ValueError for a batch that the processes cannot share evenly."""
        size = self.config.train.batch_size
        if size % world:
            raise ValueError(
                f"train.batch_size = {size} cannot be shared evenly by {world} processes: choose a multiple of {world}."
            )
        return len(self.data) // size

    def begin_epoch(self, epoch: int) -> None:
        """Triplet loss: the sum of violations first, then the hardest negative."""
        for criterion in self.model.criteria.values():
            if isinstance(criterion, SEPSLoss):
                criterion.set_max_violation(self.config.loss.hardest and epoch >= self.config.warmup_epochs_sum)

    def parameter_groups(self, lr: float, backbone_scale: float) -> list[dict[str, Any]]:
        """New parts at `lr`; encoders at `lr * backbone_scale`, the text encoder scaled once more."""
        model = self.model.model
        config = self.config
        encoders = {id(p) for p in [*model.vision.parameters(), *model.text.parameters()]}
        new = [p for p in self.model.parameters() if id(p) not in encoders]
        vision_lr = lr * backbone_scale if config.vision_lr is None else config.vision_lr
        text_lr = lr * backbone_scale * config.text_lr_scale if config.text_lr is None else config.text_lr
        return [
            *_depth_groups(model.vision, vision_lr, config.layer_decay),
            *_depth_groups(model.text, text_lr, config.layer_decay),
            {"params": new, "lr": lr},
        ]

    def _batches(self, epoch: int) -> list[BatchIndices]:
        # Read once: with several workers another thread may put the next epoch there meanwhile.
        order = self._order
        if order[0] != epoch:
            config = self.config.train
            counts = self.data.captions_per_image
            order = (epoch, epoch_batches(len(self.data), counts, config.batch_size, config.seed, epoch))
            self._order = order
        return order[1]

    def batch(self, epoch: int, step: int, rank: int, world: int) -> StepBatch:
        """The rows of this rank. Texts are drawn for the whole batch, so that any number of ranks agrees."""
        images, captions = self._batches(epoch)[step]
        seed = mixed_seed(self.config.train.seed, epoch, step)
        generator = torch.Generator().manual_seed(seed)
        queries, descriptions = [], []
        for image, caption in zip(images.tolist(), captions.tolist(), strict=True):
            record = self.data.records[image]
            if self.config.data.texts == "mixed":
                query, description = mixed_texts(record, generator)
            else:
                query, description = own_texts(record, caption)
            queries.append(query)
            descriptions.append(description)
        ids, mask = self._tokens(queries, self.model.model.config.max_words)
        if self.config.data.caption_noise:
            ids, mask = self._noise(ids, mask, generator)
        description_ids, description_mask = self._descriptions(descriptions)
        rows = len(images) // world
        own = slice(rank * rows, (rank + 1) * rows)
        return StepBatch(
            self.pixels[images[own]],
            ids[own],
            mask[own],
            description_ids[own],
            description_mask[own],
            images[own],
            seed,
            rank * rows,
            {name: vectors[images[own]] for name, vectors in self.guides.items()},
            self._word_counts(ids, mask),
            self._word_counts(description_ids, description_mask),
        )

    def _word_counts(self, ids: Tensor, mask: Tensor) -> Array:
        counts: Array = self.model.model.is_word(ids, mask).sum(dim=1).numpy()
        return counts

    def _tokens(self, texts: list[str], limit: int) -> tuple[Tensor, Tensor]:
        tokenized = self.model.model.text.tokenize(texts)
        return tokenized.ids[:, :limit], tokenized.mask[:, :limit]

    def _descriptions(self, texts: list[str | None]) -> tuple[Tensor, Tensor]:
        model = self.model.model
        if not model.head.uses_description or not any(texts):
            empty = torch.zeros(len(texts), 1, dtype=torch.long)
            return empty, empty.bool()
        ids, mask = self._tokens([text or "none" for text in texts], model.config.max_dense_words)
        return ids, mask & torch.tensor([text is not None for text in texts])[:, None]

    def _noise(self, ids: Tensor, mask: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokenizer = self.model.model.text.tokenizer
        return augment_tokens(
            ids,
            mask,
            mask_id=tokenizer.mask_token_id,
            vocab_size=len(tokenizer),
            special_ids=tokenizer.all_special_ids,
            generator=generator,
            probability=self.config.data.caption_noise,
            pad_id=tokenizer.pad_token_id or 0,
        )

    def split(self, batch: StepBatch, chunk_size: int) -> list[StepBatch]:
        """The rows in chunks, padded alike."""
        chunks = []
        for start in range(0, len(batch.pixels), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk: StepBatch = map_tensors(batch, operator.itemgetter(rows))
            chunks.append(replace(chunk, first=batch.first + start))
        return chunks

    def encode(self, batch: StepBatch) -> tuple[Tensor, ...]:
        """Image tokens, caption words and mask, description words and mask."""
        model = self.model.model
        pixels = self.augment(batch.pixels.float() / 255, batch.seed, batch.first)
        words, mask = model.encode_words(batch.ids, batch.mask)
        tokens = model.encode_pixels(pixels) if model.head.uses_pixels else words[:, :1]
        if batch.description_mask.shape[1] == 1:
            return tokens, words, mask, words.new_zeros(len(words), 1, words.shape[-1]), batch.description_mask
        described = batch.description_mask.any(dim=1, keepdim=True)
        # A row without description still needs tokens to attend to; none of them is a valid word of it.
        dense, valid = model.encode_words(batch.description_ids, batch.description_mask | ~described)
        return tokens, words, mask, dense, valid & described

    def loss(self, batch: StepBatch, epoch: int) -> tuple[Tensor, Figures]:
        """The loss of the whole batch, from this rank's rows and the other ranks' features."""
        return self.loss_from_features(self.encode(batch), batch, epoch)

    def loss_from_features(self, features: tuple[Tensor, ...], batch: StepBatch, epoch: int) -> tuple[Tensor, Figures]:
        """See `loss`."""
        tokens, words, mask, dense, description_mask = features
        head = self.model.model.head
        described = head.uses_description and description_mask.shape[1] > 1
        texts = TextFeatures(gather_with_gradient(words), gather_with_gradient(mask), batch.word_counts.tolist())
        ids = gather_with_gradient(batch.images)
        options: dict[str, Any] = {"want_masks": self.config.loss.ratio_weight > 0 or head.learns_number}
        images = ImageFeatures(tokens, guides=batch.guides or None)
        if described and self.config.pairing == "published":
            options["paired"] = TextFeatures(
                gather_with_gradient(dense), gather_with_gradient(description_mask), batch.description_counts.tolist()
            )
        elif described:
            images.dense, images.dense_mask = dense, description_mask
        scores = checked_scores(head, head(images, texts, **options), images, texts)
        return self._part_losses(scores, ids, batch.description_counts)

    def _part_losses(self, scores: Scores, ids: Tensor, description_counts: Array) -> tuple[Tensor, Figures]:
        total: Tensor | None = None
        figures: dict[str, Tensor] = {}
        parts = {"fused": scores.similarity, "pixels": scores.pixels, "description": scores.description}
        for name, criterion in self.model.criteria.items():
            rows = parts[name]
            if rows is None:
                raise ValueError(
                    f"parts.{name} has a weight, but head {self.model.model.config.head!r} gives no such part here; "
                    "set it to 0, or give the training data descriptions."
                )
            rows, owners = gather_with_gradient(rows), ids
            if name == "description" and scores.described is not None:
                rows, owners = _described_pairs(rows, owners, description_counts)
            loss, align, ratio = criterion(rows, scores.masks, owners)
            weighted = getattr(self.config.parts, name) * loss
            total = weighted if total is None else total + weighted
            figures[f"loss_{name}"] = align.detach()
            if self.config.loss.ratio_weight:
                figures["ratio"] = ratio.detach()
        if total is None:
            raise ValueError("no part of the score has a loss")
        if self.config.parts.distill:
            taught = self._distillation(scores, description_counts)
            total = total + self.config.parts.distill * taught
            figures["loss_distill"] = taught.detach()
        for name, mask in zip(("kept", "kept_dense"), scores.masks, strict=False):
            figures[name] = mask.detach().mean()
        return total, figures

    def _distillation(self, scores: Scores, description_counts: Array) -> Tensor:
        """The pixels' rows against the description's, each at its own learned temperature."""
        if scores.pixels is None or scores.description is None:
            raise ValueError("parts.distill has a weight, but the batch has no descriptions; set it to 0.")
        pixels, taught = gather_with_gradient(scores.pixels), gather_with_gradient(scores.description.detach())
        if scores.described is not None:
            places = torch.arange(len(pixels), device=pixels.device)
            pixels, _ = _described_pairs(pixels, places, description_counts)
            taught, _ = _described_pairs(taught, places, description_counts)
        own, teacher = (_scale(self.model.criteria[name]) for name in ("pixels", "description"))
        softness = self.config.distill_softness
        return distillation(pixels * own / softness, taught * teacher / softness)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """rSum on each dev set under the protocol the head is made for; "score" is their mean. Nothing without one."""
        model = self.model.model
        figures: dict[str, float] = {}
        if not self.dev:
            return figures
        for data, pixels in zip(self.dev, self.dev_pixels, strict=True):
            report = evaluate(model, data, self.protocol, pixels=pixels)
            figures[f"rsum_{data.label}"] = report.metrics.rsum
        figures["score"] = sum(figures.values()) / len(figures)
        if model.description_weight is not None:
            figures["trust"] = model.description_weight
        return figures
