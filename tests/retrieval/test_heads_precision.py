"""The baselines' heads: float32 under autocast, as in the method, and the largest score."""

from __future__ import annotations

import pytest
import torch

import seps
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.model import make_head

KINDS = ["mean", "maxsim", "scan", "scan-t2i", "scan-i2t", "description"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_vectors_have_the_largest_score(kind):
    """A loss takes its temperature relative to it."""
    head = make_head(kind, 1, seps.SlimmingConfig(embed_size=64, num_patches=9))
    one = torch.randn(64)
    valid = torch.ones(1, 5, dtype=torch.bool)
    images = ImageFeatures(one.expand(1, 10, 64), one.expand(1, 5, 64), valid)
    found = head(images, TextFeatures(one.expand(1, 5, 64), valid))
    assert float(found.similarity.detach()) == pytest.approx(head.score_range, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_baselines_are_the_same_under_autocast(kind):
    head = make_head(kind, 1, seps.SlimmingConfig(embed_size=64, num_patches=9))
    words_valid = torch.arange(5) < torch.tensor([[5], [2], [3]])
    dense_valid = torch.arange(7) < torch.tensor([[7], [1], [4], [2]])
    tokens, words, dense = torch.randn(4, 10, 64), torch.randn(3, 5, 64), torch.randn(4, 7, 64)
    pulls = torch.randn(4, 3)

    def step(cast: bool):
        leaves = [t.clone().requires_grad_() for t in (tokens, words, dense)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            scores = head(ImageFeatures(leaves[0], leaves[2], dense_valid), TextFeatures(leaves[1], words_valid))
        (scores.similarity * pulls).sum().backward()
        return scores.similarity.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]

    exact, gradients = step(False)
    ours, cast = step(True)
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    for a, b in zip(cast, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
