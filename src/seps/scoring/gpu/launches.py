"""Launches of the fused kernels: their block sizes, which of them fit a shape, and their grids.

Shapes: B images, T texts, M words, N patches (Z padded), Q merged patches, P prefix tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_compiled: set[tuple[object, ...]] = set()

HELD_STEP = 64
"""Patches of a block of columns of H, where D stays in shared memory."""
_LEAST_HELD = 64
_MOST_HELD = 256
"""Padded patches of the kernels that keep an operand in shared memory."""
_NARROWEST = 8
"""Columns of a block at least."""
_MOST_COLUMNS = 64
"""Tokens of an image (a power of two) beyond which the alignment with e in shared memory runs out of registers."""


@dataclass(frozen=True)
class KernelSizes:
    """Block sizes of the kernels."""

    select_rows: int = 1
    norm_rows: int = 128
    norm_group: int = 4
    norm_columns: int = 32
    norm_inner: int = 32
    norm_warps: int = 4
    norm_stages: int = 5
    held_rows: int = 256
    held_warps: int = 16
    held_stages: int = 3
    held_splits: int = 1
    """Of the norms with D in shared memory; the tables of an image are split among so many programs."""
    table_columns: int = 128
    align_rows: int = 64
    align_patches: int = 64
    warps: int = 4
    align_stages: int = 3
    align_registers: int | None = None
    """Most registers of a thread in the alignment kernel; None leaves it to the compiler."""
    slot_words: int = 16
    slot_rows: int = 64
    slot_warps: int = 4
    slot_stages: int = 3
    slot_tiles: int = 16
    """Of the alignment with e in shared memory: words of a text at once, words of a tile, and tiles of a program."""
    split_patches: int = 32
    split_stages: int = 3
    split_warps: int = 4
    """Of the alignment kernel in float32."""
    extra_stages: int = 2
    """Of the norms of the extra token in float32."""


def power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def sixteens(count: int) -> int:
    """The smallest multiple of 16 that is at least `count`."""
    return count + -count % 16


def token_columns(tokens: int) -> int:
    """Columns of e for `tokens` = Q + 1 + P tokens."""
    return max(16, power(tokens))


def _large_memory(device: torch.device) -> bool:
    """Whether an operand fits shared memory: on Hopper, for which the sizes were chosen, and in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def fits_held(padded: int, device: torch.device) -> bool:
    """Whether the norms can keep D of `padded` patches in shared memory."""
    return _LEAST_HELD <= padded <= _MOST_HELD and _large_memory(device)


def fits_slots(patches: int, prefix: int, merged: int, device: torch.device) -> bool:
    """Whether the alignment can keep e in shared memory, with the prefix tokens in the padding of the patches."""
    columns = token_columns(merged + 1 + prefix)
    return sixteens(patches + prefix) <= _MOST_HELD and columns <= _MOST_COLUMNS and _large_memory(device)


def announce(name: str, *shape: object) -> None:
    """Log, once a process, that a kernel is compiled for a shape, or read from Triton's cache on disk."""
    if (name, *shape) not in _compiled:
        _compiled.add((name, *shape))
        _log.info("Compiling the %s kernel, or reading it from Triton's cache: %s", name, ", ".join(map(str, shape)))


def doubled(gram: Tensor, step: int) -> Tensor:
    """G (B, Z, Z) with 2 above the diagonal blocks of `step` patches, 1 in them, 0 below."""
    block = torch.arange(gram.shape[-1], device=gram.device) // step
    return gram * ((block[:, None] < block[None, :]).float() * 2 + (block[:, None] == block[None, :]).float())


