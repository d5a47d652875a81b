"""The relaxation of top-K: probabilities of the patches that sum to K, whose gradient D carries in training.

Shapes: B images, N patches, K kept patches.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAR = -1e9
"""The logit of padding: below that of every patch."""
_STEPS = 8


def soft_topk(logits_XN: Tensor, count_X1: Tensor, temperature: float) -> Tensor:
    """Relaxation of top-K that sums to K: `p_i = sigmoid((z_i - theta) / temperature)`, (B, N).

    theta solves `sum_i p_i = K` for each row; its gradient is the implicit one, so that the gradient of the sum is
    zero, as the sum is a constant.
    """
    logits = logits_XN.float()  # (..., N)
    with torch.no_grad():
        theta = relaxed_threshold(logits, count_X1, temperature)  # (..., 1)
        probability = torch.sigmoid((logits - theta) / temperature)  # (..., N)
        slope = probability * (1 - probability)  # (..., N)
        share = slope / slope.sum(dim=-1, keepdim=True).clamp_min(1e-12)  # (..., N)
    moving = theta + (share * (logits - logits.detach())).sum(dim=-1, keepdim=True)  # (..., 1)
    return torch.sigmoid((logits - moving) / temperature)  # (..., N)


def relaxed_threshold(logits_XN: Tensor, count_X1: Tensor, temperature: float) -> Tensor:
    """theta with `sum_i sigmoid((z_i - theta) / temperature) = K`, (B, N), (B, 1) -> (B, 1), by Newton's method.

    Solved for the logarithm of kept over left, which is almost a straight line in theta, from the middle between the
    K-th and the next logit. A step that leaves the bracket is replaced by its middle. The number of steps is fixed, so
    that a GPU is never waited for; 7 were enough for all temperatures and gaps that were tried.
    """
    real = logits_XN > FAR / 2  # (..., N)
    total = real.sum(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
    count = count_X1.float()  # (..., 1)
    wanted = count.log() - (total - count).clamp_min(1e-7).log()  # (..., 1)
    # Were all logits equal to the lowest (the highest), theta would be this: it lies between the two.
    low = logits_XN.masked_fill(~real, float("inf")).amin(dim=-1, keepdim=True) - temperature * wanted  # (..., 1)
    high = logits_XN.amax(dim=-1, keepdim=True) - temperature * wanted  # (..., 1)
    all_kept = low  # (..., 1)
    ranked = logits_XN.sort(dim=-1, descending=True).values  # (..., N)
    place = torch.minimum(count_X1.long(), total).clamp_min(1) - 1  # (..., 1)
    following = torch.minimum(place + 1, (total - 1).clamp_min(0))  # (..., 1)
    theta = (ranked.gather(-1, place) + ranked.gather(-1, following)) / 2  # (..., 1)
    theta = torch.minimum(torch.maximum(theta, low), high)  # (..., 1)
    for _ in range(_STEPS):
        distance = (logits_XN - theta) / temperature  # (..., N)
        keep, leave = torch.sigmoid(distance), torch.sigmoid(-distance)  # (..., N), (..., N)
        kept = keep.sum(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
        left = leave.masked_fill(~real, 0.0).sum(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
        gap = kept.log() - left.log() - wanted  # (..., 1)
        slope = (keep * leave).sum(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
        moved = theta + gap * (kept * left / total) * temperature / slope  # (..., 1)
        low, high = torch.where(gap > 0, theta, low), torch.where(gap > 0, high, theta)  # (..., 1), (..., 1)
        # Between far groups of logits the slope is zero, and every theta between them is a solution.
        solved = (kept - count).abs() <= 2e-7 * count  # (..., 1)
        other = torch.where(solved, theta, (low + high) / 2)  # (..., 1)
        theta = torch.where((moved >= low) & (moved <= high), moved, other)  # (..., 1)
    theta = torch.where(count < total, theta, all_kept)  # (..., 1)
    return torch.where(total > 0, theta, float("inf"))  # (..., 1)
