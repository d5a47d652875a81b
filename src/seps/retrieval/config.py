"""Settings of a retrieval model and of its training: the only place their defaults live.

Nothing here imports torch, so that a command line knows its choices at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from os import PathLike
from typing import Any, Literal, get_args

from seps.images.sizes import stored_size
from seps.method.config import ConfigError, LossConfig, SlimmingConfig, require, require_choice, require_idea
from seps.parsing import is_number, is_whole
from seps.registry import BUILT_IN
from seps.training.config import TrainConfig


def _within(value: object, most: float) -> bool:
    """Whether `value` is a finite number (no bool) from 0 to `most`."""
    return is_number(value) and math.isfinite(value) and 0 <= value <= most


def _require_below_1(name: str, value: float) -> None:
    require(_within(value, 1) and value < 1, f"{name} is {value!r}; give 0 to below 1.")


def _require_whole(name: str, value: object, low: int) -> None:
    require(is_whole(value, low), f"{name} is {value!r}; give a whole number of at least {low}.")


def _size(name: str, value: Sequence[int]) -> tuple[int, int]:
    """(height, width). Raises ConfigError for anything but two whole numbers above 0."""
    good = isinstance(value, (list, tuple)) and len(value) == 2 and all(type(side) is int for side in value)
    require(good and min(value) >= 1, f"{name} is {value!r}; give height and width in pixels, each at least 1.")
    return value[0], value[1]


def is_language(code: object) -> bool:
    """Whether a value looks like a code of ISO 639."""
    return isinstance(code, str) and len(code) in (2, 3) and code.isascii() and code.isalpha() and code.islower()


HeadKind = Literal["slimming", "maxsim", "mean", "scan-t2i", "scan-i2t", "scan", "description"]
HEAD_OPTIONS = {"maxsim": ("dense", "pooled")}
"""By built-in head other than "slimming" the options of `SlimmingConfig` that it reads."""
SlimmingPreset = Literal["default", "paper", "open_source"]
TextSampling = Literal["own", "mixed"]
Pairing = Literal["image", "published"]
Protocol = Literal["none", "image", "published"]
"""Who may see descriptions in an evaluation; `seps.retrieval.evaluate.protocol` says what each means."""
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
DEFAULT_MODEL = "base"
"""The embedded model that searches and is evaluated where none is named; "mini" is the faster and weaker one."""
StoredPrecision = Literal["float32", "float16", "int4", "int2"]
"""Of packed matrices in a store."""


@dataclass(frozen=True)
class PatchSize:
    """What a store keeps of the patches of a picture and of the words of its description."""

    precision: StoredPrecision
    patches: int | None = None
    """How many, those that matter most before any caption is known; None: all."""
    means: int | None = None
    """No patches, but means over a grid of at most this many cells, down and across."""
    words: int | None = None
    """Of a description, merged; None: all."""


VECTOR = "vector"
"""The size that keeps one vector per picture."""
SIZES = {
    "tiny": PatchSize("int2", means=2, words=5),
    "small": PatchSize("int4", means=4, words=16),
    "patches": PatchSize("float16", patches=64),
    "full": PatchSize("float16"),
}
"""By name, the smallest first; at width 384 `tiny` takes 2 KB and `small` 8 KB: see docs/search-figures.md."""
DEFAULT_SIZE = "patches"
"""The size of a new store, where nothing names another.

