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
    """Which images, and how they become batches."""

    layout: str = "generic"
    """Choose the layout of the data set: the name of a published one, or "generic"."""
    root: str = ""
    """Read the data set from this folder."""
    modalities: tuple[str, ...] | None = None
    """Use these sensors, two or more; null takes those of the layout (generic: those found)."""
    pattern: str | None = None
    """Read identity and camera from file names by this pattern (generic layout; see `seps.reid.data.load`)."""
    labels: str | None = None
    """Read identity and camera from this file of labels (generic layout; see `seps.reid.data.load`)."""
    texts: str | None = None
    """Read a text of each shot from this JSONL file, written from its own pictures (`seps.reid.data.texts`); null:
    none."""
    text_copies: Copies = "refuse"
    """Refuse or allow queries whose text equals, word for word, that of a gallery shot that they should find;
    "allow" prints their number."""
    on_problem: Problems = "refuse"
    """Refuse or skip shots with missing or truncated files."""
    verify_files: bool = False
    """Decode every file before the run."""
    identities: int = 16
    """Set the number of identities per batch (P); `train.batch_size` must be identities x images."""
    images: int = 4
    """Set the number of shots per identity in a batch (K)."""
    holdout: float = 0.1
    """Hold out training identities to choose checkpoints by: a number, or a fraction. 0: all identities train and
    the last checkpoint is taken, because only the test split could choose another (set `train.eval_every` to 0)."""
    pad: int = 10
    """Pad images by this many pixels before the random crop."""
    flip: float = 0.5
    """Set the probability that a shot is flipped."""
    erase: float = 0.5
    """Set the probability that a rectangle is erased."""
    rerank: tuple[int, int] = (20, 6)
    """Set k1 and k2 of k-reciprocal re-ranking (published by DeMo: 50 and 15)."""
    threads: int = 4
    """Decode with this many threads."""
    cache_mib: int = 1024
    """Keep at most this many MiB of decoded shots; 0 keeps none."""

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
    """Settings of the network, `seps.reid.network.model.ReidModel`."""

    network: NetworkKind = "seps"
    """Choose the network: "seps", or "demo": the network, batches and augmentation of DeMo with SDTPS as its fusion
    (`seps.reid.demo`)."""
    encoder: str = "mini"
    """Choose the backbone by preset name, hub id or folder."""
    pretrained: bool = True
    """Load the pretrained weights of the backbone."""
    image_size: tuple[int, int] = (256, 128)
    """Resize images to this (height, width) in pixels."""
    stride: int | None = None
    """Set the distance between patches in pixels; null takes the encoder's default."""
    backbones: Backbones = "shared"
    """Share one backbone between the sensors ("shared"), or train one for each ("separate")."""
    freeze_blocks: int = 0
    """Freeze this many of the first blocks of the backbone."""
    camera_embedding: bool = False
    """Add a learned vector of the camera to the features (for cameras seen in training). The selection of patches
    does not depend on it. The "demo" network adds it to CLS before the first norm."""
    width: int = 512
    """Set the width of the patches and global vectors."""
    global_local: bool = True
    """Learn the global vector from CLS and the mean patch; false uses CLS alone (DeMo's GLOBAL_LOCAL, "demo"
    network only)."""
    direct: bool = True
    """Use one classifier over all sensors; false uses one per sensor (DeMo's DIRECT, "demo" network only)."""
    fusion: Fusion = "sdtps"
    """Choose the fusion of the sensors: "sdtps", or "concat": the concatenated global vectors alone."""
    sparse_ratio: float = 0.5
    """Keep this fraction of the patches (SDTPS)."""
    aggr_ratio: float = 0.4
    """Merge the kept patches into this fraction of their number (Eq. 4)."""
    selection: SelectionKind = "published"
    """Choose what selects the patches: the "published" scores, or a "gate" (`seps.reid.network.gate`) that sees
    each patch before the encoder mixes them and learns from identities (`loss.gate`)."""
    select_at: SelectionPlace = "end"
    """Choose where the gate drops patches: at the "end", when they are merged, or before the "first" block of a
    plain ViT, which saves their computation."""
    beta: float = 0.25
    """Weight each guide in the score of a patch (Eq. 3)."""
    own_guide: float = 2.0
    """Weight the global vector of the sensor itself as a guide (published: 2); with 0 only the other sensors guide."""
    guides: GuideKind = "vector"
    """Choose how other sensors guide: by their "vector" against the patches of this sensor (published), or, for sensors
    that share one frame, by "position": their vector against their patch at the same place."""
    decision: DecisionKind = "topk"
    """Choose how the kept patches follow from the scores (`SlimmingConfig.decision`)."""
    temperature: float = 1.0
    """Set the temperature of the relaxation of the decision."""
    text: TextUse = "none"
    """Choose the effect of the text of a shot (`data.texts`): "none"; "guide" the selection of the patches of every
    sensor; "join": guide it and add a block to the feature. A shot without a text is compared by its sensors alone."""
    text_encoder: str = "mini"
    """Choose the frozen encoder of the texts: a preset, a hub id or a folder."""
    text_width: int = 384
    """Set the width of model.text_encoder."""
    text_guide: float = 1.0
    """Weight the text as a guide; each other sensor has weight 1."""
    missing: Missing = "leave-out"
    """Choose what replaces a missing sensor: a "zero" image (published), or "leave-out": it neither guides nor is
    guided, and distances use the sensors that both samples have."""

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
    """Weights of the losses."""

    identity: float = 0.25
    """Weight the label-smoothed cross-entropy of each branch."""
    triplet: float = 1.0
    """Weight the soft-margin batch-hard triplet loss of each branch."""
    triplet_space: TripletSpace = "unit"
    """Choose the space of the triplet loss: "raw" features (published), or features of "unit" length, as the cosine
    distances of the ranking use. In the raw space an encoder that is new to the task can shrink all features to a
    point, from which training does not recover."""
    sdtps: float = 1.0
    """Weight the SDTPS branch relative to the original branch."""
    label_smoothing: float = 0.1
    """Spread this fraction of the target evenly over all classes."""
    ratio: float = 2.0
    """Weight Eq. 7, which holds the number of kept patches near `sparse_ratio`. It acts only with the "binary"
    decision; other decisions keep a fixed number."""
    gate: float = 1.0
    """Weight the loss of the gate (`model.selection` "gate"). It trains only the gate."""
    shared: float = 0.0
    """Weight a triplet loss between single sensors, which brings all sensors into one space: for queries by one
    sensor and a gallery by another (`seps reid eval --any`); 0 is off."""
    text: float = 1.0
    """Weight the contrastive loss that brings each text near its shot (`model.text`)."""
    text_dropout: float = 0.0
    """Set the probability that a batch is trained without its texts, for shots that have none in use."""
    modality_dropout: float = 0.0
    """Set the probability that a batch is trained with some sensors missing, as `model.missing` defines."""

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
