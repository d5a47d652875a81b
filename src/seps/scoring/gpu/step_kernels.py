"""Triton kernels of the training step: norms of merged patches and both maxima, forward and backward.

gram_norms   n_k = D^T H_k D, from e and G block by block: H is never written
gram_slopes  dG and de from dn, likewise
maxima       the best merged patch of each word and the best word of each merged patch, with their places
spread       the gradient of the products, zero but at those places, and dn
split_kept   values at kept patches as TF32 numbers and the rest

Shapes: B images, T texts, M words, N patches (Z padded), Q merged patches (R padded).
"""

# Kernel code is typed by Triton, not by mypy.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _kept(keep, t, texts, images, b, n, Z):
    """D of rows `t` at patches `n`, as bool: (rows, patches)."""
    place = keep + ((t.to(tl.int64) * images + b) * Z)[:, None] + n[None, :]
    return tl.load(place, mask=(t < texts)[:, None] & (n < Z)[None, :], other=0.0) != 0


@triton.jit
def _chosen(kept, values):
    """`values` where `kept`, else 0."""
    return tl.where(kept, values, tl.zeros_like(values))


@triton.jit
def _block(gram, b, i, j, Z):
    """G at rows `i` and columns `j`."""
    place = gram + b.to(tl.int64) * Z * Z + i[:, None] * Z + j[None, :]
    return tl.load(place, mask=(i < Z)[:, None] & (j < Z)[None, :], other=0.0)


@triton.jit
def _row(values, b, k, n, Q, Z):
    """e_k at patches `n`, from (B, Q, Z)."""
    return tl.load(values + (b.to(tl.int64) * Q + k) * Z + n, mask=n < Z, other=0.0)


