"""Accept rates, their curve and the threshold at a rate, against counting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from messages import naming
from seps.metrics import accept_rate, roc, threshold_at

# Few different values, so that ties are common.
distances = st.lists(st.integers(0, 12).map(lambda value: value / 4), min_size=1, max_size=40)


@given(genuine=distances, impostor=distances)
def test_the_curve_counts_pairs(genuine: list[float], impostor: list[float]) -> None:
    curve = roc(torch.tensor(genuine), torch.tensor(impostor))
    assert float(curve.false_accept[0]) == float(curve.true_accept[0]) == 0
    assert float(curve.false_accept[-1]) == float(curve.true_accept[-1]) == 1
    for threshold, false, true in zip(curve.thresholds, curve.false_accept, curve.true_accept, strict=True):
        assert float(false) == sum(value <= threshold for value in impostor) / len(impostor)
        assert float(true) == sum(value <= threshold for value in genuine) / len(genuine)


@given(impostor=distances, rate=st.floats(0.01, 0.99))
def test_the_threshold_is_the_largest_that_keeps_the_rate(impostor: list[float], rate: float) -> None:
    if rate * len(impostor) < 1:
        with pytest.raises(ValueError, match="measured"):
            threshold_at(torch.tensor(impostor), rate)
        return
    threshold = threshold_at(torch.tensor(impostor), rate)
    # In the distances' own precision as in a higher one.
    assert accept_rate(torch.tensor(impostor), threshold) <= rate + 1e-9
    assert float((torch.tensor(impostor) <= threshold).double().mean()) <= rate + 1e-9
    # One step further another impostor is accepted, and the rate is passed.
    further = float(torch.nextafter(torch.tensor(threshold), torch.tensor(torch.inf)))
    assert sum(value <= further for value in impostor) / len(impostor) > rate - 1e-9


def test_a_golden_threshold() -> None:
    impostor = torch.tensor([0.9, 0.2, 0.5, 0.4, 0.8, 0.7, 0.6, 1.0, 1.1, 1.2], dtype=torch.float64)
    threshold = threshold_at(impostor, 0.2)
    assert threshold == math.nextafter(0.5, 0) and accept_rate(impostor, threshold) == 0.2
    assert accept_rate(torch.tensor([0.1, 0.45, 0.49, 0.51]), threshold) == 0.75


@pytest.mark.parametrize(
    ("impostor", "rate", "sentence"),
    [
        ([0.1] * 50, 0.01, naming("100", "needed")),
        ([], 0.5, "there"),
        ([float("nan")] * 9, 0.5, "numbers"),
        ([0.1] * 9, 1.0, "between 0 and 1"),
    ],
)
def test_refusals(impostor: list[float], rate: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        threshold_at(torch.tensor(impostor), rate)
    with pytest.raises(ValueError, match="pair"):
        accept_rate(torch.empty(0), 0.5)
