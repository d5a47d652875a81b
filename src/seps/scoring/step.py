"""The large steps of `maxima`, forward and backward, in plain torch; `gpu.step` has them as kernels.

Shapes: B images, T texts, M words, N patches (Z padded for the products), C width, Q merged patches (R padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seps.scoring.terms import inverse_norms, row_dots, zero_dropped

Both = tuple[Tensor, Tensor]
"""Something of the words (B, T, M), and of the merged patches (B, T, Q)."""


class TorchStep:
    """The steps on any device; P, e, H, D, n and X are those of `factored`."""

    scale = 1.0
    """Times this `products` are P * D."""

    def products(self, words: Tensor, patches: Tensor, keep: Tensor) -> Tensor:
        """P * D over `scale`: (T, M, C), (B, Z, C), (T, B, Z) -> (T * M, B, Z)."""
        return masked(words.flatten(0, 1) @ patches.flatten(0, 1).T, keep)

    def product_gradients(
        self, slopes: Tensor, words: Tensor, patches: Tensor, keep: Tensor, want_words: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of the words (None unless wanted) and patches, from dX e^T (T * M, B, Z), which is overwritten."""
        slopes = masked(slopes.flatten(1), keep).flatten(1)
        d_patches = slopes.T @ words.flatten(0, 1)
        d_words = (slopes @ patches.flatten(0, 1)).view_as(words) if want_words else None
        return d_words, d_patches.view_as(patches)

    def norms(self, weights: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
        """n: (B, Z, Q), (B, Z, Z), (T, B, Z) -> (B, T, Q) float32."""
        by_image = keep.transpose(0, 1).contiguous()
        batch, texts, count = by_image.shape
        table = (gram[:, :, None, :] * weights.transpose(1, 2).contiguous()[:, None]).mul_(weights[..., None])
        rows = torch.bmm(by_image, table.flatten(2)).view(batch * texts, -1, count)
        return row_dots(rows, by_image.view(batch * texts, count)).view(batch, texts, -1)

    def norm_gradients(self, slopes: Tensor, weights: Tensor, gram: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """de (B, Z, Q) and dG (B, Z, Z) from dn (B, T, Q); H is symmetric, and so is its gradient."""
        by_image = keep.transpose(0, 1).contiguous()
        batch, _, count = by_image.shape
        spread = (slopes.to(keep.dtype)[..., None] * by_image[:, :, None, :]).flatten(2)
        table = torch.bmm(by_image.transpose(1, 2), spread).view(batch, count, -1, count)
        table.mul_(weights.transpose(1, 2).contiguous()[:, None])
        d_weights = 2 * torch.matmul(table, gram[..., None]).squeeze(-1)
        return d_weights, torch.matmul(weights[:, :, None], table).squeeze(2)

    def maxima(self, products: Tensor, norms: Tensor, mask: Tensor | None) -> tuple[Both, Both]:
        """The largest cosine of each word and of each merged patch, float32, and the places of both.

        From X (B, T, M, R), n (B, T, Q) and the mask (T, M) of the words.
        """
        cosines = products[..., : norms.shape[-1]].float().mul_(inverse_norms(norms)[:, :, None])
        rows, of_word = cosines.max(dim=-1)
        if mask is not None:
            cosines.masked_fill_(~mask[:, :, None], torch.finfo(torch.float32).min)
        columns, of_merged = cosines.max(dim=2)
        small = torch.int16 if max(cosines.shape[2:]) < 2**15 else torch.int32
        return (rows, columns), (of_word.to(small), of_merged.to(small))

    def maxima_gradients(
        self, norms: Tensor, best: Both, places: Both, slopes: Both, padded: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """dX (B, T, M, R = `padded`) of `dtype` and dn (B, T, Q) float32, from the gradients of both maxima."""
        (rows, columns), (d_rows, d_columns) = best, slopes
        of_word, of_merged = (place.long() for place in places)
        inverse = inverse_norms(norms)
        d_norms = (d_columns * columns).scatter_add_(-1, of_word, d_rows * rows).mul_(inverse.square()).mul_(-0.5)
        spread = torch.zeros(*rows.shape, padded, dtype=dtype, device=rows.device)
        spread.scatter_(-1, of_word[..., None], (d_rows * inverse.gather(-1, of_word)).to(dtype)[..., None])
        merged = spread[..., : norms.shape[-1]]
        merged.scatter_add_(2, of_merged[:, :, None], (d_columns * inverse).to(dtype)[:, :, None])
        return spread, d_norms


def masked(flat: Tensor, keep: Tensor) -> Tensor:
    """Zero at dropped patches, in place: (T * M, B * Z), (T, B, Z) -> (T * M, B, Z)."""
    texts, batch, count = keep.shape
    return zero_dropped(flat.view(texts, -1, batch * count), keep.flatten(1)).view(-1, batch, count)
