"""Both maxima of the cosines for training, with a backward pass written by hand (see `factored` for the symbols).

Its large steps are those of `step`, on a GPU with Triton those of `gpu.step`.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches (R padded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seps.scoring.gpu.step import step_for
from seps.scoring.step import Both, TorchStep


def merged_maxima(
    words: Tensor, patches: Tensor, weights: Tensor, gram: Tensor, keep: Tensor, mask: Tensor | None, merged: int
) -> tuple[Tensor, Tensor]:
    """`max_k A_jk` (B, T, M) and `max_j A_jk` (B, T, Q), float32, differentiable in the first four.

    Args:
        words: (T, M, C), zero at padding.
        patches: (B, Z, C) in the products' dtype.
        weights: e, (B, Z, R) in the products' dtype, zero beyond `merged` = Q.
        gram: V V^T, (B, Z, Z) float32.
        keep: D, (T, B, Z) in the products' dtype, zeros and ones.
        mask: (T, M) bool, True at words.
    """
    result: tuple[Tensor, Tensor] = _MergedMaxima.apply(words, patches, weights, gram, keep, mask, merged)  # type: ignore[no-untyped-call]
    return result


class _MergedMaxima(torch.autograd.Function):
    """See `merged_maxima`.

    A score depends on a pair's cosines through its maxima alone: one merged patch per word, one word per merged patch.
    So the forward pass keeps which those are, D and the norms, and the backward pass is a sparse scatter followed by
    matrix products. Nothing of the size (words x patches) or (merged x patches) of a pair is kept in between.
    With X = (P * D) e, n_k = D^T H_k D and A_jk = X_jk / sqrt(n_k) (see `factored`), given dA:

        dX_jk = dA_jk / sqrt(n_k)          dP = (dX e^T) * D       de = (P * D)^T dX
        dn_k  = -1/2 sum_j dA_jk A_jk / n_k                        dH_k = sum over texts of dn_k D D^T
        dG    = sum_k e_k dH_k e_k                                 de_k += 2 (dH_k * G) e_k
    """

    @staticmethod
    def forward(
        ctx: Any,
        words: Tensor,
        patches: Tensor,
        weights: Tensor,
        gram: Tensor,
        keep: Tensor,
        mask: Tensor | None,
        merged: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = patches.dtype
        texts, batch = keep.shape[:2]
        step = step_for(patches, words.shape[1], weights.shape[-1])
        norms = step.norms(weights[..., :merged], gram.to(dtype), keep)
        products = step.products(words.to(dtype), patches, keep)
        cosines = torch.bmm(products.transpose(0, 1), weights * step.scale).view(batch, texts, -1, weights.shape[-1])
        del products
        best, places = step.maxima(cosines, norms, mask)
        ctx.step = step
        ctx.save_for_backward(words, patches, weights, gram, keep.bool(), norms, *best, *places)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Outside the autocast that the caller may be in: every dtype here was chosen in the forward pass.
        with torch.autocast(gradients[0].device.type, enabled=False):
            found = _gradients(ctx.step, ctx.saved_tensors, (gradients[0], gradients[1]), ctx.needs_input_grad[0])
            return *found, None, None, None


def _gradients(
    step: TorchStep, saved: tuple[Tensor, ...], slopes: Both, want_words: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of words, patches, weights and Gram matrix from those of both maxima."""
    words, patches, weights, gram, keep, norms, rows, columns, of_word, of_merged = saved
    dtype, merged = patches.dtype, norms.shape[-1]
    keep = keep.to(dtype)
    places = of_word, of_merged
    d_cosines, d_norms = step.maxima_gradients(norms, (rows, columns), places, slopes, weights.shape[-1], dtype)
    d_weights, d_gram = step.norm_gradients(d_norms, weights[..., :merged], gram.to(dtype), keep)
    del d_norms
    d_cosines = d_cosines.flatten(1, 2)
    unit = words.to(dtype)
    products = step.products(unit, patches, keep)
    d_all = torch.bmm(products.permute(1, 2, 0), d_cosines)
    if step.scale != 1.0:
        d_all *= step.scale
    d_all[..., :merged] += d_weights
    # P is needed no more: its gradient takes its place.
    torch.bmm(d_cosines, weights.transpose(1, 2), out=products.transpose(0, 1))
    del d_cosines
    d_words, d_patches = step.product_gradients(products, unit, patches, keep, want_words)
    return None if d_words is None else d_words.to(words.dtype), d_patches, d_all, d_gram.to(gram.dtype)