@triton.jit(do_not_specialize=["texts", "images", "Q", "PER"])
def gram_norms_kernel(
    keep,
    weights,
    gram,
    out,
    texts,
    images,
    Q,
    Z,
    PER,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """n of `ROWS` texts, one image and `PER` values of k: (T, B, Z), (B, Q, Z), (B, Z, Z) -> (B, T, Q).

    G is symmetric: blocks above its diagonal count twice, those below are not read.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1)
    first = tl.program_id(2) * PER
    n = tl.arange(0, W)
    for k in range(first, tl.minimum(first + PER, Q)):
        total = tl.zeros((ROWS,), tl.float32)
        for j in range(0, Z, W):
            acc = tl.zeros((ROWS, W), tl.float32)
            for i in range(0, j, W):
                left = _chosen(_kept(keep, t, texts, images, b, i + n, Z), _row(weights, b, k, i + n, Q, Z)[None, :])
                acc = tl.dot(left, _block(gram, b, i + n, j + n, Z), acc, input_precision=PRECISION)
            own = _chosen(_kept(keep, t, texts, images, b, j + n, Z), _row(weights, b, k, j + n, Q, Z)[None, :])
            acc = tl.dot(own, _block(gram, b, j + n, j + n, Z), 2.0 * acc, input_precision=PRECISION)
            total += tl.sum(acc * own.to(tl.float32), axis=1)
        tl.store(out + (b.to(tl.int64) * texts + t) * Q + k, total, mask=t < texts)


@triton.jit(do_not_specialize=["texts", "images", "Q"])
def gram_slopes_kernel(
    keep,
    weights,
    gram,
    slopes,
    d_gram,
    d_weights,
    texts,
    images,
    Q,
    Z,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dG (B, Z, Z), and of de (B, BLOCKS, Q, Z) the part of each block of patches, from dn (B, T, Q), all float32.

    With `M_k = sum_t dn_tk D_t D_t^T`: `dG = sum_k e_k M_k e_k` and `de_k = 2 (M_k * G) e_k`. One program per image and
    pair of blocks (i, j) with i <= j; the other half follows from symmetry.
    """
    b = tl.program_id(0)
    pair = tl.program_id(1)
    # Which pair of blocks: row after row of the upper triangle.
    row = 0
    start = 0
    for r in range(1, BLOCKS):
        begins = r * BLOCKS - (r * (r - 1)) // 2
        row = tl.where(pair >= begins, r, row)
        start = tl.where(pair >= begins, begins, start)
    column = row + pair - start
    n = tl.arange(0, W)
    i = row * W + n
    j = column * W + n
    own = _block(gram, b, i, j, Z).to(tl.float32)
    total = tl.zeros((W, W), tl.float32)
    for k in range(0, Q):
        moment = tl.zeros((W, W), tl.float32)
        for first in range(0, texts, ROWS):
            t = first + tl.arange(0, ROWS)
            slope = tl.load(slopes + (b.to(tl.int64) * texts + t) * Q + k, mask=t < texts, other=0.0)
            slope = slope.to(weights.dtype.element_ty)
            left = tl.trans(_chosen(_kept(keep, t, texts, images, b, i, Z), slope[:, None]))
            right = _kept(keep, t, texts, images, b, j, Z).to(weights.dtype.element_ty)
            moment = tl.dot(left, right, moment, input_precision=PRECISION)
        of_i = _row(weights, b, k, i, Q, Z).to(tl.float32)
        of_j = _row(weights, b, k, j, Q, Z).to(tl.float32)
        total += moment * of_i[:, None] * of_j[None, :]
        moment *= own
        place = d_weights + ((b.to(tl.int64) * BLOCKS + column) * Q + k) * Z + i
        tl.store(place, 2.0 * tl.sum(moment * of_j[None, :], axis=1), mask=i < Z)
        if row != column:
            place = d_weights + ((b.to(tl.int64) * BLOCKS + row) * Q + k) * Z + j
            tl.store(place, 2.0 * tl.sum(moment * of_i[:, None], axis=0), mask=j < Z)
    base = d_gram + b.to(tl.int64) * Z * Z
    there = (i < Z)[:, None] & (j < Z)[None, :]
    tl.store(base + i[:, None] * Z + j[None, :], total, mask=there)
    if row != column:
        tl.store(base + j[None, :] * Z + i[:, None], total, mask=there)


@triton.jit
def _inverse(norms):
    return tl.where(norms > 1e-36, 1.0 / tl.sqrt_rn(tl.maximum(norms, 1e-36)), 0.0)


@triton.jit(do_not_specialize=["texts", "longest", "Q"])
def maxima_kernel(
    products,
    norms,
    mask,
    rows,
    columns,
    of_word,
    of_merged,
    texts,
    longest,
    Q,
    R,
    MP: tl.constexpr,
    QP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Both maxima of the cosines of one text and one image, and where they are.

    (B, T, M, R), (B, T, Q), (T, M) -> (B, T, M) and (B, T, Q), float32, and int16 of both. With `MASKED` words whose
    mask is zero are no candidates.
    """
    t = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64) * texts + t
    m = tl.arange(0, MP)
    q = tl.arange(0, QP)
    there = (m < longest)[:, None] & (q < Q)[None, :]
    found = tl.load(products + (pair * longest + m)[:, None] * R + q[None, :], mask=there, other=0.0).to(tl.float32)
    found = found * _inverse(tl.load(norms + pair * Q + q, mask=q < Q, other=0.0))[None, :]
    best, place = tl.max(tl.where((q < Q)[None, :], found, float("-inf")), axis=1, return_indices=True)
    tl.store(rows + pair * longest + m, best, mask=m < longest)
    tl.store(of_word + pair * longest + m, place.to(tl.int16), mask=m < longest)
    spoken = m < longest
    if MASKED:
        spoken = spoken & (tl.load(mask + t * longest + m, mask=m < longest, other=0) != 0)
    best, place = tl.max(tl.where(spoken[:, None], found, float("-inf")), axis=0, return_indices=True)
    tl.store(columns + pair * Q + q, best, mask=q < Q)
    tl.store(of_merged + pair * Q + q, place.to(tl.int16), mask=q < Q)


@triton.jit(do_not_specialize=["texts", "longest", "Q"])
def spread_kernel(
    norms,
    rows,
    columns,
    of_word,
    of_merged,
    d_rows,
    d_columns,
    out,
    slopes,
    texts,
    longest,
    Q,
    R,
    MP: tl.constexpr,
    QP: tl.constexpr,
):
    """From the gradients of both maxima that of the products (B, T, M, R), and dn (B, T, Q) float32."""
    pair = tl.program_id(1).to(tl.int64) * texts + tl.program_id(0)
    m = tl.arange(0, MP)
    q = tl.arange(0, QP)
    words = pair * longest + m
    merged = pair * Q + q
    inverse = _inverse(tl.load(norms + merged, mask=q < Q, other=0.0))
    d_row = tl.load(d_rows + words, mask=m < longest, other=0.0)
    d_column = tl.load(d_columns + merged, mask=q < Q, other=0.0)
    of_row = tl.load(of_word + words, mask=m < longest, other=-1)
    of_column = tl.load(of_merged + merged, mask=q < Q, other=-1)
    by_word = tl.where(q[None, :] == of_row[:, None], d_row[:, None], 0.0)
    by_merged = tl.where(m[:, None] == of_column[None, :], d_column[None, :], 0.0)
    there = (m < longest)[:, None] & (q < R)[None, :]
    tl.store(out + words[:, None] * R + q[None, :], (by_word + by_merged) * inverse[None, :], mask=there)
    row = tl.load(rows + words, mask=m < longest, other=0.0)
    column = tl.load(columns + merged, mask=q < Q, other=0.0)
    slope = tl.sum(by_word * row[:, None], axis=0) + d_column * column
    tl.store(slopes + merged, -0.5 * slope * inverse * inverse, mask=q < Q)


@triton.jit(do_not_specialize=["longest"])
def split_kept_kernel(values, keep, low, longest, COLUMNS, WIDE: tl.constexpr):
    """Of float32 values (T, M, COLUMNS) and D (T, COLUMNS): x to the nearest TF32 number, in place, and the rest."""
    row = tl.program_id(0)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = column < COLUMNS
    kept = tl.load(keep + (row // longest).to(tl.int64) * COLUMNS + column, mask=there, other=0.0) != 0
    place = row.to(tl.int64) * COLUMNS + column
    value = tl.where(kept, tl.load(values + place, mask=there, other=0.0), 0.0)
    high = ((value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    tl.store(values + place, high, mask=there)
    tl.store(low + place, value - high, mask=there)
