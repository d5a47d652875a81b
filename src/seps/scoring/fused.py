"""Drives the fused kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from seps.nn.slimming import ImageSide, PatchSlimming
from seps.scoring.engine import BlockScorer


def supports(
    net: PatchSlimming,
    device: torch.device,
    *,
    paired: bool = False,
    masked: bool = False,
    dtype: torch.dtype = torch.float16,
    patches: int | None = None,
) -> str | None:
    """Why the fused kernels cannot score this, or None when they can."""
    return "later"


def scorer(net: PatchSlimming, dtype: torch.dtype) -> Callable[[ImageSide], BlockScorer]:
    """Makes scorers of blocks of texts from images."""
    raise NotImplementedError
