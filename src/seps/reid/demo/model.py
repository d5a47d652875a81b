"""DeMo's network with SDTPS in the place of its fusion experts (`modeling/make_model.py` of its code).

Shapes: B samples, M modalities, C width, I identities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seps.encoders import VisionEncoder, ViT
from seps.encoders.vision import HALF
from seps.method.config import ConfigError
from seps.reid.config import ReidModelConfig
from seps.reid.network.backbone import plain_backbone
from seps.reid.network.heads import Neck
from seps.reid.network.model import Encoded, ReidModel


class PublishedGlobalLocal(nn.Module):
    """The global vector `QuickGELU(Linear(LayerNorm([CLS, mean])))`, (B, C) and (B, C) -> (B, C); GLOBAL_LOCAL."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * width)
        self.linear = nn.Linear(2 * width, width)

    def forward(self, first: Tensor, mean: Tensor) -> Tensor:
        inner: Tensor = self.linear(self.norm(torch.cat([first, mean], dim=-1)))
        return inner * torch.sigmoid(1.702 * inner)


class FirstToken(nn.Module):
    """The global vector is CLS: no GLOBAL_LOCAL."""

    def forward(self, first: Tensor, mean: Tensor) -> Tensor:
        return first


class SensorNecks(nn.Module):
    """A neck per sensor on its block of the feature (DIRECT 0)."""

    def __init__(self, necks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.necks = nn.ModuleList(necks)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """(B, M C) -> M scores (B, I)."""
        blocks = features.chunk(len(self.necks), dim=1)
        return tuple(neck(block) for neck, block in zip(self.necks, blocks, strict=True))


class DemoReidModel(ReidModel):
    """`ReidModel` with DeMo's parts, for `model.network` "demo".

    Modifications: a plain ViT with CLIP's trained projection on all tokens; pixels normalised by 0.5; the camera
    embedding added to CLS before the first norm; the global vector is the learned term alone (`global_local`), or CLS;
    one classifier, or one per sensor with losses of its own (`direct` false); pattern 3 compared as one vector.
    """

    concatenated = True

    def __init__(
        self,
        config: ReidModelConfig,
        modalities: Sequence[str],
        identities: int,
        cameras: int = 1,
        backbones: Sequence[VisionEncoder] | None = None,
    ) -> None:
        super().__init__(config, modalities, identities, cameras, backbones)
        for backbone in self.backbones:
            backbone.set_normalisation(*HALF)  # type: ignore[operator]

    def make_encoder(self) -> VisionEncoder:
        config = self.config
        return plain_backbone(config.encoder, config.image_size, config.stride, pretrained=config.pretrained)

    def make_projection(self, backbone: VisionEncoder) -> nn.Module:
        if backbone.width != self.config.width:
            raise ConfigError(
                f"model.network = 'demo' takes the tokens of {self.config.encoder!r} as they are, {backbone.width} "
                f"numbers each, but model.width = {self.config.width}: set model.width to {backbone.width}."
            )
        return nn.Identity()

    def make_global_vector(self) -> nn.Module:
        return PublishedGlobalLocal(self.config.width) if self.config.global_local else FirstToken()

    def make_cameras(self, backbone: VisionEncoder, cameras: int) -> nn.Embedding:
        if not isinstance(backbone, ViT) or not backbone.config.prefix:
            raise ConfigError("DeMo's camera embedding needs a plain ViT with a CLS token: choose another encoder.")
        made = nn.Embedding(cameras, backbone.config.width)
        # DeMo's scale: as good as zero, so that an untrained one changes nothing.
        nn.init.trunc_normal_(made.weight, std=1e-6)
        return made

    def make_original_neck(self) -> nn.Module:
        if self.config.direct:
            return super().make_original_neck()
        return SensorNecks([Neck(self.config.width, self.identities) for _ in self.modalities])

    def encode_sensors(self, images: Tensor, camera: Tensor | None) -> Encoded:
        """As `ReidModel`, but the camera is part of everything, also of what decides which patches are kept."""
        first, patches, *seen = self._tokens(images, camera)
        vectors = self._global_vectors(first, patches.float().mean(dim=2))
        return Encoded(patches, vectors, patches, vectors, *seen)

    def original_features(self, original: Tensor) -> tuple[Tensor, ...]:
        """The whole feature, or, `direct` false, a block (B, C) per sensor."""
        return (original,) if self.config.direct else original.chunk(len(self.modalities), dim=1)
