"""The hand-written backward pass of both maxima against autograd through a plain twin."""

from __future__ import annotations

import pytest
import torch

from scoring_cases import make_merging
from seps.scoring.maxima import merged_maxima


def twin(words, patches, weights, keep, mask, merged):
    """The same maxima from merged patches built for each pair."""
    tokens = torch.einsum("tbz,bzq,bzc->btqc", keep, weights[..., :merged], patches)
    length = tokens.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, tokens / length.clamp_min(1e-18), 0.0)
    cosines = torch.einsum("tmc,btqc->btmq", words, unit)
    return cosines.amax(dim=-1), cosines.masked_fill(~mask[:, :, None], -1e9).amax(dim=2)


@pytest.mark.parametrize(("texts", "words", "images", "padded"), [(5, 4, 3, 2), (1, 1, 1, 0), (2, 6, 4, 5)])
def test_values_and_gradients(texts, words, images, padded):
    spoken, patches, weights, keep, mask = make_merging(texts, words, images, padded=padded)
    leaves = [spoken.requires_grad_(), patches.requires_grad_(), weights.requires_grad_()]
    gram = torch.bmm(patches, patches.transpose(1, 2))
    ours = merged_maxima(spoken, patches, weights, gram, keep, mask, 3)
    theirs = twin(spoken, patches, weights, keep, mask, 3)
    torch.manual_seed(9)
    slopes = [torch.randn_like(part) for part in theirs]
    slopes[0] = slopes[0] * mask
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, slopes), torch.autograd.grad(theirs, leaves, slopes), strict=True
    ):
        assert (mine - other).norm() <= 1e-4 * other.norm()


@pytest.mark.parametrize(("coarse", "error", "cosine"), [(torch.bfloat16, 0.1, 0.995), (torch.float16, 0.03, 0.9995)])
def test_half_products_have_about_the_same_gradients(coarse, error, cosine):
    """Rounding moves some maxima to another word; measured 0.045 to 0.084 in bfloat16, 0.017 to 0.025 in half."""
    spoken, patches, weights, keep, mask = make_merging(24, 8, 5, 32, 16, 8, 8)
    exact = [spoken.requires_grad_(), patches.requires_grad_(), weights.requires_grad_()]
    found = []
    for dtype in (torch.float32, coarse):
        gram = torch.bmm(patches, patches.transpose(1, 2))
        halved = patches.to(dtype), weights.to(dtype)
        rows, columns = merged_maxima(spoken, *halved, gram, keep.to(dtype), mask, 8)
        assert rows.dtype == torch.float32
        found.append(torch.autograd.grad((rows * mask).mean() + columns.mean(), exact))
    for full, half in zip(*found, strict=True):
        assert 0 < (full - half).norm() <= error * full.norm()
        assert torch.cosine_similarity(full.flatten(), half.flatten(), dim=0) > cosine
        assert abs(half.norm() / full.norm() - 1) < error / 4


def test_a_merged_patch_of_length_zero_has_no_gradient():
    spoken, patches, weights, keep, mask = make_merging()
    patches[1] = 0.0
    gram = torch.bmm(patches, patches.transpose(1, 2))
    leaves = [spoken.requires_grad_(), patches.requires_grad_(), weights.requires_grad_(), gram.requires_grad_()]
    rows, columns = merged_maxima(spoken, patches, weights, gram, keep, mask, 3)
    assert not rows[1].any() and not columns[1].any()
    found = torch.autograd.grad(rows.sum() + columns.sum(), leaves)
    assert all(torch.isfinite(value).all() for value in found)
    assert not found[1][1].any() and not found[3][1].any()


def test_frozen_words_get_no_gradient():
    spoken, patches, weights, keep, mask = make_merging()
    gram = torch.bmm(patches, patches.transpose(1, 2))
    rows, _ = merged_maxima(spoken, patches.requires_grad_(), weights, gram, keep, mask, 3)
    rows.sum().backward()
    assert spoken.grad is None and patches.grad is not None
