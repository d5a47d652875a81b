"""Parts of the network as DeMo has them, where ours differ on purpose (`modeling/make_model.py` of its code).

Shapes: B samples, M modalities, C width, I identities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
