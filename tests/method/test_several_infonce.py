"""InfoNCE for texts with many right images, against a slow twin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from seps.method.checks import InputError
from seps.method.losses import several_infonce


def slow(scores: Tensor, scale: float, right: Tensor, unknown: Tensor) -> float:
    means = []
    for row, good, open_ in zip((scores * scale).tolist(), right.tolist(), unknown.tolist(), strict=True):
        rights = [z for z, a, b in zip(row, good, open_, strict=True) if a and not b]
        wrongs = [z for z, a, b in zip(row, good, open_, strict=True) if not a and not b]
        if rights and wrongs:
            losses = [-math.log(math.exp(z) / (math.exp(z) + sum(map(math.exp, wrongs)))) for z in rights]
            means.append(sum(losses) / len(losses))
    return sum(means) / len(means) if means else 0.0


def test_it_is_the_slow_form() -> None:
    generator = torch.Generator().manual_seed(0)
    for texts in [1, 2, 5] * 7:
        scores = torch.randn(texts, 7, generator=generator)
        right, unknown = torch.rand(2, texts, 7, generator=generator) < torch.tensor([0.4, 0.3])[:, None, None]
        assert several_infonce(scores, 3.0, right, unknown).item() == pytest.approx(slow(scores, 3.0, right, unknown))


def test_with_one_right_image_per_text_it_is_cross_entropy() -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    rows = torch.nn.functional.cross_entropy(scores * 2, torch.arange(6))
    torch.testing.assert_close(several_infonce(scores, 2.0, torch.eye(6, dtype=torch.bool)), rows)


def test_unknown_images_and_texts_without_a_right_or_a_wrong_one_have_no_gradient() -> None:
    scores = torch.randn(4, 3, requires_grad=True)
    right = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
    unknown = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]).bool()
    several_infonce(scores, 1.0, right, unknown).backward()
    assert scores.grad is not None and torch.isfinite(scores.grad).all()
    assert (scores.grad != 0).tolist() == [[True, True, False], [False] * 3, [False] * 3, [True] * 3]


def test_without_any_text_to_learn_from_it_is_zero() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    loss = several_infonce(scores, 1.0, torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and scores.grad is not None and not scores.grad.any()


def test_right_images_do_not_compete() -> None:
    right = torch.tensor([[True, True, False]])
    first = several_infonce(torch.tensor([[2.0, 2.0, 0.0]]), 1.0, right)
    second = several_infonce(torch.tensor([[2.0, 5.0, 0.0]]), 1.0, right)
    assert second < first


@pytest.mark.parametrize("marks", [torch.zeros(2, 2).bool(), torch.zeros(2, 3)])
def test_marks_of_another_shape_or_kind_are_refused(marks: Tensor) -> None:
    with pytest.raises(InputError, match="right must be bool"):
        several_infonce(torch.randn(2, 3), 1.0, marks)
    with pytest.raises(InputError, match="unknown must be bool"):
        several_infonce(torch.randn(2, 3), 1.0, torch.ones(2, 3).bool(), marks)
