"""The kernels of the training step against float64 and against the same step by plain torch."""

from __future__ import annotations

from itertools import chain
from unittest import mock

import pytest
import torch

from kernel_cases import DEVICE
from scoring_cases import make_merging
from seps.scoring import maxima
from seps.scoring.gpu import step_launches
from seps.scoring.gpu.step import KernelStep, SplitStep, split
from seps.scoring.gpu.step_launches import StepSizes
from seps.scoring.step import TorchStep

# In the interpreter few tiles of few rows; on a GPU those of every call.
SIZES = None if DEVICE == "cuda" else StepSizes(width=16, slope_width=16, rows=16, slices=2, slope_rows=16)
DTYPES = {torch.float32: 1e-5, torch.float16: 3e-3}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 as whole numbers
    DTYPES[torch.bfloat16] = 2e-2


def case(texts, images, padded, merged, dtype):
    """D, e (B, Q, Z) and G of random patches."""
    torch.manual_seed(texts + padded)
    keep = (torch.rand(texts, images, padded, device=DEVICE) < 0.5).to(dtype)
    vectors = torch.randn(images, padded, 24, device=DEVICE)
    gram = (vectors @ vectors.transpose(1, 2)).to(dtype)
    return keep, torch.rand(images, merged, padded, device=DEVICE).to(dtype), gram


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("texts", "images", "padded", "merged"), [(5, 2, 16, 3), (17, 1, 48, 5), (33, 2, 33, 2), (1, 1, 7, 1)]
)
def test_norms_and_their_slopes(texts, images, padded, merged, dtype):
    keep, weights, gram = case(texts, images, padded, merged, dtype)
    exact = [weights.double().requires_grad_(), gram.double().requires_grad_()]
    chosen = keep.double()[:, :, None] * exact[0]  # (T, B, Q, Z)
    wanted = torch.einsum("tbqi,bij,tbqj->btq", chosen, exact[1], chosen)
    found = step_launches.gram_norms(keep, weights, gram, SIZES)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() <= DTYPES[dtype] * wanted.abs().max()
    slopes = torch.randn(images, texts, merged, device=DEVICE)
    found = step_launches.gram_slopes(keep, weights, gram, slopes, SIZES)
    for mine, other in zip(found, torch.autograd.grad(wanted, exact, slopes.double()), strict=True):
        # G is symmetric: of its gradient the symmetric part counts.
        other = other if mine.shape[-2] == merged != padded else (other + other.transpose(1, 2)) / 2
        assert mine.dtype == torch.float32
        assert (mine - other).norm() <= DTYPES[dtype] * other.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [True, False])
def test_maxima_and_their_gradients_are_those_of_plain_torch(dtype, masked):
    torch.manual_seed(3)
    images, texts, longest, merged, padded = 3, 4, 5, 6, 8
    products = torch.randn(images, texts, longest, padded, device=DEVICE).to(dtype)
    norms = torch.rand(images, texts, merged, device=DEVICE) + 0.1
    norms[1, 2, 3] = 0.0
    mask = torch.arange(longest, device=DEVICE)[None] < torch.tensor([[5], [1], [3], [4]], device=DEVICE)
    mine = KernelStep().maxima(products, norms, mask if masked else None)
    other = TorchStep().maxima(products, norms, mask if masked else None)
    for left, right in zip(chain(*mine), chain(*other), strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-6)
    slopes = torch.randn_like(mine[0][0]), torch.randn_like(mine[0][1])
    found, d_norms = KernelStep().maxima_gradients(norms, *mine, slopes, padded, dtype)
    wanted, wanted_norms = TorchStep().maxima_gradients(norms, *mine, slopes, padded, dtype)
    assert not found[..., merged:].any()
    # Two gradients of one place are added in float32 by the kernel, and after rounding by torch.
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=error, rtol=error)
    torch.testing.assert_close(d_norms, wanted_norms, atol=1e-5, rtol=1e-5)


def test_a_number_is_its_tf32_number_and_the_rest():
    torch.manual_seed(1)
    values = torch.randn(6, 3000, device=DEVICE) * torch.logspace(-30, 30, 3000, device=DEVICE)
    keep = (torch.rand(2, 3, 1000, device=DEVICE) < 0.5).float()
    high, low = split(values)
    assert torch.equal(high + low, values)
    assert not (high.view(torch.int32) & 0x1FFF).any(), "13 bits are left out"
    assert (low.abs() <= high.abs() * 2**-11).all()
    rounded = values.clone()
    rest = step_launches.split_kept(rounded, keep)
    kept = keep.flatten(1).repeat_interleave(3, dim=0)
    assert torch.equal(rounded, high * kept) and torch.equal(rest, low * kept)


@pytest.mark.parametrize("want_words", [True, False])
def test_float32_products_of_pairs(want_words):
    """On a CPU every product is of float32: there the parts and their order are tested, on a GPU the digits too."""
    torch.manual_seed(2)
    texts, longest, images, padded, width = 6, 5, 3, 16, 40
    words, patches = torch.randn(texts, longest, width), torch.randn(images, padded, width)
    words, patches = (torch.nn.functional.normalize(part, dim=-1).to(DEVICE) for part in (words, patches))
    keep = (torch.rand(texts, images, padded, device=DEVICE) < 0.5).float()
    slopes = torch.randn(texts * longest, images, padded, device=DEVICE) * 1e-6
    exact = [part.double() for part in (words, patches, keep)]
    products = SplitStep().products(words, patches, keep) * SplitStep.scale
    assert (products - TorchStep().products(*exact)).abs().max() <= 1e-6
    wanted = TorchStep().product_gradients(slopes.double(), *exact, want_words)
    found = SplitStep().product_gradients(slopes.clone(), words, patches, keep, want_words)
    assert (found[0] is None) == (not want_words)
    for mine, other in zip(found, wanted, strict=True):
        if mine is not None and other is not None:
            assert mine.shape == other.shape and (mine - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize(("texts", "words", "images", "padded"), [(5, 4, 3, 2), (1, 1, 1, 0), (2, 6, 4, 5)])
def test_the_step_with_kernels_is_the_step_without(texts, words, images, padded):
    spoken, patches, weights, keep, mask = make_merging(texts, words, images, padded=padded)
    leaves = [spoken.requires_grad_(), patches.requires_grad_(), weights.requires_grad_()]
    found = []
    for fused in (True, False):
        with mock.patch.object(step_launches, "fits", return_value=fused):
            gram = torch.bmm(patches, patches.transpose(1, 2))
            best = maxima.merged_maxima(spoken, patches, weights, gram, keep, mask, 3)
            torch.manual_seed(9)
            slopes = [torch.randn_like(part) for part in best]
            slopes[0] = slopes[0] * mask
            found.append((*best, *torch.autograd.grad(best, leaves, slopes)))
    for mine, other in zip(*found, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()
