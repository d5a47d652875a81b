"""A gate that learns where to look: which patches of each sensor are kept, decided before patches are mixed.

Behind the encoder every patch holds something of all others, and the published scores compare it with global vectors
that are mostly background. The gate sees each patch by itself (`VisionEncoder.forward_with_early`) and is trained by
identities alone: the patches' values are averaged under its weights, and the averages must tell who it is::

    w_i = sigmoid(a_i) / sum_j sigmoid(a_j),    pooled = sum_i w_i u_i,    a, u: two small networks per sensor
    loss = cross-entropy of pooled + batch-hard triplet of pooled at unit length

D is 1 at the K patches with the largest a. No gradient comes back through D, and none goes on into the encoder.

Shapes: B samples, M sensors, N patches, F features of a patch by itself, W width of the gate, I identities.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.encoders import ViT
from seps.method.losses import batch_hard_triplet, identity_loss
from seps.method.precision import float_apply
from seps.method.select import hard_topk, num_kept, rank_patches
from seps.training import distributed as processes

ALL_SENSORS = slice(None)
WIDTH = 64
_MOMENTUM = 0.1


class PatchMLP(nn.Module):
    """A patch and its place to some numbers: (B, N, F) -> (B, N, outputs)."""

    def __init__(self, features: int, patches: int, width: int, outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, width)
        self.places = nn.Parameter(0.02 * torch.randn(patches, width))
        self.out = nn.Linear(width, outputs)

    def forward(self, early: Tensor) -> Tensor:
        seen: Tensor = self.out(functional.gelu(self.hidden(early) + self.places))
        return seen


class Standardise(nn.Module):
    """Each sensor's features less their mean, over their deviation, by statistics of the training shots seen so far.

    Without it the scale of the encoder decides how fast the gate learns. Training and evaluation use the same numbers.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, sensors: int, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(sensors, 1, features))
        self.register_buffer("variance", torch.ones(sensors, 1, features))
        self.register_buffer("batches", torch.zeros(sensors, 1, 1, dtype=torch.long))

    @torch.no_grad()
    def observe(self, early: Tensor, present: Tensor | None) -> None:
        """Take the present sensors (B, M) of a training batch (B, M, N, F) of all processes into the statistics."""
        # Less the mean so far: a difference of large squares would lose the digits of a small variance.
        early = early.float() - self.mean
        there = torch.ones_like(early)
        if present is not None:
            # Selected, not multiplied: whatever stands at an absent sensor, NaN included, must not pass.
            there, early = (torch.where(present[:, :, None, None], part, 0.0) for part in (there, early))
        sums = torch.stack([there, early, early.square()]).sum(dim=(1, 3))  # (3, M, F)
        if processes.world_size() > 1:
            sums = processes.gather_ragged(sums[None]).sum(dim=0)
        count, total, squares = sums[:, :, None].unbind()  # each (M, 1, F)
        shift = total / count.clamp_min(1)
        variance = (squares / count.clamp_min(1) - shift.square()).clamp_min(0)
        seen = count[..., :1] > 0
        self.batches += seen
        # The first batches are averaged evenly, so that the values at the start count for nothing.
        share = torch.where(seen, (1 / self.batches.clamp_min(1)).clamp_min(_MOMENTUM), 0.0)
        self.mean += share * shift
        self.variance.lerp_(variance, share.expand_as(variance))

    def forward(self, early: Tensor, sensors: slice = ALL_SENSORS) -> Tensor:
        """(B, M, N, F) of `sensors` -> (B, M, N, F) float32."""
        return (early.float() - self.mean[sensors]) / (self.variance[sensors] + 1e-6).sqrt()


class PatchGate(nn.Module):
    """See the head of this file.

    Args:
        sensors, patches, features: M, N and F of the patches it sees.
        identities: classes I of its own classifier.
        width: W.
    """

    def __init__(self, sensors: int, patches: int, features: int, identities: int, width: int = WIDTH) -> None:
        super().__init__()
        self.standardise = Standardise(sensors, features)
        self.weights = nn.ModuleList(PatchMLP(features, patches, width, 1) for _ in range(sensors))
        self.values = nn.ModuleList(PatchMLP(features, patches, width, width) for _ in range(sensors))
        self.classifier = nn.Linear(sensors * width, identities)

    def forward(self, early: Tensor, sensors: slice = ALL_SENSORS) -> Tensor:
        """Patches by themselves (B, M, N, F) of `sensors` -> a (B, M, N), float32 under autocast too: it decides."""
        seen = self.standardise(early.detach(), sensors)
        looks = list(self.weights)[sensors]
        return torch.stack([float_apply(look, seen[:, m])[..., 0] for m, look in enumerate(looks)], dim=1)

    @torch.no_grad()
    def keep(self, early: Tensor, ratio: float, sensors: slice = ALL_SENSORS) -> Tensor:
        """D (B, M, N) of `ratio` of each sensor's patches."""
        return hard_topk(self(early, sensors), ratio)

    def pool(self, early: Tensor, present: Tensor | None = None) -> Tensor:
        """Averages (B, M W) under the gate's weights; of sensors absent by `present` (B, M) zeros, the others' blocks
        scaled by sqrt(M / present sensors), as the features of the model are."""
        weights = torch.sigmoid(self(early))
        weights = weights / weights.sum(dim=-1, keepdim=True)
        seen = self.standardise(early.detach())
        values = torch.stack([float_apply(look, seen[:, m]) for m, look in enumerate(self.values)], dim=1)
        pooled = (weights[..., None] * values).sum(dim=2)  # (B, M, W)
        if present is not None:
            scale = (present.shape[1] / present.sum(dim=1).clamp_min(1)).sqrt()
            pooled = torch.where(present[:, :, None], pooled, 0.0) * scale[:, None, None]
        return pooled.flatten(1)

    def loss(self, pooled: Tensor, labels: Tensor, smoothing: float = 0.1) -> Tensor:
        """Smoothed cross-entropy plus soft-margin batch-hard triplet of the averages (B, M W) of this process's rows.

        With several processes the triplets are those with the rows of all.
        """
        unit, everyone, every_label, first = functional.normalize(pooled, dim=1), None, None, 0
        if processes.world_size() > 1:
            everyone, every_label = processes.gather_with_gradient(unit), processes.gather_ragged(labels)
            first = processes.rank() * len(labels)
        triplets = batch_hard_triplet(unit, labels, everyone, every_label, first=first)
        return identity_loss(float_apply(self.classifier, pooled), labels, smoothing) + triplets


def kept_tokens(
    gate: PatchGate, encoder: ViT, sensors: slice, ratio: float, pixels: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop patches before the first block: tokens (B, P + K, C), all patches by themselves (B, N, F), D (B, N).

    Rows of pixels are sample by sample, and in each the `sensors` of the gate. In training D follows from the
    statistics before this batch.
    """
    decided: list[Tensor] = []

    def choose(early: Tensor) -> Tensor:
        rows = early.reshape(-1, len(list(gate.weights)[sensors]), *early.shape[1:])
        keep = gate.keep(rows, ratio, sensors).flatten(0, 1)
        decided.append(keep)
        return rank_patches(keep)[:, : num_kept(keep.shape[1], ratio)]  # in the order of the grid

    tokens, early = encoder.forward_kept(pixels, choose, added)
    return tokens, early, decided[0]
