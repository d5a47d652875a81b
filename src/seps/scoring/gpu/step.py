"""The large steps of training by kernels (`step_launches`), in half precision and in float32.

In float32 the two largest kinds of products run on tensor cores as well: words with patches as pairs of
half-precision numbers (`half_pairs`), and gradients, whose size is not known, as pairs of TF32 numbers: x is the
nearest TF32 number `high` (11 bits) plus the rest `low`, and `x y = high high' + high low' + low high'` to 22 bits.

Shapes: B images, T texts, M words, N patches (Z padded), C width, Q merged patches (R padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seps.method.precision import float32_products
from seps.scoring.gpu import half_pairs as pairs
from seps.scoring.gpu import step_launches as launches
from seps.scoring.step import Both, TorchStep, masked

_PARTS = 4
"""The rest of the gradients is held for this part of the texts at a time."""
_TF32_BITS, _TF32_HALF = ~0x1FFF, 0x1000


def step_for(patches: Tensor, words: int, columns: int) -> TorchStep:
    """The steps for patches (B, Z, C), texts of `words` words and `columns` = R padded merged patches."""
    if not launches.fits(patches, words, columns):
        return TorchStep()
    return SplitStep() if patches.dtype == torch.float32 else KernelStep()


class KernelStep(TorchStep):
    """Norms and maxima by kernels."""

    def norms(self, weights: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
        """See `TorchStep.norms`."""
        return launches.gram_norms(keep, weights.transpose(1, 2).contiguous(), gram)

    def norm_gradients(self, slopes: Tensor, weights: Tensor, gram: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """See `TorchStep.norm_gradients`."""
        d_weights, d_gram = launches.gram_slopes(keep, weights.transpose(1, 2).contiguous(), gram, slopes)
        return d_weights.transpose(1, 2), d_gram

    def maxima(self, products: Tensor, norms: Tensor, mask: Tensor | None) -> tuple[Both, Both]:
        """See `TorchStep.maxima`."""
        return launches.maxima(products, norms, mask)

    def maxima_gradients(
        self, norms: Tensor, best: Both, places: Both, slopes: Both, padded: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `TorchStep.maxima_gradients`."""
        return launches.maxima_gradients(norms, best, places, slopes, padded, dtype)


class SplitStep(KernelStep):
    """The same in float32, with products of pairs."""

    scale = pairs.UNSCALE

    def products(self, words: Tensor, patches: Tensor, keep: Tensor) -> Tensor:
        """See `TorchStep.products`; words have length 1 and patches at most."""
        flat = pairs.products(pairs.as_left(words.flatten(0, 1)), pairs.as_right(patches.flatten(0, 1)))
        return masked(flat, keep)

    def product_gradients(
        self, slopes: Tensor, words: Tensor, patches: Tensor, keep: Tensor, want_words: bool
    ) -> tuple[Tensor | None, Tensor]:
        """See `TorchStep.product_gradients`."""
        texts, longest, width = words.shape
        flat = patches.flatten(0, 1)
        d_patches = torch.zeros_like(flat)
        d_words = torch.empty_like(words) if want_words else None
        right = split(flat)
        for some in range(0, texts, -(-texts // _PARTS)):
            part = slice(some, some + -(-texts // _PARTS))
            rows = slopes.view(texts, longest, -1)[part].flatten(0, 1)
            left = rows, launches.split_kept(rows, keep[part])
            spoken = split(words[part].reshape(-1, width))
            add_product(d_patches, (left[0].T, left[1].T), spoken)
            if d_words is not None:
                add_product(d_words[part].zero_().view(-1, width), left, right)
        return d_words, d_patches.view_as(patches)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 values into the nearest TF32 numbers and the rest, both float32."""
    high = (values.contiguous().view(torch.int32) + _TF32_HALF).bitwise_and_(_TF32_BITS).view(torch.float32)
    return high, values - high


def add_product(out: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    """Add the product of two split matrices (X, Y) and (Y, C) to `out` (X, C); the small parts come first."""
    with float32_products("tf32"):
        for one, other in ((left[0], right[1]), (left[1], right[0]), (left[0], right[0])):
            out.addmm_(one, other)