def table(gram: Tensor, weights: Tensor, dtype: torch.dtype, sizes: KernelSizes, split: bool) -> Tensor:
    """H of all images: (B, Z, Z), (B, Z, Q) -> (B, Z, Q, Z), with `split` (B, Z, 2 Q, Z), without a float32 form."""
    from seps.scoring.gpu import kernels

    images, padded, merged = weights.shape
    made = torch.empty(images, padded, merged * (2 if split else 1), padded, dtype=dtype, device=gram.device)
    rows, columns = 16, sizes.table_columns
    announce("table", columns, dtype, split)
    kernels.table_kernel[(-(-padded // rows), merged, images)](
        gram, weights, made, merged, padded, BI=rows, BJ=columns, SPLIT=split, num_warps=4
    )
    return made


def select(
    cosines: Tensor,
    fixed: Tensor,
    keep: Tensor,
    extra: Tensor,
    *,
    weight: float,
    scale: float,
    kept: int,
    prefix: int,
    learned: bool,
    sizes: KernelSizes,
) -> None:
    """D and the extra token's weights into two (T, B, Z), from cosines (T, B N) and fixed scores (B, N), float32.

    `scale`, a power of two, times the values is the cosines. D is 1 at `prefix` places after the patches.
    """
    from seps.scoring.gpu import kernels

    texts, images, padded = keep.shape
    wide = power(padded)
    announce("selection", wide, prefix, learned, extra.dtype)
    kernels.select_kernel[(-(-texts // sizes.select_rows), images)](
        cosines,
        fixed,
        keep,
        extra,
        weight,
        scale,
        kept,
        texts,
        images,
        fixed.shape[1],
        padded,
        PREFIX=prefix,
        NP=wide,
        ROWS=sizes.select_rows,
        LEARNED=learned,
        num_warps=min(8, max(1, wide * sizes.select_rows // 512)),
    )


def squared_norms(left: Tensor, tables: Tensor, sizes: KernelSizes) -> Tensor:
    """`left^T table_k left`: (T, B, Z), (B, Z, Q, Z) -> (B, T, Q) float32; the operands share their dtype."""
    from seps.scoring.gpu import kernels

    texts, images, padded = left.shape
    merged = tables.shape[2]
    out = torch.empty(images, texts, merged, device=left.device)
    group = min(sizes.norm_group, power(merged))
    single = left.dtype == torch.float32
    announce("norms", group, left.dtype)
    kernels.norms_kernel[(-(-texts // sizes.norm_rows), images, -(-merged // group))](
        left,
        tables.contiguous(),
        out,
        texts,
        images,
        merged,
        padded,
        ROWS=sizes.norm_rows,
        GROUP=group,
        BJ=sizes.norm_columns,
        BI=sizes.norm_inner,
        PRECISION="tf32x3" if single else "tf32",
        num_warps=sizes.norm_warps,
        num_stages=sizes.extra_stages if single else sizes.norm_stages,
    )
    return out


def _column_blocks(padded: int) -> tuple[int, int]:
    """How many whole blocks of columns (3 at most), and the width of the one after them, a power of two or 0."""
    whole = min(3, padded // HELD_STEP)
    rest = padded - HELD_STEP * whole
    return whole, power(rest) if rest else 0


def held_norms(
    left: Tensor,
    tables: Tensor,
    out: Tensor,
    sizes: KernelSizes,
    *,
    count: int,
    first: int = 0,
    inverse: bool = False,
) -> None:
    """`left^T table_k left`, or its inverse root, into `out` (B, R, T) from row `first` on; see `held_norms_kernel`.

    (T, B, Z), (B, Z, Q, Z), both in half precision; the tables are zero beyond `count` patches.
    """
    from seps.scoring.gpu import held_kernels

    texts, images, padded = left.shape
    merged = tables.shape[2]
    whole, last = _column_blocks(padded)
    # A single table is read once: nothing is there to stream.
    single = merged == 1
    rows = min(128, sizes.held_rows) if single else sizes.held_rows
    # Its columns that are not zero, and as many tables at once as fill the width of the other blocks.
    narrow = min(last, max(_NARROWEST, power(max(1, count - HELD_STEP * whole)))) if last else 0
    together = 1 if single or not last else max(1, HELD_STEP // narrow)
    per = -(-merged // (1 if single else sizes.held_splits))
    per += -per % together
    announce("held norms", padded, single, inverse)
    held_kernels.held_norms_kernel[(-(-texts // rows), images, -(-merged // per))](
        left,
        tables,
        out,
        texts,
        images,
        merged,
        padded,
        out.shape[1],
        first,
        per,
        ROWS=rows,
        W=HELD_STEP,
        BLOCKS=whole,
        WL=last,
        CL=last if single else narrow,
        GROUP=1,
        LAST=together,
        EXACT=whole * HELD_STEP + last == padded,
        STAGES=1 if single else sizes.held_stages,
        INVERSE=inverse,
        num_warps=min(8, sizes.held_warps) if single else sizes.held_warps,
    )


def slot_align(
    products: Tensor,
    keep: Tensor,
    extra: Tensor,
    weights: Tensor,
    norms: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    merged: int,
    prefix: int,
    norm_first: int,
    out_first: int,
    leaky: bool,
    ragged: bool,
    sizes: KernelSizes,
) -> None:
    """S of the T texts of `products` (T, M, B, Z) into the columns of `out` from `out_first` on.

    `norms` (B, Q + 1, any) are inverse, those of the texts from `norm_first` on; see `slot_align_kernel`.
    """
    from seps.scoring.gpu import held_kernels

    texts, longest, images, padded = products.shape
    columns = weights.shape[-1]
    whole, last = _column_blocks(padded)
    widths = [HELD_STEP] * whole + ([last] if last else [])
    widths += [0] * (4 - len(widths))
    many = longest > sizes.slot_words
    held = torch.empty(images, texts, columns, device=out.device) if many else norms
    for begin in range(0, longest, sizes.slot_words):
        words = min(sizes.slot_words, longest - begin)
        slot = max(8, power(words))
        slots = max(1, min(16, sizes.slot_rows // slot))
        announce("slot alignment", slots, slot, padded, columns, prefix, ragged, many)
        held_kernels.slot_align_kernel[(images, -(-texts // (slots * sizes.slot_tiles)))](
            products,
            keep,
            extra,
            weights,
            norms,
            lengths,
            held,
            out,
            texts,
            images,
            longest,
            merged,
            padded,
            norms.shape[1],
            norms.shape[2],
            norm_first,
            out.stride(0),
            out_first,
            sizes.slot_tiles,
            begin,
            HEAD=begin == 0,
            TAIL=begin + words == longest,
            PREFIX=prefix,
            SLOTS=slots,
            L=slot,
            W0=widths[0],
            W1=widths[1],
            W2=widths[2],
            W3=widths[3],
            QP=columns,
            LEAKY=leaky,
            RAGGED=ragged,
            EXACT=sum(widths) == padded,
            STAGES=sizes.slot_stages,
            num_warps=sizes.slot_warps * (2 if slots * slot * columns > 4096 else 1),
        )


def align(
    products: Tensor,
    keep: Tensor,
    extra: Tensor,
    weights: Tensor,
    norms: Tensor,
    extra_norms: Tensor,
    prefix_cosines: Tensor,
    lengths: Tensor,
    mlp: Tensor,
    *,
    merged: int,
    columns: int,
    prefix: int,
    first: int,
    top: int,
    leaky: bool,
    split: bool,
    sizes: KernelSizes,
) -> Tensor:
    """S (B, T) of the T texts of `products` (T, M, B, Z).

    Their squared norms are those from text `first` on of `norms` (B, any, Q), in float32 of both halves, and of
    `extra_norms` (B, any, 1); see `align_kernel`.
    """
    from seps.scoring.gpu import kernels

    texts, longest, images, padded = products.shape
    # A wide row of tokens leaves registers for half the words.
    rows = max(sizes.align_rows // (2 if columns > 64 else 1), power(longest))
    per = rows // longest
    out = torch.empty(images, texts, device=products.device)
    announce("alignment", rows, columns, prefix, top, products.dtype)
    kernels.align_kernel[(-(-texts // per), images)](
        products,
        keep,
        extra,
        weights,
        norms,
        extra_norms,
        prefix_cosines,
        lengths,
        mlp,
        out,
        texts,
        images,
        padded,
        longest,
        merged,
        per,
        extra_norms.shape[1],
        first,
        PREFIX=prefix,
        ROWS=rows,
        BN=sizes.split_patches if split else sizes.align_patches,
        PX=max(16, power(per)),
        QP=columns,
        TOP=top,
        HP=power(max(2, 2 * top)),
        LEAKY=leaky,
        SPLIT=split,
        num_warps=sizes.warps if not split else sizes.split_warps * (2 if rows * columns > 4096 else 1),
        num_stages=sizes.split_stages if split else sizes.align_stages,
        **({} if sizes.align_registers is None else {"maxnreg": sizes.align_registers}),
    )
    return out
