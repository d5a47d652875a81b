"""The re-identification network: backbone -> global-local fusion -> SDTPS across sensors -> BNNeck.

Flow for one sample with M sensors::

    images (M, 3, H, W) -- backbone, projection --> patches (M, N, C), global vectors g (M, C)
      original branch:  g_1 .. g_M concatenated                                             (M C)
      SDTPS branch:     patches slimmed to Q + 1 tokens, guided by all g; mean, concatenated  (M C)
      A camera embedding is part of the features of both branches, and of nothing that decides which patches are kept.

Shapes: B samples, M modalities, H x W pixels, N patches, C width, Q merged patches, I identities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seps.encoders import VisionEncoder, ViT, freeze
from seps.method.checks import InputError
from seps.method.config import ConfigError
from seps.method.sensors import MultiModalSDTPS
from seps.reid.config import Missing, ReidModelConfig
from seps.reid.network.backbone import build_backbone
from seps.reid.network.gate import ALL_SENSORS, PatchGate, kept_tokens
from seps.reid.network.heads import GlobalLocal, Neck
from seps.reid.network.text import BLOCK, ShotTexts, TextHead, shot_vectors

Pattern = Literal[1, 2, 3]


@dataclass
class Encoded:
    """Each sensor by itself: patches (B, M, N, C) and global vectors (B, M, C).

    Which patches are kept follows from `patches` and `vectors`. Features are made from `feature_patches` and
    `feature_vectors`, which hold the camera embedding too, where there is one: added to both sides of a cosine it
    would change what is kept. With a gate, `early` (B, M, N, F) are the patches by themselves. Where it drops patches
    before the first block, D (B, M, N) says which, and the others hold the K kept ones alone.
    """

    patches: Tensor
    vectors: Tensor
    feature_patches: Tensor
    feature_vectors: Tensor
    early: Tensor | None = None
    keep: Tensor | None = None

    def _parts(self) -> tuple[Tensor, ...]:
        parts = (self.patches, self.vectors, self.feature_patches, self.feature_vectors, self.early, self.keep)
        return tuple(part for part in parts if part is not None)

    def replaced(self, other: Encoded, absent: Tensor) -> Encoded:
        """Where `absent` (B, M) is True, the sensors of `other`, which has the same cameras."""
        pairs = zip(self._parts(), other._parts(), strict=True)
        return Encoded(*(torch.where(absent[(...,) + (None,) * (a.ndim - 2)], b, a) for a, b in pairs))

    def rows(self, which: Tensor) -> Encoded:
        """The samples numbered `which`."""
        return Encoded(*(part[which] for part in self._parts()))


@dataclass
class Fused:
    """Both branches' features (B, M C), `sdtps` None without that branch; decisions D (B, M, N); what the gate saw.

    Where texts join the features, they have M + 1 blocks.
    """

    original: Tensor
    sdtps: Tensor | None
    keep: Tensor | None
    early: Tensor | None = field(default=None, kw_only=True)
    text: Tensor | None = field(default=None, kw_only=True)
    """With texts, their vectors (B, C) in the sensors' space, zeros where a shot has none."""
    shots: Tensor | None = field(default=None, kw_only=True)
    """With texts, what they are to be near to, (B, C)."""

    def pattern(self, number: Pattern) -> Tensor:
        """1: original (B, M C); 2: SDTPS (B, M C); 3: both (B, 2 M C)."""
        if number not in (1, 2, 3):
            raise InputError(f"return_pattern must be 1 (original), 2 (SDTPS) or 3 (both), but got {number!r}.")
        if number == 1:
            return self.original
        if self.sdtps is None:
            raise InputError(f"return_pattern {number} needs the SDTPS branch, but fusion is 'concat': use 1.")
        return self.sdtps if number == 2 else torch.cat([self.original, self.sdtps], dim=1)


