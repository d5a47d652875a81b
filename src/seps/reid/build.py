"""The network that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

from seps.encoders import VisionEncoder
from seps.reid.config import ReidModelConfig
from seps.reid.demo.model import DemoReidModel
from seps.reid.network.model import ReidModel


def build_model(
    config: ReidModelConfig,
    modalities: Sequence[str],
    identities: int,
    cameras: int = 1,
    backbones: Sequence[VisionEncoder] | None = None,
) -> ReidModel:
    """`ReidModel`, or `DemoReidModel` with `model.network` "demo"; the arguments are theirs."""
    kind = DemoReidModel if config.network == "demo" else ReidModel
    return kind(config, modalities, identities, cameras, backbones)
