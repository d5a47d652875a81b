"""Identity losses against slow twins, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from messages import naming
from seps.method.checks import InputError
from seps.method.losses import batch_hard_triplet, identity_loss


def slow_identity(scores, labels, smoothing):
    total = 0.0
    for row, label in zip(scores, labels, strict=True):
        norm = math.log(sum(math.exp(value) for value in row))
        for identity, value in enumerate(row):
            target = smoothing / len(row) + (1 - smoothing if identity == label else 0.0)
            total -= target * (value - norm)
    return total / len(scores)


def slow_triplet(features, labels):
    total = 0.0
    for i, anchor in enumerate(features):
        distance = [math.dist(anchor, other) for other in features]
        positive = max(d for d, label in zip(distance, labels, strict=True) if label == labels[i])
        negative = min(d for d, label in zip(distance, labels, strict=True) if label != labels[i])
        total += math.log(1 + math.exp(positive - negative))
    return total / len(features)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_identity_loss(smoothing: float) -> None:
    scores, labels = torch.randn(6, 5), [0, 4, 2, 2, 1, 3]
    ours = identity_loss(scores, torch.tensor(labels), smoothing)
    assert ours.item() == pytest.approx(slow_identity(scores.tolist(), labels, smoothing), rel=1e-5)


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5], [7, 3, 7, 7, 3, 7]])
def test_batch_hard_triplet(labels: list[int]) -> None:
    features = torch.randn(6, 4)
    ours = batch_hard_triplet(features, torch.tensor(labels))
    assert ours.item() == pytest.approx(slow_triplet(features.tolist(), labels), rel=1e-4)


def test_slices_of_a_batch_average_to_the_whole() -> None:
    features, labels = torch.randn(8, 4), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    parts = [batch_hard_triplet(features[s : s + 4], labels[s : s + 4], features, labels, first=s) for s in (0, 4)]
    assert torch.stack(parts).mean().item() == pytest.approx(batch_hard_triplet(features, labels).item(), rel=1e-6)


def test_equal_features_have_a_finite_gradient() -> None:
    features = torch.ones(4, 3, requires_grad=True)
    loss = batch_hard_triplet(features, torch.tensor([0, 0, 1, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-5)
    assert features.grad is not None and not features.grad.any()  # no direction is better than another


def test_refusals() -> None:
    with pytest.raises(ValueError, match="identity"):
        batch_hard_triplet(torch.randn(3, 2), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="label"):
        batch_hard_triplet(torch.randn(3, 2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=naming("first=3")):
        batch_hard_triplet(torch.randn(2, 2), torch.tensor([0, 1]), torch.randn(4, 2), torch.arange(4), first=3)
    with pytest.raises(ValueError, match=naming("first=0")):
        batch_hard_triplet(torch.randn(2, 2), torch.tensor([0, 1]), torch.randn(4, 3), torch.arange(4))
    with pytest.raises(ValueError, match="smoothing"):
        identity_loss(torch.randn(2, 3), torch.tensor([0, 1]), 1.0)
    with pytest.raises(ValueError, match="identities"):
        identity_loss(torch.randn(2, 3), torch.tensor([0, 1, 2]))
    # The mean of nothing was NaN, other labels an error of torch, and -100 was passed over without a word.
    with pytest.raises(InputError, match="sample"):
        identity_loss(torch.randn(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(InputError, match=naming("torch.float32")):
        identity_loss(torch.randn(2, 3), torch.zeros(2))
    for label in (3, -1, -100):
        with pytest.raises(IndexError, match="bounds"):
            identity_loss(torch.randn(2, 3), torch.tensor([0, label]))
