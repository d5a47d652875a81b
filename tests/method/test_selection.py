"""Selection and aggregation against slow, hand-written twins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seps
from seps.method.select import extra_token, hard_topk
from seps.method.tokens import merge


def slow_topk(scores: list[float], ratio: float) -> list[float]:
    count = max(1, math.ceil(len(scores) * ratio))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [float(i in order[:count]) for i in range(len(scores))]


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=40),
    ratio=st.floats(0.01, 1.0),
)
def test_topk_with_ties(scores, ratio):
    # Few values, so almost every list has ties: the lower index wins.
    assert hard_topk(torch.tensor([scores]), ratio)[0].tolist() == slow_topk(scores, ratio)


def test_merge_and_extra_token_by_hand():
    torch.manual_seed(0)
    patches, logits, scores = torch.randn(1, 5, 3), torch.randn(1, 5, 2), torch.randn(1, 5)
    keep = torch.tensor([[1.0, 0, 1, 0, 1]])
    for k in range(2):
        weights = [math.exp(logits[0, i, k]) if keep[0, i] else 0.0 for i in range(5)]
        token = sum(w / sum(weights) * patches[0, i] for i, w in enumerate(weights))
        torch.testing.assert_close(merge(patches, logits, keep)[0, k], token)
    weights = [0.0 if keep[0, i] else math.exp(scores[0, i]) for i in range(5)]
    token = sum(w / sum(weights) * patches[0, i] for i, w in enumerate(weights))
    torch.testing.assert_close(extra_token(patches, scores, keep)[0, 0], token)
    assert not extra_token(patches, scores, torch.ones(1, 5)).any()


def test_merge_survives_a_huge_logit_of_a_dropped_patch():
    patches, keep = torch.randn(1, 3, 4), torch.tensor([[1.0, 0.0, 1.0]])
    logits = torch.tensor([[[0.0], [500.0], [1.0]]])
    expected = merge(patches[:, [0, 2]], logits[:, [0, 2]])
    torch.testing.assert_close(merge(patches, logits, keep), expected)


def test_nothing_kept_gives_zeros_and_no_gradient():
    patches, logits = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 4, 2, requires_grad=True)
    keep = torch.tensor([[0.0, 0, 0, 0], [1, 0, 1, 0]]).requires_grad_()
    merged = merge(patches, logits, keep)
    assert not merged[0].any()
    torch.testing.assert_close(merged[1:], merge(patches[1:], logits[1:], keep[1:]))
    merged.square().sum().backward()
    for leaf in (patches, logits, keep):
        assert not leaf.grad[0].any() and leaf.grad[1].any()


@pytest.mark.parametrize("paper", [False, True])
def test_published_call_gathers_best_first(paper):
    torch.manual_seed(0)
    sparse = seps.TokenSparse(8, 0.4, paper)
    tokens, a, b = torch.randn(2, 10, 8), torch.rand(2, 10), torch.rand(2, 10)
    kept, extra, mask = sparse(tokens, a, b)
    assert kept.shape == (2, 4, 8) and extra.shape == (2, 1, 8) and (mask.sum(dim=1) == 4).all()
    if not paper:
        order = (a + b).argsort(dim=1, descending=True)[:, :4]
        assert torch.equal(kept, torch.gather(tokens, 1, order[..., None].expand(-1, -1, 8)))