Measured by `python -m benchmarks.quality.sizes --data FILE.jsonl`, a paired bootstrap over the photos of dev and
dev-llava (docs/search-figures.md). `vector` and `tiny` lose where pictures have descriptions. `small` loses nothing
measurable with pictures of 280 px, but an explanation needs the picture's file, and encodes it again. Heads without a
network of ours, and networks with another `forward`, keep `full`.
"""


@dataclass(frozen=True)
class ModelConfig:
    """What a retrieval model is made of."""

    vision: str = "mini"
    """Choose the vision encoder by preset name, hub id or folder; see `seps.encoders`."""
    text: str = "mini"
    """Choose the text encoder by preset name, hub id or folder; see `seps.encoders`."""
    image_size: tuple[int, int] | None = None
    """Resize images to this (height, width) in pixels; null takes the encoder's default."""
    embed_size: int = 384
    """Set the width of the joint space of images and texts."""
    head: HeadKind | str = "slimming"
    """Choose how images and captions are scored. "slimming": the method. "maxsim": the best patch of every word.
    "mean", "scan-t2i", "scan-i2t", "scan", "description": baselines. Another name: a registered head
    (`seps.register_head`)."""
    preset: SlimmingPreset = "default"
    """Choose the options of the slimming head: "default", "paper" or "open_source"."""
    slimming: Mapping[str, Any] = field(default_factory=dict)
    """Override options of `SlimmingConfig` in the preset (head="slimming"; "maxsim" reads dense and pooled)."""
    max_words: int = 48
    """Cut captions to this number of tokens."""
    max_dense_words: int = 200
    """Cut descriptions to this number of tokens."""
    dropout: float = 0.1
    """Set the dropout probability on patches before their projection, in training. The dropout of the encoders is
    separate (BERT: 0.1)."""
    prune: Mapping[str, Any] = field(default_factory=dict)
    """Let patches skip the later blocks of a plain vision transformer: `{"keep": 0.5, "blocks": [3], "kind":
    "attention"}` (`seps.encoders.PruneConfig`); empty prunes none."""
    drop_path: float = 0.0
    """Set the probability that an image skips the last block of a plain vision transformer, in training; earlier
    blocks have a lower one."""
    special_tokens: bool = True
    """Treat [CLS], [SEP] and similar tokens as words: they are aligned and are part of the mean."""
    short_queries: bool = False
    """Use a separate projection for queries of one or two words (articles and similar words do not count)."""
    languages: tuple[str, ...] = ()
    """State the languages that the model reads, as ISO 639 codes such as "en"; empty states none."""

    def __post_init__(self) -> None:
        for name in ("vision", "text"):
            value = getattr(self, name)
            require(isinstance(value, str | PathLike), f"{name} is {value!r}; give the name or folder of an encoder.")
        for name in ("prune", "slimming"):
            value = getattr(self, name)
            require(isinstance(value, Mapping), f"{name} is {value!r}; give settings by name.")
        require_idea("head", "head", self.head)
        require_choice("preset", self.preset, SlimmingPreset)
        for name, low in (("embed_size", 4), ("max_words", 1), ("max_dense_words", 1)):
            _require_whole(name, getattr(self, name), low)
        _require_below_1("dropout", self.dropout)
        _require_below_1("drop_path", self.drop_path)
        named = isinstance(self.languages, list | tuple) and all(map(is_language, self.languages))
        require(named, f"languages is {self.languages!r}; give ISO 639 codes in a list, like ['en'].")
        object.__setattr__(self, "languages", tuple(self.languages))
        if self.image_size is not None:
            object.__setattr__(self, "image_size", _size("image_size", self.image_size))
        read = HEAD_OPTIONS.get(str(self.head), ())
        unread = {name: value for name, value in self.slimming.items() if name not in read}
        only = f" It reads {' and '.join(read)} alone." if read else ""
        require(
            self.head == "slimming" or self.head not in BUILT_IN["head"] or not unread,
            f"slimming={unread} has no effect with head={self.head!r}; leave it out.{only}",
        )
        self._check_slimming()

    def _check_slimming(self) -> None:
        known = [option.name for option in fields(SlimmingConfig)]
        for name in self.slimming:
            near = get_close_matches(str(name), known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; choose from {', '.join(known)}."
            require(name in known, f"model.slimming names {name!r}, which SlimmingConfig does not have{meant}")

    def slimming_config(self, num_patches: int, num_prefix_tokens: int) -> SlimmingConfig:
        """The head's configuration for an encoder with that many patches and prefix tokens."""
        made = {"default": SlimmingConfig.default, "paper": SlimmingConfig.paper}.get(
            self.preset, SlimmingConfig.open_source
        )
        sizes = {"embed_size": self.embed_size, "num_patches": num_patches, "num_prefix_tokens": num_prefix_tokens}
        try:
            return made(**{**sizes, **self.slimming})
        except TypeError as error:
            raise ConfigError(f"slimming={dict(self.slimming)} has a value of the wrong type ({error}).") from error


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    train: str = ""
    """Read the training images from this JSONL file, or from a split: `FOLDER:SPLIT[:NAME]` of the published
    layout, or `FILE.json:SPLIT`."""
    dev: tuple[str, ...] | str = ()
    """Choose checkpoints on these data sets, by the mean of their scores."""
    images_root: str | None = None
    """Start the image paths of a JSONL data set from this folder; null takes the folder of the JSONL file."""
    dense: tuple[str, ...] | str = ()
    """Add descriptions from these files of `seps caption`, by the id or the content of each image."""
    strict: bool = False
    """Stop at the first unreadable image or other fault instead of skipping it."""
    texts: TextSampling = "own"
    """Choose the queries. "own": a caption, with the description of its image. "mixed": where the description
    consists of further human captions, any of them can be the query and others the description; never the query
    itself."""
    caption_noise: float = 0.0
    """Mask, replace or drop this fraction of the words of a caption (published: 0.2)."""
    crop_scale: tuple[float, float] = (0.5, 1.0)
    """Crop training images to a random fraction of their area in this range (lowest, highest)."""
    jitter: float = 0.2
    """Set the strength of the colour augmentation, from 0 (off) to below 1."""
    decode_size: tuple[int, int] | None = None
    """Decode training photos to this (height, width) in pixels; null takes 8/7 of the model's size."""
    memory: int = 2048
    """Keep at most this many MiB of decoded photos per process, over all data sets. Other photos are read from
    their files in each epoch; the batches are the same."""

    def __post_init__(self) -> None:
        require_choice("texts", self.texts, TextSampling)
        require(0 <= self.caption_noise <= 1, f"caption_noise is {self.caption_noise!r}; it must lie in [0, 1].")
        for name in ("dev", "dense"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "crop_scale", tuple(self.crop_scale))
        good = len(self.crop_scale) == 2 and all(_within(part, 1) for part in self.crop_scale)
        require(
            good and 0 < self.crop_scale[0] <= self.crop_scale[1],
            f"crop_scale is {self.crop_scale!r}; give two parts of the picture's area, above 0, at most 1 and rising.",
        )
        _require_below_1("jitter", self.jitter)
        if self.decode_size is not None:
            object.__setattr__(self, "decode_size", _size("decode_size", self.decode_size))
        _require_whole("memory", self.memory, 0)

    def size_to_decode(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """The size at which images are kept, for a model that takes `image_size`; crops then keep their detail."""
        return self.decode_size or stored_size(image_size)


@dataclass(frozen=True)
class PartWeights:
    """Weights of the alignment loss on each part of the score, so that neither branch starves the other."""

    fused: float = 1.0
    """Weight the alignment loss on the whole score."""
    pixels: float = 0.0
    """Weight the alignment loss on the score of the pixels."""
    description: float = 0.0
    """Weight the alignment loss on the score of the description."""
    distill: float = 0.0
    """Weight the loss by which the pixels learn the similarities of the description within a batch."""

    def __post_init__(self) -> None:
        require(
            not self.distill or (self.pixels > 0 and self.description > 0),
            f"parts.distill is {self.distill!r}: it takes a weight of pixels and of description above 0.",
        )
        for name in ("fused", "pixels", "description", "distill"):
            value = getattr(self, name)
            require(_within(value, math.inf), f"parts.{name} is {value!r}; give a finite number, 0 or more.")
        require(self.fused + self.pixels + self.description > 0, "parts: all weights are 0; nothing would train.")


@dataclass(frozen=True)
class TypedConfig:
    """Training of the text side alone, for words and phrases that people type; the pictures' vectors stay."""

    queries: str = ""
    """Train the text side on this JSONL file of typed queries, or "captions": queries made from the captions by
    rules; empty: an ordinary run."""
    batch_size: int = 96
    """Set the number of queries per step; train.batch_size is the number of captions."""
    weight: float = 1.0
    """Weight the loss of typed queries against all training images."""
    captions: float = 0.0
    """Weight the loss of captions against all training images."""
    keep: float = 10.0
    """Weight the loss that keeps the words of captions and descriptions as they are."""
    short: bool = False
    """Train only a projection of short queries; sentences and descriptions do not change."""
    phrases: float = 0.5
    """Draw phrases this often, relative to single words."""
    temperature: float = 0.03
    """Set the temperature of the losses of queries and captions, whose scores are cosines."""

    def __post_init__(self) -> None:
        require(isinstance(self.queries, str), f'typed.queries is {self.queries!r}; give a file, or "captions".')
        _require_whole("typed.batch_size", self.batch_size, 1)
        require(isinstance(self.short, bool), f"typed.short is {self.short!r}; give true or false.")
        require(
            not self.short or bool(self.queries), 'typed.short belongs to typed.queries: give a file, or "captions".'
        )
        for name in ("weight", "captions", "keep", "phrases", "temperature"):
            value = getattr(self, name)
            good = _within(value, math.inf) and (value > 0 or name in ("captions", "keep"))
            require(good, f"typed.{name} is {value!r}; give a finite number above 0.")


@dataclass(frozen=True)
class RunConfig:
    """One training run of a retrieval model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parts: PartWeights = field(default_factory=PartWeights)
    typed: TypedConfig = field(default_factory=TypedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    start: str = ""
    """Start from the weights of this model: "base", "mini", a folder or a hub id; empty takes the encoders' weights."""
    pairing: Pairing = "image"
    """Choose the description of a training pair: that of its "image", or, to reproduce the published systems,
    "published": that of its caption."""
    warmup_epochs_sum: int = 0
    """Use the sum of violations in the first epochs, then the hardest negative (triplet loss; published: 1)."""
    freeze_vision: int | bool | None = None
    """Freeze the first blocks of the vision encoder and its embedding: a number of blocks; -1 (or true) freezes all."""
    freeze_text: int | None = None
    """Freeze the first blocks of the text encoder and its embedding: a number of blocks; -1 freezes all."""
    text_lr_scale: float = 1.0
    """Multiply the learning rate of the text encoder, relative to that of the vision encoder."""
    vision_lr: float | None = None
    """Set the learning rate of the vision encoder; null: train.learning_rate times train.backbone_lr_scale."""
    text_lr: float | None = None
    """Set the learning rate of the text encoder; null: train.learning_rate times train.backbone_lr_scale times
    text_lr_scale."""
    layer_decay: float = 1.0
    """Multiply the learning rate from each encoder block to the block before it; 1 gives all blocks the same rate."""
    distill_softness: float = 2.0
    """Flatten the description's softmax by this factor before the pixels learn it (parts.distill)."""
    choose_trust: bool = False
    """Choose the weight of the description on dev after training instead of keeping the learned one."""

    def __post_init__(self) -> None:
        for name in ("freeze_vision", "freeze_text"):
            value = getattr(self, name)
            if isinstance(value, bool):
                object.__setattr__(self, name, -1 if value else None)
            elif value is not None:
                _require_whole(name, value, -1)
        _require_whole("warmup_epochs_sum", self.warmup_epochs_sum, 0)
        require(
            not self.typed.queries or bool(self.start),
            "typed.queries trains the text side of a trained model: name it as start, like start='base'.",
        )
        require(
            _within(self.text_lr_scale, math.inf),
            f"text_lr_scale is {self.text_lr_scale!r}; give a finite number, 0 or more.",
        )
        for name in ("vision_lr", "text_lr"):
            value = getattr(self, name)
            require(value is None or _within(value, 1), f"{name} is {value!r}; give a rate from 0 to 1, or null.")
        for name in ("layer_decay", "distill_softness"):
            value = getattr(self, name)
            most = 1.0 if name == "layer_decay" else math.inf
            require(_within(value, most) and value > 0, f"{name} is {value!r}; give a number above 0, at most {most}.")
        require(
            not self.parts.distill or self.loss.kind == "infonce",
            f"parts.distill belongs to loss.kind='infonce', not {self.loss.kind!r}; set it to 0.",
        )
        require_choice("pairing", self.pairing, Pairing)
        require(
            self.pairing == "image" or (self.model.head == "slimming" and self.parts.fused > 0),
            "pairing='published' belongs to head='slimming' and the loss on the whole score (parts.fused).",
        )
