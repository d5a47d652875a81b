"""The global vector of a sensor, and the neck with its classifier.

Shapes: B samples, M modalities, C width, I identities.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GlobalLocal(nn.Module):
    """The global vector: CLS fused with the mean patch, (B, C) and (B, C) -> (B, C).

    Encoders without CLS give the maximum over their patches in its place. The fusion is
    `(a + b) / 2 + GELU(Linear(LayerNorm([a, b])))`, the second term zero at the start. The published one has
    that term alone, which takes the vector out of the space of the patches: their cosines, which guide the
    selection and carry no gradient, would then begin as chance and nothing would ever align them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * width)
        self.linear = nn.Linear(2 * width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, first: Tensor, mean: Tensor) -> Tensor:
        fused: Tensor = self.linear(self.norm(torch.cat([first, mean], dim=-1)))
        return (first + mean) / 2 + nn.functional.gelu(fused)


class Neck(nn.Module):
    """BNNeck (Luo 2019): batch norm without bias, then a linear classifier without bias."""

    def __init__(self, width: int, identities: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.norm.bias.requires_grad_(False)
        self.classifier = nn.Linear(width, identities, bias=False)
        nn.init.normal_(self.classifier.weight, std=0.001)

    def forward(self, features: Tensor) -> Tensor:
        """(B, M C) -> scores (B, I), float32 under autocast too: the loss is taken from them."""
        with torch.autocast(features.device.type, enabled=False):
            scores: Tensor = self.classifier(self.norm(features.float()))
        return scores
