"""Re-identification as a task of `seps.training.train`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.config import ConfigError
from seps.method.losses import batch_hard_triplet, identity_loss, ratio_loss
from seps.reid.any_to_any import shared_space_loss
from seps.reid.build import build_model
from seps.reid.config import ReidConfig, ReidDataConfig, ReidLossConfig
from seps.reid.data import Augmentation, IdentityBatches, ReidDataset, ReidReader, holdout, load
from seps.reid.data.texts import refuse_copies, with_texts
from seps.reid.data.transforms import apply, draw
from seps.reid.demo.batches import PublishedBatches, apply_per_sensor, draw_per_sensor
from seps.reid.evaluate import evaluate
from seps.reid.network.model import Fused, ReidModel
from seps.reid.network.text import ShotReader, ShotTexts, TextVectors, text_loss, texts_of
from seps.training import distributed as processes
from seps.training.optim import backbone_groups
from seps.training.seeding import derive_seed
from seps.training.task import Figures, ParameterGroup

# Separate random numbers for the augmentation, the sensors left out and the order of the dev shots.
_AUGMENT, _DROPOUT, _SHUFFLE, _TEXTS = 1, 2, 3, 4


@dataclass
class ReidBatch:
    """images (B, M, 3, H, W) in [0, 1], labels and cameras (B,), present (B, M) bool, and texts where there are any."""

    images: Tensor
    labels: Tensor
    cameras: Tensor
    present: Tensor
    texts: ShotTexts | None = None


def load_dataset(config: ReidDataConfig) -> ReidDataset:
    """The data set of the settings, with the chosen modalities. Raises ReidDataError or ConfigError."""
    if not config.root:
        raise ConfigError("data.root is empty: say where the data set lies.")
    generic = config.layout.lower() == "generic"
    dataset = load(
        config.layout,
        config.root,
        on_problem=config.on_problem,
        verify_files=config.verify_files,
        modalities=config.modalities if generic else None,
        pattern=config.pattern,
        labels=config.labels,
        threads=config.threads,
    )
    if config.texts:
        dataset = with_texts(dataset, config.texts, config.root)
        if config.text_copies == "refuse":
            refuse_copies(dataset)
    if config.modalities is None or config.modalities == dataset.modalities:
        return dataset
    unknown = sorted(set(config.modalities) - set(dataset.modalities))
    if unknown:
        raise ConfigError(f"data.modalities names {unknown}, but {config.layout} has {dataset.modalities}.")
    # A ReidRecord keeps all its sources; the reader takes those of the data set's modalities.
    return replace(dataset, modalities=config.modalities)


def make_reader(config: ReidConfig, dataset: ReidDataset) -> ReidReader:
    """A reader of the data set at the model's image size, and of its texts where the model reads them."""
    model = config.model
    return ShotReader(
        dataset.modalities,
        model.image_size,
        threads=config.data.threads,
        cache_bytes=config.data.cache_mib * 2**20,
        texts=TextVectors(model.text_encoder, model.text_width) if model.text != "none" else None,
    )


def make_model(config: ReidConfig, dataset: ReidDataset, identities: int) -> ReidModel:
    """A model for the data set's modalities and cameras; its new layers are drawn from the run's seed."""
    torch.manual_seed(derive_seed(config.train.seed))
    return build_model(config.model, dataset.modalities, identities, len(dataset.cameras))


def split_dataset(config: ReidConfig, dataset: ReidDataset) -> tuple[ReidDataset, ReidDataset]:
    """(fit, dev): the training shots without, and those of, the held-out identities.

    The dev shots are shuffled: in the files' order equal distances, such as those of a collapsed network, would
    rank the query's own identity near the top for some. With `data.holdout` 0 there are none.
    """
    part = config.data.holdout
    if part == 0:
        return dataset, replace(dataset, train=(), query=(), gallery=())
    fit, dev = holdout(dataset, int(part) if part >= 1 else part, config.train.seed)
    order = np.random.default_rng([config.train.seed, _SHUFFLE]).permutation(len(dev.query))
    shots = tuple(dev.query[int(index)] for index in order)
    return fit, replace(dev, query=shots, gallery=shots)


