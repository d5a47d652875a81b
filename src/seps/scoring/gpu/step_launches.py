"""Launches of the training step's kernels: their block sizes, and where they can run.

Shapes: B images, T texts, M words, N patches (Z padded), Q merged patches (R padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from seps.scoring.gpu.launches import announce, power
from seps.scoring.step import Both

_MOST_VALUES = 2**14
"""Cosines of a pair (words by merged patches, to powers of two) beyond which a program runs out of registers."""


_SPLIT_WIDTH = 2048


@dataclass(frozen=True)
class StepSizes:
    """Block sizes of the kernels of the training step."""

    width: int = 64
    """Patches of a block of G, of the norms and of their gradients."""
    slope_width: int = 64
    rows: int = 128
    slices: int = 4
    """Texts of a program of the norms; the merged patches of an image are split among so many programs."""
    norm_warps: int = 4
    norm_stages: int = 2
    slope_rows: int = 128
    slope_warps: int = 4
    slope_stages: int = 1


def fits(patches: Tensor, words: int, columns: int) -> bool:
    """Whether the kernels can take texts of `words` words and `columns` = R merged patches."""
    if not patches.is_cuda or find_spec("triton") is None or power(words) * power(columns) > _MOST_VALUES:
        return False
    # Older ones have neither bfloat16 nor TF32.
    return torch.cuda.get_device_capability(patches.device)[0] >= 8


def _sizes(dtype: torch.dtype, sizes: StepSizes | None) -> StepSizes:
    if sizes is not None:
        return sizes
    return StepSizes() if dtype != torch.float32 else StepSizes(width=32, rows=64, slices=2, slope_rows=64)


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def gram_norms(keep: Tensor, weights: Tensor, gram: Tensor, sizes: StepSizes | None = None) -> Tensor:
    """`D^T H_k D`: (T, B, Z), (B, Q, Z), (B, Z, Z) of one dtype -> (B, T, Q) float32."""
    from seps.scoring.gpu import step_kernels

    sizes = _sizes(keep.dtype, sizes)
    texts, images, padded = keep.shape
    merged = weights.shape[1]
    out = torch.empty(images, texts, merged, device=keep.device)
    per = -(-merged // sizes.slices)
    announce("norms of training", keep.dtype, sizes)
    with torch.cuda.device_of(keep):  # type: ignore[no-untyped-call]
        step_kernels.gram_norms_kernel[(-(-texts // sizes.rows), images, -(-merged // per))](
            keep,
            weights,
            gram,
            out,
            texts,
            images,
            merged,
            padded,
            per,
            ROWS=sizes.rows,
            W=sizes.width,
            PRECISION=_precision(keep.dtype),
            num_warps=sizes.norm_warps,
            num_stages=sizes.norm_stages,
        )
    return out


def gram_slopes(
    keep: Tensor, weights: Tensor, gram: Tensor, slopes: Tensor, sizes: StepSizes | None = None
) -> tuple[Tensor, Tensor]:
    """de (B, Q, Z) and dG (B, Z, Z), float32, from dn (B, T, Q) and what `gram_norms` takes."""
    from seps.scoring.gpu import step_kernels

    sizes = _sizes(keep.dtype, sizes)
    texts, images, padded = keep.shape
    merged = weights.shape[1]
    blocks = -(-padded // sizes.slope_width)
    d_gram = torch.empty(images, padded, padded, device=keep.device)
    d_weights = torch.empty(images, blocks, merged, padded, device=keep.device)
    announce("slopes of training", keep.dtype, blocks, sizes)
    with torch.cuda.device_of(keep):  # type: ignore[no-untyped-call]
        step_kernels.gram_slopes_kernel[(images, blocks * (blocks + 1) // 2)](
            keep,
            weights,
            gram,
            slopes,
            d_gram,
            d_weights,
            texts,
            images,
            merged,
            padded,
            ROWS=sizes.slope_rows,
            W=sizes.slope_width,
            BLOCKS=blocks,
            PRECISION=_precision(keep.dtype),
            num_warps=sizes.slope_warps,
            num_stages=sizes.slope_stages,
        )
    return d_weights.sum(dim=1), d_gram


def maxima(products: Tensor, norms: Tensor, mask: Tensor | None) -> tuple[Both, Both]:
    """See `TorchStep.maxima`; the places are int16."""
    from seps.scoring.gpu import step_kernels

    images, texts, longest, columns = products.shape
    merged = norms.shape[-1]
    best = [norms.new_empty(images, texts, size) for size in (longest, merged)]
    places = [torch.empty_like(part, dtype=torch.int16) for part in best]
    announce("maxima of training", power(longest), power(columns), products.dtype, mask is not None)
    with torch.cuda.device_of(norms):  # type: ignore[no-untyped-call]
        step_kernels.maxima_kernel[(texts, images)](
            products,
            norms,
            norms if mask is None else mask.to(torch.uint8),
            *best,
            *places,
            texts,
            longest,
            merged,
            columns,
            MP=power(longest),
            QP=power(columns),
            MASKED=mask is not None,
            num_warps=_warps(longest, columns),
        )
    return (best[0], best[1]), (places[0], places[1])


def maxima_gradients(
    norms: Tensor, best: Both, places: Both, slopes: Both, padded: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `TorchStep.maxima_gradients`."""
    from seps.scoring.gpu import step_kernels

    images, texts, merged = norms.shape
    longest = best[0].shape[-1]
    out = torch.empty(images, texts, longest, padded, dtype=dtype, device=norms.device)
    d_norms = torch.empty_like(norms)
    announce("gradients of maxima", power(longest), power(padded), dtype)
    with torch.cuda.device_of(norms):  # type: ignore[no-untyped-call]
        step_kernels.spread_kernel[(texts, images)](
            norms,
            *best,
            *places,
            *(slope.contiguous() for slope in slopes),
            out,
            d_norms,
            texts,
            longest,
            merged,
            padded,
            MP=power(longest),
            QP=power(padded),
            num_warps=_warps(longest, padded),
        )
    return out, d_norms


def split_kept(values: Tensor, keep: Tensor) -> Tensor:
    """Round float32 values (T * M, B * Z) to TF32, zero where D (T, B, Z) is; the rest of the kept ones comes back."""
    from seps.scoring.gpu import step_kernels

    low = torch.empty_like(values)
    rows, columns = values.shape
    announce("split of training")
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        step_kernels.split_kept_kernel[(rows, -(-columns // _SPLIT_WIDTH))](
            values, keep.contiguous(), low, rows // max(1, len(keep)), columns, WIDE=_SPLIT_WIDTH, num_warps=8
        )
    return low


def _warps(longest: int, columns: int) -> int:
    return min(8, max(1, power(longest) * power(columns) // 1024))
