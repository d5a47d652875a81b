"""Both maxima of the merged patches with a backward pass written by hand, for training.

A score depends on a pair's cosines through its maxima alone: one merged patch per word, one word per merged patch.
So the forward pass keeps which those are, D and the norms, and the backward pass is a sparse scatter followed by
matrix products. Nothing of the size (words x patches) or (merged x patches) of a pair is kept in between.

With X = (P * D) e, n_k = D^T H_k D and A_jk = X_jk / sqrt(n_k) (see `factored`), given dA:

    dX_jk = dA_jk / sqrt(n_k)          dP = (dX e^T) * D       de = (P * D)^T dX
    dn_k  = -1/2 sum_j dA_jk A_jk / n_k                        dH_k = sum over texts of dn_k D D^T
    dG    = sum_k e_k dH_k e_k                                 de_k += 2 (dH_k * G) e_k

Shapes: B images, T texts, M words, Z patches (padded), C width, Q merged patches (R padded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seps.scoring.precision import row_dots, zero_dropped

SMALLEST = 1e-36


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


def _masked_products(words: Tensor, patches: Tensor, keep: Tensor) -> Tensor:
    """P * D: (T, M, C), (B, Z, C), (T, B, Z) -> (T * M, B, Z)."""
    texts, batch, count = keep.shape
    flat = words.flatten(0, 1) @ patches.flatten(0, 1).T
    return zero_dropped(flat.view(texts, -1, batch * count), keep.flatten(1)).view(-1, batch, count)


def _norms(weights: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """n: (B, Z, Q), (B, Z, Z), (B, T, Z) -> (B, T, Q) float32."""
    batch, texts, count = keep.shape
    table = (gram[:, :, None, :] * weights.transpose(1, 2).contiguous()[:, None]).mul_(weights[..., None])
    rows = torch.bmm(keep, table.flatten(2)).view(batch * texts, -1, count)
    return row_dots(rows, keep.reshape(batch * texts, count)).view(batch, texts, -1)


def _norms_backward(slope: Tensor, weights: Tensor, gram: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """de and dG from dn (B, T, Q); H is symmetric, and so is its gradient."""
    batch, _, count = keep.shape
    spread = (slope.to(keep.dtype)[..., None] * keep[:, :, None, :]).flatten(2)
    table = torch.bmm(keep.transpose(1, 2), spread).view(batch, count, -1, count)
    table.mul_(weights.transpose(1, 2).contiguous()[:, None])
    return 2 * torch.matmul(table, gram[..., None]).squeeze(-1), torch.matmul(weights[:, :, None], table).squeeze(2)


class _MergedMaxima(torch.autograd.Function):
    """See `merged_maxima`."""

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
        by_image = keep.transpose(0, 1).contiguous()
        norms = _norms(weights[..., :merged], gram.to(dtype), by_image)
        products = _masked_products(words.to(dtype), patches, keep)
        cosines = torch.bmm(products.transpose(0, 1), weights).view(batch, texts, -1, weights.shape[-1])
        del products
        cosines = cosines[..., :merged].float().mul_(_inverse(norms)[:, :, None])
        rows, of_word = cosines.max(dim=-1)
        if mask is not None:
            cosines.masked_fill_(~mask[:, :, None], torch.finfo(torch.float32).min)
        columns, of_merged = cosines.max(dim=2)
        small = torch.int16 if max(cosines.shape[2:]) < 2**15 else torch.int32
        ctx.save_for_backward(
            words, patches, weights, gram, keep.bool(), norms, rows, columns, of_word.to(small), of_merged.to(small)
        )
        return rows, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Outside the autocast that the caller may be in: every dtype here was chosen in the forward pass.
        with torch.autocast(gradients[0].device.type, enabled=False):
            found = _gradients(ctx.saved_tensors, gradients[0], gradients[1], ctx.needs_input_grad[0])
            return *found, None, None, None


def _gradients(
    saved: tuple[Tensor, ...], d_rows: Tensor, d_columns: Tensor, want_words: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of words, patches, weights and Gram matrix from those of both maxima."""
    words, patches, weights, gram, keep, norms, rows, columns, of_word, of_merged = saved
    dtype, merged = patches.dtype, norms.shape[-1]
    keep, of_word, of_merged = keep.to(dtype), of_word.long(), of_merged.long()
    inverse = _inverse(norms)
    slope = (d_columns * columns).scatter_add_(-1, of_word, d_rows * rows).mul_(inverse.square()).mul_(-0.5)
    by_image = keep.transpose(0, 1).contiguous()
    d_weights, d_gram = _norms_backward(slope, weights[..., :merged], gram.to(dtype), by_image)
    del slope, by_image
    d_cosines = torch.zeros(*rows.shape, weights.shape[-1], dtype=dtype, device=rows.device)
    d_cosines.scatter_(-1, of_word[..., None], (d_rows * inverse.gather(-1, of_word)).to(dtype)[..., None])
    d_cosines[..., :merged].scatter_add_(2, of_merged[:, :, None], (d_columns * inverse).to(dtype)[:, :, None])
    d_cosines = d_cosines.flatten(1, 2)
    unit = words.to(dtype)
    products = _masked_products(unit, patches, keep)
    d_all = torch.bmm(products.permute(1, 2, 0), d_cosines)
    d_all[..., :merged] += d_weights
    # P is needed no more: its gradient takes its place.
    torch.bmm(d_cosines, weights.transpose(1, 2), out=products.transpose(0, 1))
    del d_cosines
    d_products = zero_dropped(products.view(*words.shape[:2], -1), keep.flatten(1)).flatten(0, 1)
    d_words = None
    if want_words:
        d_words = (d_products @ patches.flatten(0, 1)).view_as(words).to(words.dtype)
    d_patches = (d_products.T @ unit.flatten(0, 1)).view_as(patches)
    return d_words, d_patches, d_all, d_gram.to(gram.dtype)


def _inverse(norms: Tensor) -> Tensor:
    """`1 / sqrt(n)`, zero for a merged patch of length zero."""
    present = norms > SMALLEST
    return torch.where(present, norms, 1.0).rsqrt() * present