def reid_losses(
    fused: Fused, everyone: Fused, scores: tuple[Tensor, ...], labels: Tensor, config: ReidLossConfig, first: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Both branches' cross-entropy and triplet of this process's rows, weighted, and each by name.

    `everyone` and `labels` are those of all processes, `scores` those of all rows, `first` the number of this
    process's first row among them. The batch norm of the neck thus sees the whole batch on every process. More than one
    score of the original branch is one per sensor: each then has losses of its own, on its block of the feature.
    """
    rows = slice(first, first + len(fused.original))
    of_original = scores if fused.sdtps is None else scores[1:]
    several = len(of_original) > 1
    wholes = (fused.original, everyone.original)
    # One score is of the feature itself: a view of it would change the order, and so the rounding, of the gradients.
    parts_of = [whole.chunk(len(of_original), dim=1) if several else (whole,) for whole in wholes]
    names = [f"original{number}" for number in range(len(of_original))] if several else ["original"]
    branches = [
        (name, 1.0, own, all_rows, score)
        for name, own, all_rows, score in zip(names, *parts_of, of_original, strict=True)
    ]
    if fused.sdtps is not None and everyone.sdtps is not None:
        branches.append(("sdtps", config.sdtps, fused.sdtps, everyone.sdtps, scores[0]))
    parts: dict[str, Tensor] = {}
    total = fused.original.new_zeros(())
    for name, weight, own, all_rows, score in branches:
        identity = identity_loss(score[rows], labels[rows], config.label_smoothing)
        if config.triplet_space == "unit":
            own, all_rows = F.normalize(own, dim=1), F.normalize(all_rows, dim=1)
        triplet = batch_hard_triplet(own, labels[rows], all_rows, labels, first=first)
        parts |= {f"{name}_identity": identity.detach(), f"{name}_triplet": triplet.detach()}
        total = total + weight * (config.identity * identity + config.triplet * triplet)
    return total, parts


class ReidTask:
    """Batches of P x K images, the losses of both branches, and mAP on the held-out training identities.

    `dataset` is whole (its cameras are numbered over all splits); `fit` and `dev` come from `split_dataset`.
    """

    def __init__(
        self, config: ReidConfig, dataset: ReidDataset, model: ReidModel | None = None, reader: ReidReader | None = None
    ) -> None:
        self.config, self.dataset = config, dataset
        self.fit, self.dev = split_dataset(config, dataset)
        if config.model.text != "none":
            if all(record.text is None for record in self.fit.train):
                raise ConfigError(
                    f"model.text = {config.model.text!r}, but no training shot has a text: name the file of texts with "
                    "data.texts, or set model.text to 'none'."
                )
            if config.data.text_copies == "refuse":
                refuse_copies(self.dev)
        self.model = model if model is not None else make_model(config, dataset, len(self.fit.identities))
        self.reader = reader if reader is not None else make_reader(config, dataset)
        self.cameras = torch.tensor(dataset.camera_indices(self.fit.train), dtype=torch.long)
        data = config.data
        self.augmentation = Augmentation(pad=data.pad, flip=data.flip, erase=data.erase)
        kind = PublishedBatches if config.model.network == "demo" else IdentityBatches
        self.batches = kind(
            self.fit.train_labels, identities=data.identities, images=data.images, seed=config.train.seed
        )

    def steps_per_epoch(self, world: int) -> int:
        """Steps of an epoch, on any number of processes. Raises ValueError when they cannot share a batch."""
        if self.batches.identities % world:
            raise ValueError(
                f"data.identities = {self.batches.identities} do not divide among {world} processes; choose a multiple."
            )
        return len(self.batches)

    def batch(self, epoch: int, step: int, rank: int, world: int) -> ReidBatch:
        """This process's identities of the global batch, augmented; the draws are those of the global batch."""
        indices = self.batches.global_batch(epoch, step)
        share = len(indices) // world
        mine = slice(rank * share, (rank + 1) * share)
        seed = self.config.train.seed
        generator = torch.Generator().manual_seed(derive_seed(seed, _AUGMENT, epoch, step))
        chosen = indices[mine]
        pixels = self.reader.batch([self.fit.train[index] for index in chosen])
        labels = torch.tensor([self.fit.train_labels[index] for index in chosen])
        present = self._present(np.random.default_rng([seed, _DROPOUT, epoch, step]))
        images = self._augmented(pixels, len(indices), mine, generator)
        texts = texts_of(self.reader, [self.fit.train[index] for index in chosen])
        if (
            texts is not None
            and np.random.default_rng([seed, _TEXTS, epoch, step]).random() < self.config.loss.text_dropout
        ):
            texts = None
        return ReidBatch(images, labels, self.cameras[chosen], present.expand(len(chosen), -1), texts)

    def _augmented(self, pixels: Tensor, total: int, mine: slice, generator: torch.Generator) -> Tensor:
        """This process's shots, augmented; the draws are those of all `total` shots of the global batch."""
        size, augmentation = self.config.model.image_size, self.augmentation
        if self.config.model.network != "demo":
            return apply(pixels, draw(total, size, augmentation, generator)[mine], augmentation)
        sensors = len(self.dataset.modalities)
        choices = draw_per_sensor(total, sensors, size, augmentation, generator)
        rows = slice(mine.start * sensors, mine.stop * sensors)
        backbone = self.model.backbones[0]
        return apply_per_sensor(pixels, choices[rows], augmentation, backbone.mean, backbone.std)  # type: ignore[arg-type]

    def _present(self, rng: np.random.Generator) -> Tensor:
        """(M,) bool: the sensors of one batch.

        A whole batch lacks the same ones: the triplets of one that mixes complete and incomplete samples would
        tell them apart by what is missing.
        """
        count = len(self.dataset.modalities)
        present = np.ones(count, dtype=bool)
        if rng.random() < self.config.loss.modality_dropout:
            kept = rng.integers(1, count)
            present[rng.permutation(count)[kept:]] = False
        return torch.from_numpy(present)

    def loss(self, batch: ReidBatch, epoch: int) -> tuple[Tensor, Figures]:
        """The loss of this process's rows against those of all."""
        fused = self.model.embed(batch.images, batch.cameras, batch.present, texts=batch.texts)
        everyone, labels = fused, batch.labels
        if processes.world_size() > 1:
            sdtps = None if fused.sdtps is None else processes.gather_with_gradient(fused.sdtps)
            everyone = Fused(processes.gather_with_gradient(fused.original), sdtps, None)
            labels = processes.gather_ragged(batch.labels)
        scores = self.model.classify(everyone)
        first = processes.rank() * len(batch.labels)
        total, parts = reid_losses(fused, everyone, scores, labels, self.config.loss, first)
        figures = dict(parts)
        if self.config.loss.shared:
            shared = self._shared(fused, everyone, labels, batch.present[0], first)
            total, figures["shared"] = total + self.config.loss.shared * shared, shared.detach()
        if fused.text is not None and batch.texts is not None and self.config.loss.text:
            text = self._text(fused, labels, batch.texts.present, first)
            total, figures["text"] = total + self.config.loss.text * text, text.detach()
        if fused.keep is not None:
            figures["kept"] = fused.keep.detach().mean()
            if self.config.model.decision == "binary":
                total = total + self.config.loss.ratio * self._ratio(fused.keep)
        if self.model.patch_gate is not None and fused.early is not None:
            pooled = self.model.patch_gate.pool(fused.early, batch.present)
            gate = self.model.patch_gate.loss(pooled, batch.labels, self.config.loss.label_smoothing)
            total, figures["gate"] = total + self.config.loss.gate * gate, gate.detach()
        hits = (scores[0].argmax(dim=1) == labels).float().mean()
        return total, {**figures, "accuracy": hits}

    def _shared(self, fused: Fused, everyone: Fused, labels: Tensor, present: Tensor, first: int) -> Tensor:
        """The loss of a space that all sensors share, averaged over the branches; texts have no part in it."""
        present = F.pad(present, (0, len(self.model.blocks) - len(self.model.modalities)), value=False)
        branches = [(fused.original, everyone.original)]
        if fused.sdtps is not None and everyone.sdtps is not None:
            branches.append((fused.sdtps, everyone.sdtps))
        losses = [shared_space_loss(own, every, labels, present, first) for own, every in branches]
        return torch.stack(losses).mean()

    def _text(self, fused: Fused, labels: Tensor, told: Tensor, first: int) -> Tensor:
        """The loss that brings this process's texts near their own shots, against those of all."""
        assert fused.text is not None and fused.shots is not None
        texts, shots = (fused.text, fused.text), (fused.shots, fused.shots)
        if processes.world_size() > 1:
            texts = fused.text, processes.gather_with_gradient(fused.text)
            shots = fused.shots, processes.gather_with_gradient(fused.shots)
            told = processes.gather_ragged(told)
        return text_loss(texts, shots, labels, told, first)

    def _ratio(self, keep: Tensor) -> Tensor:
        """Eq. 7 of each sensor, averaged."""
        target = self.config.model.sparse_ratio
        masks = keep.unbind(1)
        return torch.stack([ratio_loss([mask], target=target, form="separate") for mask in masks]).mean()

    def evaluate(self) -> dict[str, float]:
        """mAP and CMC in percent on the held-out training identities; the score is the mAP.

        Without held-out identities there is nothing to measure: no figures, and the last checkpoint counts.
        """
        if not self.dev.query:
            return {}
        result = evaluate(
            self.model, self.dev, self.reader, cameras=self.dataset, batch_size=self.config.train.batch_size
        )[0]
        figures = {name: float(value) for name, value in result.metrics.as_dict().items()}
        return {"score": figures["mAP"], **figures}

    def parameter_groups(self, lr: float, backbone_scale: float) -> list[ParameterGroup]:
        """Backbones at `lr` x `backbone_scale`, everything else at `lr`."""
        return backbone_groups(self.model, lambda name: name.startswith("backbones."), lr, backbone_scale)
