"""The settings of re-identification: the only place their defaults live; YAML presets fill them.

A file has four sections, `data`, `model`, `loss` and `train`; `seps.settings` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from seps import settings
from seps.method.config import ConfigError, DecisionKind, GuideKind
from seps.training.config import CheckedSettings, TrainConfig

Fusion = Literal["sdtps", "concat"]
Backbones = Literal["shared", "separate"]
Missing = Literal["zero", "leave-out"]
TripletSpace = Literal["raw", "unit"]
Problems = Literal["refuse", "skip"]
NetworkKind = Literal["seps", "demo"]
SelectionKind = Literal["published", "gate"]
SelectionPlace = Literal["end", "first"]
TextUse = Literal["none", "guide", "join"]
Copies = Literal["refuse", "allow"]


@dataclass(frozen=True)
class ReidDataConfig(CheckedSettings):
    """Which images, and how they become batches.

    Args:
        layout, root: one of the published layouts or "generic", and its folder.
        modalities: None takes those of the layout (generic: those found); else a choice of two or more of them.
        pattern, labels: generic layout: how names give identity and camera (see `seps.reid.data.load`).
        texts: JSONL file with a text of each shot, written from its own pictures (`seps.reid.data.texts`; None: none).
        text_copies: "refuse" queries whose text is, word for word, that of a gallery shot that they should find, or
            "allow" them, and say how many they are.
        on_problem, verify_files: refuse or skip shots with missing or cut files; decode every file beforehand.
        identities, images: P x K, the make-up of a batch; `train.batch_size` must be their product.
        holdout: training identities kept apart to choose checkpoints by: a number, or a fraction. 0: all identities
            train and the last checkpoint is taken, as nothing but the test split could choose another
            (`train.eval_every` 0).
        pad, flip, erase: padding and probabilities of the augmentation.
        rerank: k1 and k2 of k-reciprocal re-ranking (published by DeMo: 50 and 15).
        threads, cache_mib: decoding threads; memory for decoded shots.
    """

    layout: str = "generic"
    root: str = ""
    modalities: tuple[str, ...] | None = None
    pattern: str | None = None
    labels: str | None = None
    texts: str | None = None
    text_copies: Copies = "refuse"
    on_problem: Problems = "refuse"
    verify_files: bool = False
    identities: int = 16
    images: int = 4
    holdout: float = 0.1
    pad: int = 10
    flip: float = 0.5
    erase: float = 0.5
    rerank: tuple[int, int] = (20, 6)
    threads: int = 4
    cache_mib: int = 1024

    def __post_init__(self) -> None:
        self._require_choice("on_problem", Problems)
        self._require_choice("text_copies", Copies)
        self._require("rerank", min(self.rerank) >= 1, "give two numbers of neighbours, each 1 or more")
        self._require("identities", self.identities >= 2, "a triplet needs 2 or more identities in a batch")
        self._require("images", self.images >= 2, "a triplet needs 2 or more images of an identity")
        whole = self.holdout == 0 or (self.holdout >= 1 and float(self.holdout).is_integer())
        self._require("holdout", whole or 0 < self.holdout < 1, "give a whole number of identities or a fraction")
        self._require("pad", self.pad >= 0, "must be 0 or more pixels")
        self._require_each("flip erase", lambda v: 0 <= v <= 1, "must be a probability from 0 to 1")
        self._require("threads", self.threads >= 1, "must be at least 1")
        self._require("cache_mib", self.cache_mib >= 0, "must not be negative; 0 keeps nothing")
        names = self.modalities
        two = names is None or (len(names) >= 2 and len(set(names)) == len(names))
        self._require("modalities", two, "give two or more different names, or leave it out")


@dataclass(frozen=True)
class ReidModelConfig(CheckedSettings):
    """Settings of the network, `seps.reid.network.model.ReidModel`.

    Args:
        network: "seps", or "demo": DeMo's network, batches and augmentation with SDTPS in the place of its fusion
            (`seps.reid.demo`).
        encoder, pretrained, image_size, stride: backbone, (height, width), distance of its patches (None: its own).
        backbones: "shared" by the modalities, or a "separate" one each. freeze_blocks: first blocks that do not learn.
        camera_embedding: add a learned vector of the camera to the features (for cameras seen in training); which
            patches are kept does not depend on it. The "demo" network adds it to CLS before the first norm.
        width: C of the patches and global vectors.
        global_local, direct: switches of the "demo" network alone, DeMo's GLOBAL_LOCAL and DIRECT: the global vector is
            learned from CLS and the mean patch, or, false, CLS; one classifier over all sensors, or, false, one each.
        fusion: "sdtps", or "concat", the global vectors alone, concatenated.
        sparse_ratio, aggr_ratio: of SDTPS: the part of the patches that is kept, and the part of the kept ones that
            they are merged to (Eq. 4).
        beta: weight of each guide in the score of a patch (Eq. 3).
        decision, temperature: how the kept patches follow from the scores (`SlimmingConfig.decision`), and the
            temperature of its relaxation.
        selection: who decides which patches are kept: the "published" scores, or a "gate" (`seps.reid.network.gate`)
            that sees each patch by itself, before the encoder mixes them, and learns from identities (`loss.gate`).
        select_at: where the gate drops patches: at the "end", when they are merged, or before the "first" block of a
            plain ViT, so that dropped ones have no influence on anything and cost nothing.
        own_guide: weight of a sensor's own global vector beside the others' (published: 2; 0: the others alone guide).
        guides: how the others guide: their "vector" against this sensor's patches (as published), or, for sensors that
            share one frame, by "position": what each keeps to itself, at the same place.
        text: what a shot's text (`data.texts`) does: "none", "guide" the selection of every sensor's patches, or
            "join": guide it and be one more block of the feature. A shot without one is compared by its sensors alone.
        text_encoder, text_width: the fixed encoder that reads the texts, a preset, a hub id or a folder; and its width.
        text_guide: weight of the text beside the other sensors' 1 in the score of a patch.
        missing: what an absent sensor is: a "zero" image (as published), or "leave-out": it neither guides nor is
            guided, and distances are taken over the sensors both samples have.
    """

    network: NetworkKind = "seps"
    encoder: str = "mini"
    pretrained: bool = True
    image_size: tuple[int, int] = (256, 128)
    stride: int | None = None
    backbones: Backbones = "shared"
    freeze_blocks: int = 0
    camera_embedding: bool = False
    width: int = 512
    global_local: bool = True
    direct: bool = True
    fusion: Fusion = "sdtps"
    sparse_ratio: float = 0.5
    aggr_ratio: float = 0.4
    selection: SelectionKind = "published"
    select_at: SelectionPlace = "end"
    beta: float = 0.25
    own_guide: float = 2.0
    guides: GuideKind = "vector"
    decision: DecisionKind = "topk"
    temperature: float = 1.0
    text: TextUse = "none"
    text_encoder: str = "mini"
    text_width: int = 384
    text_guide: float = 1.0
    missing: Missing = "leave-out"

    def __post_init__(self) -> None:
        for name, choices in (
            ("backbones", Backbones),
            ("fusion", Fusion),
            ("decision", DecisionKind),
            ("guides", GuideKind),
            ("missing", Missing),
            ("network", NetworkKind),
            ("selection", SelectionKind),
            ("select_at", SelectionPlace),
            ("text", TextUse),
        ):
            self._require_choice(name, choices)
        size = self.image_size
        self._require("image_size", len(size) == 2 and min(size) >= 1, "give (height, width) in pixels")
        self._require("stride", self.stride is None or self.stride >= 1, "must be 1 or more pixels, or left out")
        self._require("freeze_blocks", self.freeze_blocks >= 0, "must not be negative; 0 freezes nothing")
        demo = self.network == "demo"
        for name in ("global_local", "direct"):
            self._require(name, demo or getattr(self, name), "is a switch of DeMo's: set model.network to 'demo'")
        self._require("width", self.width >= 4, "must be at least 4")
        self._require_each("sparse_ratio aggr_ratio", lambda v: 0 < v <= 1, "must be above 0 and at most 1")
        self._require_each(
            "beta own_guide text_guide", lambda v: 0 <= v < math.inf, "must be a finite number, 0 or more"
        )
        self._require("text_width", self.text_width >= 1, "must be the width of model.text_encoder, 1 or more")
        self._require("temperature", 0 < self.temperature < math.inf, "must be a finite number above 0")
        self._require("text", self.text == "none" or not demo, "DeMo's network reads no texts: set network to 'seps'")
        gate = self.selection == "gate"
        guided = self.fusion == "sdtps" and not gate
        self._require(
            "text",
            self.text != "guide" or guided,
            "guides the published scores of the 'sdtps' fusion: use it with them, or set text to 'join'",
        )
        alone = not gate or self.fusion == "sdtps"
        self._require("selection", alone, f"model.fusion = {self.fusion!r} selects no patches: set it to 'sdtps'")
        fixed = not gate or self.decision == "topk"
        self._require(
            "selection",
            fixed,
            f"a gate keeps a fixed number of patches: set model.decision to 'topk', not {self.decision!r}",
        )
        first = self.select_at == "first"
        self._require("select_at", gate or not first, "the published scores need the encoder: set selection to 'gate'")
        vector = not first or self.guides == "vector"
        self._require("select_at", vector, "the sensors keep other places each: set model.guides to 'vector'")


@dataclass(frozen=True)
class ReidLossConfig(CheckedSettings):
    """Weights of the losses.

    Args:
        identity, triplet: of each branch's label-smoothed cross-entropy and soft-margin batch-hard triplet.
        triplet_space: "raw" features as published, or "unit" length, the space of the cosine distances they are ranked
            by. In the raw space the hardest triplets of an encoder that is new to the task are answered fastest by
            shrinking all features to a point, from which training does not recover.
        sdtps: weight of the SDTPS branch beside the original one. label_smoothing: part of the target spread evenly.
        ratio: weight of Eq. 7, which holds the number of kept patches near `sparse_ratio`; it acts with the "binary"
            decision alone, the others keep a fixed number.
        gate: weight of the loss of the gate (`model.selection` "gate"), the one part of the network that it trains.
        shared: weight of a triplet loss that compares single sensors with each other, which brings all sensors into one
            space: for queries by one sensor and a gallery by another (`seps reid eval --any`); 0 is off.
        text: weight of the contrastive loss that brings each text near its own shot (`model.text`).
        text_dropout: probability that a batch is trained without its texts, for shots that have none in use.
        modality_dropout: probability that a batch is trained with some sensors missing, as `model.missing` says.
    """

    identity: float = 0.25
    triplet: float = 1.0
    triplet_space: TripletSpace = "unit"
    sdtps: float = 1.0
    label_smoothing: float = 0.1
    ratio: float = 2.0
    gate: float = 1.0
    shared: float = 0.0
    text: float = 1.0
    text_dropout: float = 0.0
    modality_dropout: float = 0.0

    def __post_init__(self) -> None:
        self._require_choice("triplet_space", TripletSpace)
        weights = "identity triplet sdtps ratio gate shared text"
        self._require_each(weights, lambda v: 0 <= v < math.inf, "must be a finite number, 0 or more")
        self._require("label_smoothing", 0 <= self.label_smoothing < 1, "must be at least 0 and below 1")
        self._require_each("modality_dropout text_dropout", lambda v: 0 <= v <= 1, "must be a probability from 0 to 1")


@dataclass(frozen=True)
class ReidConfig:
    """All settings of a re-identification run: the data and its batches, the model, the losses, the training.

    Raises ConfigError (a ValueError) where sections do not fit each other: `train.batch_size` must be
    `data.identities` x `data.images`, and identities must be held out if checkpoints are compared.
    """

    data: ReidDataConfig = field(default_factory=ReidDataConfig)
    model: ReidModelConfig = field(default_factory=ReidModelConfig)
    loss: ReidLossConfig = field(default_factory=ReidLossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.data.holdout == 0 and self.train.eval_every:
            raise ConfigError(
                f"data.holdout = 0 leaves no identity to choose a checkpoint by, but train.eval_every = "
                f"{self.train.eval_every}: set it to 0, which takes the last one, or hold identities out."
            )
        product = self.data.identities * self.data.images
        if self.train.batch_size != product:
            raise ConfigError(
                f"train.batch_size = {self.train.batch_size}, but data.identities x data.images = "
                f"{self.data.identities} x {self.data.images} = {product}: make them agree."
            )
        if self.train.chunk_size:
            raise ConfigError(
                f"train.chunk_size = {self.train.chunk_size}: batch norm before the classifiers reads the whole "
                "batch, so it cannot be encoded in chunks here; set it to 0."
            )

    @staticmethod
    def complete(values: dict[str, Any]) -> dict[str, Any]:
        """The settings with `train.batch_size` = `data.identities` x `data.images`, unless it is given."""
        data, train = values.get("data", {}), values.get("train", {})
        people, images = data.get("identities", ReidDataConfig.identities), data.get("images", ReidDataConfig.images)
        return {**values, "train": {"batch_size": people * images, **train}}

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, as `from_mapping` reads them."""
        return settings.to_plain(self)


def from_mapping(values: Mapping[str, Any], source: str = "the settings") -> ReidConfig:
    """Settings from nested plain values; unknown names and wrong types are refused by name."""
    return settings.from_mapping(ReidConfig, values, source)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> ReidConfig:
    """Settings from a YAML file (None: the defaults), then `section.field=value` overrides."""
    return settings.load(ReidConfig, path, overrides)
