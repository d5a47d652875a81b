"""Are two shots of the same one? False and true accept rates of a distance, and the threshold at a chosen rate.

A pair is accepted when its distance is at most the threshold. Genuine pairs are of one identity, impostor pairs of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Roc:
    """The curve of false and true accept rates, both (T,) float64, by rising `thresholds` (T,)."""

    thresholds: Tensor
    false_accept: Tensor
    true_accept: Tensor


def accept_rate(distances: Tensor, threshold: float) -> float:
    """The part of these pairs that is accepted. Raises ValueError without a pair."""
    if not distances.numel():
        raise ValueError("An accept rate needs at least one pair.")
    return float((distances.double() <= threshold).double().mean())


def roc(genuine: Tensor, impostor: Tensor) -> Roc:
    """The curve over every distance that occurs, from below the smallest. Raises ValueError without pairs or on NaN."""
    genuine, impostor = _sorted("genuine", genuine).double(), _sorted("impostor", impostor).double()
    occurring = torch.unique(torch.cat([genuine, impostor]))
    thresholds = torch.cat([occurring[:1] - 1, occurring])
    rates = [torch.searchsorted(pairs, thresholds, right=True).double() / len(pairs) for pairs in (impostor, genuine)]
    return Roc(thresholds, *rates)


def threshold_at(impostor: Tensor, rate: float) -> float:
    """The largest threshold that accepts at most this part of the impostor pairs.

    Raises ValueError for a rate outside (0, 1), without pairs, on NaN, and where there are fewer than 1 / rate pairs:
    a part of less than one pair cannot be measured.
    """
    pairs = _sorted("impostor", impostor)
    if not 0 < rate < 1:
        raise ValueError(f"A false-accept rate lies between 0 and 1; got {rate}.")
    # Rounded up against a product such as 0.29 * 100 = 28.999999999999996.
    allowed = min(math.floor(rate * len(pairs) + 1e-9), len(pairs) - 1)
    if allowed < 1:
        raise ValueError(
            f"A false-accept rate of {rate:g} cannot be measured with {len(pairs)} pairs of different identities: at "
            f"least {math.ceil(1 / rate)} are needed. Hold more identities out, or choose a higher rate."
        )
    # The next smaller number of the distances' own precision: a step of float64 would round back to the impostor.
    return float(torch.nextafter(pairs[allowed], pairs.new_tensor(-math.inf)))


def _sorted(name: str, distances: Tensor) -> Tensor:
    flat = distances.flatten()
    if not flat.numel() or bool(flat.isnan().any()):
        raise ValueError(f"The distances of {name} pairs must be there and be numbers; got {flat.numel()}.")
    return flat.sort().values