class ReidModel(nn.Module):
    """Re-identification over two or more sensors.

    Training returns `(sdtps_score, sdtps_feat, ori_score, ori_feat)`: (B, I), (B, M C), (B, I), (B, M C); with
    `fusion="concat"` `(ori_score, ori_feat)`. Evaluation returns the features of a `return_pattern`. A variant is a
    subclass that makes other parts (`seps.reid.demo.model.DemoReidModel`).

    Missing sensors are told by `present` (B, M) bool. With `missing="zero"` their images become those whose
    normalised pixels are zero, as published. With "leave-out" they are not looked at: they guide nothing, their
    block of the feature is zero, and the others are scaled by sqrt(M / present sensors), which keeps norms alike.

    With `model.text` a shot's text guides the selection; with "join" it is one more block, (M + 1) C in place of M C.

    Args:
        config: see `ReidModelConfig`.
        modalities: names of the sensors, in the order of the images.
        identities: classes I of the classifiers.
        cameras: rows of the camera embedding.
        backbones: encoders to use instead of those `config` names, one, or one per modality.
    """

    selection: type[MultiModalSDTPS] = MultiModalSDTPS
    concatenated = False
    """Whether pattern 3 is compared as one vector; else by the mean of the branches' cosines."""

    def __init__(
        self,
        config: ReidModelConfig,
        modalities: Sequence[str],
        identities: int,
        cameras: int = 1,
        backbones: Sequence[VisionEncoder] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.modalities, self.identities = config, tuple(modalities), identities
        if len(self.modalities) < 2:
            raise ConfigError(f"Re-identification here needs two or more modalities, not {self.modalities}.")
        count = 1 if config.backbones == "shared" else len(self.modalities)
        made = list(backbones) if backbones is not None else [self.make_encoder() for _ in range(count)]
        if len(made) != count:
            raise ConfigError(f"{config.backbones} backbones are {count} encoders, but got {len(made)}.")
        self.backbones = nn.ModuleList(made)
        for backbone in made:
            if config.freeze_blocks:
                freeze(backbone, config.freeze_blocks)
        self.grid = made[0].grid_for(*config.image_size)
        self.projections = nn.ModuleList(self.make_projection(backbone) for backbone in made)
        self.global_local = nn.ModuleList(self.make_global_vector() for _ in self.modalities)
        self.camera_embedding = self.make_cameras(made[0], cameras) if config.camera_embedding else None
        self.sdtps = self._sdtps() if config.fusion == "sdtps" else None
        self.sdtps_neck = Neck(self.total_width, identities) if config.fusion == "sdtps" else None
        self.original_neck = self.make_original_neck()
        # Drawn last: with a gate or without, everything else starts from the same weights.
        self.patch_gate = self._gate(made[0]) if config.selection == "gate" else None
        self.text_head = TextHead(config.text_width, config.width) if config.text != "none" else None

    def _gate(self, backbone: VisionEncoder) -> PatchGate:
        if backbone.early_width is None:
            raise ConfigError(
                f"model.selection = 'gate', but the encoder {self.config.encoder!r} has no features of patches by "
                "themselves: use 'mini' or a vision transformer, or set it to 'published'."
            )
        if self.config.select_at == "first" and not isinstance(backbone, ViT):
            raise ConfigError(
                f"model.select_at = 'first' needs a plain ViT, which the encoder {self.config.encoder!r} is not here: "
                "set model.encoder to a file of its weights, or model.network to 'demo' (CLIP)."
            )
        return PatchGate(len(self.modalities), self.num_patches, backbone.early_width, self.identities)

    def make_encoder(self) -> VisionEncoder:
        """An encoder as the settings name it."""
        config = self.config
        return build_backbone(config.encoder, config.image_size, config.stride, pretrained=config.pretrained)

    def make_projection(self, backbone: VisionEncoder) -> nn.Module:
        """From the encoder's width to C."""
        return nn.Linear(backbone.width, self.config.width)

    def make_global_vector(self) -> nn.Module:
        """From CLS and the mean patch, (B, C) both, to a sensor's global vector (B, C)."""
        return GlobalLocal(self.config.width)

    def make_cameras(self, backbone: VisionEncoder, cameras: int) -> nn.Embedding:
        """The camera embedding."""
        made = nn.Embedding(cameras, self.config.width)
        nn.init.trunc_normal_(made.weight, std=0.02)
        return made

    def make_original_neck(self) -> nn.Module:
        """The classifier, or classifiers, of the original feature."""
        return Neck(self.total_width, self.identities)

    def _sdtps(self) -> MultiModalSDTPS:
        config = self.config
        merged = int(self.num_patches * config.aggr_ratio * config.sparse_ratio)
        if merged < 1:
            raise ConfigError(
                f"{self.num_patches} patches x aggr_ratio {config.aggr_ratio} x sparse_ratio {config.sparse_ratio} "
                "leave no merged token: use larger images, a smaller stride or larger ratios."
            )
        return self.selection(
            config.width,
            self.num_patches,
            config.sparse_ratio,
            config.aggr_ratio,
            gumbel_tau=config.temperature,
            beta=config.beta,
            # Attribute names of a module: a modality may be called anything.
            modalities=[f"sensor{number}" for number in range(len(self.modalities))],
            decision=config.decision,
            own_guide=config.own_guide,
            guides=config.guides,
            # Behind a gate that drops patches before the first block, only the kept ones are left.
            check_num_patches=config.select_at == "end",
            further_guide=config.text_guide,
        )

    @property
    def blocks(self) -> tuple[str, ...]:
        """Of what the feature has a block each: the sensors, and the text where it joins them."""
        return (*self.modalities, BLOCK) if self.config.text == "join" else self.modalities

    @property
    def total_width(self) -> int:
        """M C, or (M + 1) C, the width of a branch's feature."""
        return self.config.width * len(self.blocks)

    @property
    def num_patches(self) -> int:
        """N of each modality."""
        return self.grid[0] * self.grid[1]

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The return patterns this model has."""
        return (1,) if self.sdtps is None else (1, 2, 3)

    def encode(self, images: Tensor, cameras: Tensor | None = None) -> Encoded:
        """Images (B, M, 3, H, W) in [0, 1], cameras (B,) -> each sensor's patches and global vector."""
        count = len(self.modalities)
        if images.ndim != 5 or images.shape[1] != count:
            raise InputError(
                f"images must be (samples, {count} modalities, 3, height, width) for {self.modalities}, but got "
                f"{tuple(images.shape)}."
            )
        if self.camera_embedding is None:
            return self.encode_sensors(images, None)
        return self.encode_sensors(images, self.camera_embedding(self._checked_cameras(cameras, images.shape[0])))

    def encode_sensors(self, images: Tensor, camera: Tensor | None) -> Encoded:
        """Images (B, M, 3, H, W) and their cameras' vectors, which become part of the features alone."""
        first, patches, *seen = self._tokens(images)
        means = patches.float().mean(dim=2)
        vectors = self._global_vectors(first, means)
        if camera is None:
            return Encoded(patches, vectors, patches, vectors, *seen)
        with_camera = self._global_vectors(first + camera[:, None], means + camera[:, None])
        return Encoded(patches, vectors, patches + camera[:, None, None], with_camera, *seen)

    def _tokens(self, images: Tensor, added: Tensor | None = None) -> list[Tensor]:
        """Of all sensors: first (B, M, C), patches (B, M, N, C), and with a gate what `_sensor_tokens` adds."""
        count = len(self.modalities)
        if len(self.backbones) == 1:
            repeated = None if added is None else added.repeat_interleave(count, dim=0)
            parts = self._sensor_tokens(0, images.flatten(0, 1), repeated)
            return [part.reshape(-1, count, *part.shape[1:]) for part in parts]
        each = [self._sensor_tokens(number, images[:, number], added) for number in range(count)]
        return [torch.stack(column, dim=1) for column in zip(*each, strict=True)]

    def _global_vectors(self, first: Tensor, means: Tensor) -> Tensor:
        """CLS and mean patch of each sensor, (B, M, C) both, fused: (B, M, C)."""
        return torch.stack([fuse(first[:, i], means[:, i]) for i, fuse in enumerate(self.global_local)], dim=1)

    def _checked_cameras(self, cameras: Tensor | None, samples: int) -> Tensor:
        if cameras is None:
            raise InputError("this model has a camera embedding: give the camera index of every sample.")
        if cameras.shape != (samples,) or cameras.is_floating_point() or cameras.dtype == torch.bool:
            raise InputError(
                f"cameras must hold {samples} whole numbers, one per sample, but got {tuple(cameras.shape)} of "
                f"{cameras.dtype}."
            )
        # Values on a GPU are not looked at: that would make it wait in every step.
        known: int = self.camera_embedding.num_embeddings if self.camera_embedding is not None else 0
        if torch.onnx.is_in_onnx_export():
            return cameras
        if cameras.device.type == "cpu" and samples and not 0 <= int(cameras.min()) <= int(cameras.max()) < known:
            raise InputError(
                f"cameras holds indices from {int(cameras.min())} to {int(cameras.max())}, but the model was built for "
                f"{known} cameras, 0 to {known - 1}."
            )
        return cameras

    def _sensor_tokens(self, number: int, pixels: Tensor, added: Tensor | None = None) -> tuple[Tensor, ...]:
        """CLS, or the largest over the patches, (B, C), and the patches (B, N, C), projected; `added` is put to CLS.

        With a gate also the patches by themselves (B, N, F), and, where it drops before the first block, D (B, N).
        """
        backbone: Any = self.backbones[number]
        inputs = (pixels,) if added is None else (pixels, added)
        if self.patch_gate is None:
            found, *seen = (backbone(*inputs),)
        elif self.config.select_at == "end":
            found, *seen = backbone.forward_with_early(*inputs)
        else:
            sensors = ALL_SENSORS if len(self.backbones) == 1 else slice(number, number + 1)
            found, *seen = kept_tokens(self.patch_gate, backbone, sensors, self.config.sparse_ratio, *inputs)
        tokens = self.projections[number](found)
        prefix = int(backbone.num_prefix_tokens)
        patches = tokens[:, prefix:]
        return (tokens[:, 0] if prefix else patches.amax(dim=1)), patches, *seen

    def blank(self, images: Tensor) -> Tensor:
        """Images like `images` whose normalised pixels are zero: what the published systems feed for a sensor."""
        means = [backbone.mean for backbone in self.backbones]
        blank = torch.stack([mean.expand(1, 3, 1, 1) for mean in means], dim=1)  # type: ignore[operator]
        return blank.to(images).expand_as(images)

    def fuse(self, encoded: Encoded, present: Tensor | None = None, texts: ShotTexts | None = None) -> Fused:
        """Both branches; `present` (B, M) bool leaves sensors out: they guide nothing and their block is zero.

        `texts` are those of the same shots; None, as for a shot without one, leaves them out in the same way.
        """
        original, sdtps, keep = encoded.feature_vectors, None, None
        text = self.text_head(texts) if self.text_head is not None and texts is not None else None
        further = (text, texts.present) if text is not None and texts is not None else None
        if self.sdtps is not None:
            names = self.sdtps.modalities
            patches = dict(zip(names, encoded.patches.unbind(1), strict=True))
            vectors = dict(zip(names, encoded.vectors.unbind(1), strict=True))
            there = None if present is None else dict(zip(names, present.unbind(1), strict=True))
            merged = dict(zip(names, encoded.feature_patches.unbind(1), strict=True))
            masks: Sequence[Tensor | None] = [None] * len(names)
            if self.patch_gate is not None and encoded.early is not None:
                keep = encoded.keep
                if keep is None:
                    keep = self.patch_gate.keep(encoded.early, self.config.sparse_ratio)
                    masks = keep.unbind(1)
                else:
                    # Of patches that were dropped before the first block nothing is left to merge.
                    masks = torch.ones_like(encoded.patches[..., 0], dtype=keep.dtype).unbind(1)
            slimmed = [
                self.sdtps.slim(name, patches, vectors, there, merged[name], mask, further)
                for name, mask in zip(names, masks, strict=True)
            ]
            slim = [tokens for tokens, _ in slimmed]
            keep = torch.stack([mask for _, mask in slimmed], dim=1) if keep is None else keep
            sdtps = torch.stack([tokens.float().mean(dim=1) for tokens in slim], dim=1)
        shots = None if text is None else shot_vectors(encoded.vectors, present)
        if self.text_head is not None and self.config.text == "join":
            original = self.text_head.joined(original, text, present)
            sdtps = None if sdtps is None else self.text_head.joined(sdtps, text, present)
            present = self._with_text(present, original, texts)
        if present is not None:
            scale = self._scale(present).to(original.dtype)
            # Selected, not multiplied: whatever stands in an absent block, NaN included, must not pass.
            original = torch.where(present[:, :, None], original, 0.0) * scale
            sdtps = None if sdtps is None else torch.where(present[:, :, None], sdtps, 0.0) * scale
        flat = None if sdtps is None else sdtps.flatten(1).float()
        return Fused(original.flatten(1).float(), flat, keep, early=encoded.early, text=text, shots=shots)

    def _with_text(self, present: Tensor | None, blocks: Tensor, texts: ShotTexts | None) -> Tensor:
        """Which blocks (B, M + 1) of the feature a shot has."""
        there = torch.ones_like(blocks[:, :-1, 0], dtype=torch.bool) if present is None else present
        told = torch.zeros_like(there[:, 0]) if texts is None else texts.present
        self._scale(there)  # a text alone is no sample
        return torch.cat([there, told[:, None]], dim=1)

    def _scale(self, present: Tensor) -> Tensor:
        counts = present.sum(dim=1)
        if bool((counts == 0).any()):
            raise InputError("every sample must have at least one sensor.")
        return (present.shape[1] / counts).sqrt()[:, None, None]

    def embed(
        self,
        images: Tensor,
        cameras: Tensor | None = None,
        present: Tensor | None = None,
        missing: Missing | None = None,
        texts: ShotTexts | None = None,
    ) -> Fused:
        """Features of images (B, M, 3, H, W); absent sensors as `missing` (default: the configuration) says.

        `texts` are those of the same shots, for a model that reads them.
        """
        if present is not None and (present.dtype != torch.bool or present.shape != images.shape[:2]):
            raise InputError(
                f"present must be {tuple(images.shape[:2])} of torch.bool, a value for each sample and sensor, but got "
                f"{tuple(present.shape)} of {present.dtype}."
            )
        if present is None or bool(present.all()):
            return self.fuse(self._observed(self.encode(images, cameras), None), texts=texts)
        # Whatever is stored in an absent sensor's pixels is replaced, so that it can have no influence.
        shown = torch.where(present[:, :, None, None, None], images, self.blank(images))
        encoded = self._observed(self.encode(shown, cameras), present)
        return self.fuse(encoded, present if (missing or self.config.missing) == "leave-out" else None, texts)

    def _observed(self, encoded: Encoded, present: Tensor | None) -> Encoded:
        """`encoded`; in training the gate first takes its patches into the statistics that it standardises by."""
        if self.training and self.patch_gate is not None and encoded.early is not None:
            self.patch_gate.standardise.observe(encoded.early, present)
        return encoded

    def classify(self, fused: Fused) -> tuple[Tensor, ...]:
        """`(sdtps_score, ori_score)`, each (B, I), or `(ori_score,)`; a subclass may have several of the original."""
        found = self.original_neck(fused.original)
        scores: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
        if self.sdtps_neck is None or fused.sdtps is None:
            return scores
        return (self.sdtps_neck(fused.sdtps), *scores)

    def forward(
        self,
        images: Tensor,
        cameras: Tensor | None = None,
        present: Tensor | None = None,
        return_pattern: Pattern | None = None,
        texts: ShotTexts | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Scores and features in training, features (B, M C or 2 M C) in evaluation; see the class."""
        fused = self.embed(images, cameras, present, texts=texts)
        if not self.training:
            return fused.pattern(return_pattern or self.patterns[-1])
        scores = self.classify(fused)
        features = list(self.original_features(fused.original))
        if fused.sdtps is not None:
            features.insert(0, fused.sdtps)
        return tuple(part for pair in zip(scores, features, strict=True) for part in pair)

    def original_features(self, original: Tensor) -> tuple[Tensor, ...]:
        """What each score of the original branch is made of: here the whole feature (B, M C)."""
        return (original,)


def missing_cases(modalities: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of sensors that can be left, the full one first, then by number: 7 for three sensors."""
    names = tuple(modalities)
    return [case for size in range(len(names), 0, -1) for case in combinations(names, size)]
