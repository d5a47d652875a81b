"""Softmax and sigmoid alignment losses over the similarity matrix of a batch, with a learned temperature.

Shapes: B pairs of image and text.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.losses.triplet import check_square, same_image


def infonce(scores: Tensor, scale: Tensor | float, img_ids: Tensor | None = None) -> Tensor:
    """Symmetric InfoNCE of `z = scale * scores`, mean over the batch and both directions: (B, B) -> scalar.

    `L = -1 / (2 B) sum_i (log softmax_j(z_ij) + log softmax_j(z_ji)) at j = i`, for image i and text j.
    Off-diagonal pairs that share an image id are not negatives, and are left out of the softmax.
    """
    check_square(scores, img_ids)
    logits = scores.float() * scale  # (B, B)
    own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)  # (B, B)
    logits = logits.masked_fill(same_image(scores, img_ids) & ~own, float("-inf"))  # (B, B)
    target = torch.arange(len(scores), device=scores.device)  # (B,)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def sigmoid_loss(scores: Tensor, scale: Tensor | float, bias: Tensor | float, img_ids: Tensor | None = None) -> Tensor:
    """Pairwise sigmoid loss (SigLIP), one binary decision per pair, summed and divided by B: (B, B) -> scalar.

    `L = -1 / B sum_ij log sigmoid(y_ij (scale S_ij + bias))`, y_ij = 1 at a pair (i = j) and -1 elsewhere.
    """
    check_square(scores, img_ids)
    logits = scores.float() * scale + bias  # (B, B)
    own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)  # (B, B)
    sign = own.to(logits.dtype) * 2 - 1  # (B, B)
    losses = -F.logsigmoid(sign * logits).masked_fill(same_image(scores, img_ids) & ~own, 0.0)  # (B, B)
    return losses.sum() / len(scores)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """What a student's rows and columns have yet to learn of a teacher's, as softmax distributions.

    Mean over both directions of KL(softmax(teacher) || softmax(student)), no gradient into the teacher: (B, B) logits,
    scaled by the caller -> scalar, 0 where both agree.
    """
    teacher = teacher.detach().float()  # (B, B)
    student = student.float()  # (B, B)
    parts = [
        F.kl_div(F.log_softmax(student, dim=side), F.log_softmax(teacher, dim=side), reduction="sum", log_target=True)
        / student.shape[1 - side]
        for side in (0, 1)
    ]
    return torch.stack(parts).mean()


LARGEST_SCALE = 100.0
"""Bound of a learned scale: a temperature of 0.01."""


class _FromAbove(torch.autograd.Function):
    """`min(x, bound)` with a gradient that leads back from above the bound, but never further above it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(value)
        ctx.bound = bound
        return value.clamp_max(bound)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        # A step goes against the gradient: a negative one would raise a value that is too large already.
        away = (value > ctx.bound) & (gradients[0] < 0)
        return gradients[0].masked_fill(away, 0.0), None


def learned_scale(log_scale: Tensor) -> Tensor:
    """`exp(log_scale)`, at most `LARGEST_SCALE`, a float32 scalar; above the bound a gradient can still lower it."""
    bounded: Tensor = _FromAbove.apply(log_scale.float(), math.log(LARGEST_SCALE))  # type: ignore[no-untyped-call]
    return bounded.exp()


class InfoNCELoss(nn.Module):
    """Symmetric InfoNCE with a learned temperature, which starts at `temperature` and never goes below 0.01.

    Flow::

        S (B, B) -> z = S / temperature (B, B) -> cross-entropy of rows and of columns (B,), (B,) -> mean, a scalar
    """

    def __init__(self, temperature: float = 0.05) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))

    @property
    def scale(self) -> Tensor:
        """What similarities are multiplied by, one over the temperature: a scalar."""
        return learned_scale(self.log_scale)

    def forward(self, scores: Tensor, img_ids: Tensor | None = None) -> Tensor:
        """(B, B) similarities, image i and text i being a pair; image ids (B,) -> scalar loss."""
        return infonce(scores, self.scale, img_ids)


class SigmoidLoss(nn.Module):
    """Pairwise sigmoid loss (SigLIP); temperature (never below 0.01) and bias are learned from these first values.

    Flow::

        S (B, B) -> z = S / temperature + bias (B, B) -> -log sigmoid(+z or -z) (B, B) -> sum / B, a scalar
    """

    def __init__(self, temperature: float = 0.1, bias: float = -10.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, scores: Tensor, img_ids: Tensor | None = None) -> Tensor:
        """(B, B) similarities, image i and text i being a pair; image ids (B,) -> scalar loss."""
        return sigmoid_loss(scores, learned_scale(self.log_scale), self.bias.float(), img_ids)
