"""Triton kernels of the fused backend; `launches` starts them, `factored` explains the mathematics.

select   cosines -> scores -> D and the extra token's weights, one row of N values in registers
table    H_k = diag(e_k) G diag(e_k) of the images alone, once for all texts
norms    D^T H_k D from the upper blocks of H, without writing D H
align    (P * D) e, cosines, both maxima, pooling and the top-k MLP, without writing any of them

`held_kernels` has faster norms and alignment for the usual shapes.

With `SPLIT` float32 numbers are multiplied as pairs of half-precision numbers (`pairs`): P and the extra token's
weights come in float32, e and H as two tables each, `hi` and `LOW * lo`. D is zeros and ones, and exact in half
precision.

Block sizes are arguments, and nothing is autotuned: the same kernels run in Triton's interpreter. What changes from
block to block is not specialised, so that each kernel is compiled once for a shape.

Shapes: B images, T texts, M words, N patches (Z padded), C width, Q merged patches, K = Q + 1 + prefix tokens.
"""

# Kernel code is typed by Triton, not by mypy.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from seps.scoring.gpu import half_pairs as pairs

_LOW = tl.constexpr(pairs.LOW)
_UNSCALE = tl.constexpr(pairs.UNSCALE)


@triton.jit
def _order(values):
    """Float32 numbers as unsigned integers of the same order; -0 must have become +0."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _value(keys):
    """The float32 numbers of `_order`."""
    bits = keys.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _halves(values):
    """`hi` and `LOW * lo` of float32 values, as `half_pairs.split`."""
    high = values.to(tl.float16)
    return high, ((values - high.to(tl.float32)) * _LOW).to(tl.float16)


@triton.jit(do_not_specialize=["texts", "images"])
def select_kernel(
    cosines,
    fixed,
    keep,
    extra,
    weight,
    scale,
    kept,
    texts,
    images,
    N,
    Z,
    PREFIX: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    LEARNED: tl.constexpr,
):
    """D and the extra weights of `ROWS` texts with one image: (T, B, N) float32 -> two (T, B, Z).

    `scale`, a power of two, times the values is the cosines. D is 1 at `PREFIX` places after the patches.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1)
    n = tl.arange(0, NP)
    present = t < texts
    inside = (n < N)[None, :] & present[:, None]
    row = (t.to(tl.int64) * images + b)[:, None]
    attention = tl.load(cosines + row * N + n[None, :], mask=inside, other=0.0) * scale
    if LEARNED:
        low = tl.min(tl.where(inside, attention, float("inf")), axis=1)[:, None]
        high = tl.max(tl.where(inside, attention, float("-inf")), axis=1)[:, None]
        low = tl.where(present[:, None], low, 0.0)
        high = tl.where(present[:, None], high, 0.0)
        attention = tl.div_rn(attention - low, high - low + 1e-8)
    base = tl.load(fixed + b * N + n, mask=n < N, other=0.0)[None, :]
    # Adding zero turns -0 into +0, which the integer keys would tell apart.
    scores = base + weight * attention + 0.0
    key = tl.where(inside, _order(scores), 0)
    # Search for the largest key that at least `kept` keys reach. It may end before, where exactly `kept` do: the same
    # patches are chosen then. `many` keys reach `least`, `few` reach `beyond`: the next key to try lies between them as
    # `kept` does, and every third time in the middle, so that no distribution makes it slow. Rows of no text are done
    # from the start.
    lowest = tl.min(tl.where(inside, scores, float("inf")), axis=1)
    highest = tl.max(tl.where(inside, scores, float("-inf")), axis=1)
    least = _order(tl.where(present, lowest, 0.0))
    beyond = _order(tl.where(present, highest, 0.0)) + 1
    many = tl.zeros([ROWS], dtype=tl.int32) + N
    few = tl.zeros([ROWS], dtype=tl.int32)
    done = ((beyond - least) <= 1) | (present == 0) | (kept >= N)
    step = 0
    while tl.min(done.to(tl.int32), axis=0) == 0:
        part = (many - kept).to(tl.float32) + 0.5
        part = part / tl.maximum(many - few, 1).to(tl.float32)
        start = _value(least)
        guess = _order(start + (_value(beyond - 1) - start) * part + 0.0)
        middle = least + ((beyond - least) >> 1)
        middle = tl.where((step % 3 == 2) | (guess <= least) | (guess >= beyond), middle, guess)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), axis=1)
        enough = count >= kept
        going = done == 0
        least = tl.where(enough & going, middle, least)
        many = tl.where(enough & going, count, many)
        few = tl.where(enough | done, few, count)
        beyond = tl.where(enough | done, beyond, middle)
        done = done | (count == kept) | ((beyond - least) <= 1)
        step += 1
    chosen = (key >= least[:, None]) & inside
    tied = present & (many > kept) & (kept < N)
    if tl.max(tied.to(tl.int32), axis=0) > 0:
        above = key > least[:, None]
        level = (key == least[:, None]) & inside
        room = kept - tl.sum(above.to(tl.int32), axis=1)
        chosen = above | (level & (tl.cumsum(level.to(tl.int32), axis=1) <= room[:, None]))
    dropped = inside & (chosen == 0)
    top = tl.max(tl.where(dropped, scores, -1e30), axis=1)[:, None]
    rest = tl.where(dropped, tl.exp(tl.minimum(scores - top, 0.0)), 0.0)
    ones = chosen | ((n >= N) & (n < N + PREFIX))[None, :]
    written = (n < Z)[None, :] & present[:, None]
    where = row * Z + n[None, :]
    tl.store(keep + where, ones.to(keep.dtype.element_ty), mask=written)
    tl.store(extra + where, rest.to(extra.dtype.element_ty), mask=written)


@triton.jit
def table_kernel(gram, weights, table, Q, Z, BI: tl.constexpr, BJ: tl.constexpr, SPLIT: tl.constexpr):
    """`e_ik G_ij e_jk` of one image, one k and `BI` patches: (B, Z, Z), (B, Z, Q) float32 -> (B, Z, Q, Z).

    With `SPLIT` the result is (B, Z, 2 Q, Z): `hi` of all k, then `LOW * lo`.
    """
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    k = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * Z
    left = tl.load(weights + (first + i) * Q + k, mask=i < Z, other=0.0)
    for start in range(0, Z, BJ):
        j = start + tl.arange(0, BJ)
        inside = (i < Z)[:, None] & (j < Z)[None, :]
        g = tl.load(gram + ((first + i) * Z)[:, None] + j[None, :], mask=inside, other=0.0)
        right = tl.load(weights + (first + j) * Q + k, mask=j < Z, other=0.0)
        h = g * right[None, :] * left[:, None]
        if SPLIT:
            high, low = _halves(h)
            place = table + (((first + i) * 2 * Q + k) * Z)[:, None] + j[None, :]
            tl.store(place, high, mask=inside)
            tl.store(place + Q * Z, low, mask=inside)
        else:
            place = table + (((first + i) * Q + k) * Z)[:, None] + j[None, :]
            tl.store(place, h.to(table.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["texts", "images"])
def norms_kernel(
    left,
    table,
    out,
    texts,
    images,
    Q,
    Z,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BJ: tl.constexpr,
    BI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`D^T H_k D` for `ROWS` texts, one image and `GROUP` merged patches: (T, B, Z), (B, Z, Q, Z) -> (B, T, Q).

    The table holds the upper blocks of H in steps of `BJ` patches, those off the diagonal doubled. `PRECISION` is that
    of float32 operands.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1)
    first = tl.program_id(2) * GROUP
    present = (t < texts)[:, None]
    rows = left + ((t.to(tl.int64) * images + b) * Z)[:, None]
    column = tl.arange(0, GROUP * BJ)
    q = first + column // BJ
    total = tl.zeros([ROWS, GROUP], dtype=tl.float32)
    base = table + b.to(tl.int64) * Z * Q * Z
    for start in range(0, Z, BJ):
        j = start + column % BJ
        used = ((q < Q) & (j < Z))[None, :]
        acc = tl.zeros([ROWS, GROUP * BJ], dtype=tl.float32)
        for begin in range(0, tl.minimum(start + BJ, Z), BI):
            i = begin + tl.arange(0, BI)
            a = tl.load(rows + i[None, :], mask=present & (i < Z)[None, :], other=0.0)
            h = tl.load(base + i[:, None] * (Q * Z) + (q * Z + j)[None, :], mask=(i < Z)[:, None] & used, other=0.0)
            acc += tl.dot(a, h, input_precision=PRECISION)
        jj = start + tl.arange(0, BJ)
        right = tl.load(rows + jj[None, :], mask=present & (jj < Z)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(tl.reshape(acc, (ROWS, GROUP, BJ)) * right[:, None, :], axis=2)
    k = first + tl.arange(0, GROUP)
    place = (b.to(tl.int64) * texts + t)[:, None] * Q + k[None, :]
    tl.store(out + place, total, mask=present & (k < Q)[None, :])


@triton.jit
def _leaky(x, LEAKY: tl.constexpr):
    if LEAKY:
        x = tl.where(x > 0, x, 0.1 * x)
    return x


@triton.jit
def _relevance(values, place, mlp, TOP: tl.constexpr, HP: tl.constexpr):
    """The MLP of Eq. 5 over the `TOP` best of a vector; values below -1e29 do not exist and count as zero.

    `mlp` holds, one after the other, W1 (2 TOP, TOP), b1 (2 TOP), W2 (2 TOP), b2.
    """
    h = tl.arange(0, HP)
    real = h < 2 * TOP
    hidden = tl.load(mlp + 2 * TOP * TOP + h, mask=real, other=0.0)
    for i in range(TOP):
        best = tl.max(values, axis=0)
        at = tl.min(tl.where(values == best, place, 1 << 30), axis=0)
        hidden += tl.load(mlp + h * TOP + i, mask=real, other=0.0) * tl.where(best > -1e29, best, 0.0)
        values = tl.where(place == at, -1e30, values)
    active = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
    second = tl.load(mlp + 2 * TOP * TOP + 2 * TOP + h, mask=real, other=0.0)
    bias = tl.load(mlp + 2 * TOP * TOP + 4 * TOP)
    return tl.sum(tl.where(real, active * second, 0.0), axis=0) + bias


@triton.jit(do_not_specialize=["texts", "images", "M", "PER", "norm_texts", "norm_first"])
def align_kernel(
    products,
    keep,
    extra,
    weights,
    norms,
    extra_norms,
    prefix,
    lengths,
    mlp,
    out,
    texts,
    images,
    Z,
    M,
    Q,
    PER,
    norm_texts,
    norm_first,
    PREFIX: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    PX: tl.constexpr,
    QP: tl.constexpr,
    TOP: tl.constexpr,
    HP: tl.constexpr,
    LEAKY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """S of `PER` texts (of up to M words, `PER * M <= ROWS`, `PER <= PX`) with one image.

    `products` are (T, M, B, Z), `weights` (B, Z, QP), `prefix` (T, M, B, PREFIX) cosines; out is (B, T). `norms` are
    (B, norm_texts, Q), `extra_norms` (B, norm_texts), those of the texts from `norm_first` on. With `SPLIT` weights and
    norms have two halves, (B, Z, 2 QP) and (B, norm_texts, 2 Q), and products and prefix cosines come without their
    `UNSCALE`.
    """
    b = tl.program_id(1)
    head = tl.program_id(0) * PER
    row = tl.arange(0, ROWS)
    local = row // M
    word = row - local * M
    t = head + local
    present = (local < PER) & (t < texts)
    valid = present & (word < tl.load(lengths + t, mask=present, other=0))
    line = t.to(tl.int64) * M + word
    q = tl.arange(0, QP)
    own = tl.arange(0, PX)
    shown = (own < PER) & (head + own < texts)
    p_rows = products + ((line * images + b) * Z)[:, None]
    d_rows = keep + ((t.to(tl.int64) * images + b) * Z)[:, None]
    x_rows = extra + (((head + own).to(tl.int64) * images + b) * Z)[None, :]
    e_width = QP * 2 if SPLIT else QP
    e_rows = weights + b.to(tl.int64) * Z * e_width
    sums = tl.zeros([ROWS, QP], dtype=tl.float32)
    rests = tl.zeros([ROWS, PX], dtype=tl.float32)
    low_sums = tl.zeros([ROWS, QP if SPLIT else 1], dtype=tl.float32)
    low_rests = tl.zeros([ROWS, PX if SPLIT else 1], dtype=tl.float32)
    for start in range(0, Z, BN):
        n = start + tl.arange(0, BN)
        seen = present[:, None] & (n < Z)[None, :]
        p = tl.load(p_rows + n[None, :], mask=seen, other=0.0)
        d = tl.load(d_rows + n[None, :], mask=seen, other=0.0)
        x = tl.load(x_rows + n[:, None], mask=shown[None, :] & (n < Z)[:, None], other=0.0)
        e = tl.load(e_rows + (n * e_width)[:, None] + q[None, :], mask=(n < Z)[:, None], other=0.0)
        # D is zeros and ones: the product is exact in half precision.
        # Every word meets the extra tokens of all texts here, and keeps its own below.
        if SPLIT:
            p_high, p_low = _halves(p)
            x_high, x_low = _halves(x)
            e_low = tl.load(e_rows + (n * e_width + QP)[:, None] + q[None, :], mask=(n < Z)[:, None], other=0.0)
            kept_high = p_high * d
            sums += tl.dot(kept_high, e)
            low_sums += tl.dot(kept_high, e_low)
            low_sums += tl.dot(p_low * d, e)
            rests += tl.dot(p_high, x_high)
            low_rests += tl.dot(p_high, x_low)
            low_rests += tl.dot(p_low, x_high)
        else:
            sums += tl.dot(p * d, e)
            rests += tl.dot(p, x)
    if SPLIT:
        sums = (sums + low_sums / _LOW) * _UNSCALE
        rests = (rests + low_rests / _LOW) * _UNSCALE
    rest = tl.sum(tl.where(local[:, None] == own[None, :], rests, 0.0), axis=1)
    own_norm = b.to(tl.int64) * norm_texts + norm_first + t
    place = own_norm[:, None]
    merged = present[:, None] & (q < Q)[None, :]
    if SPLIT:
        norm = tl.load(norms + place * 2 * Q + q[None, :], mask=merged, other=1.0)
        norm += tl.load(norms + place * 2 * Q + (Q + q)[None, :], mask=merged, other=0.0) / _LOW
    else:
        norm = tl.load(norms + place * Q + q[None, :], mask=merged, other=1.0)
    cosine = tl.where(norm > 1e-36, sums * tl.rsqrt(tl.maximum(norm, 1e-36)), 0.0)
    norm = tl.load(extra_norms + own_norm, mask=present, other=1.0)
    rest = tl.where(norm > 1e-36, rest * tl.rsqrt(tl.maximum(norm, 1e-36)), 0.0)
    cosine = tl.where((q == Q)[None, :], rest[:, None], cosine)
    for p in tl.static_range(PREFIX):
        value = tl.load(prefix + (line * images + b) * PREFIX + p, mask=present, other=0.0).to(tl.float32)
        if SPLIT:
            value *= _UNSCALE
        cosine = tl.where((q == Q + 1 + p)[None, :], value[:, None], cosine)
    count = Q + 1 + PREFIX
    cosine = tl.where((q < count)[None, :], _leaky(cosine, LEAKY), -1e30)
    best = tl.max(cosine, axis=1)
    for i in range(PER):
        mine = valid & (local == i)
        column = tl.max(tl.where(mine[:, None], cosine, -1e30), axis=0)
        score = tl.sum(tl.where(mine, best, 0.0), axis=0) / tl.maximum(tl.sum(mine.to(tl.int32), axis=0), 1)
        score += tl.sum(tl.where(q < count, column, 0.0), axis=0) / count
        if TOP > 0:
            score += _relevance(tl.where(mine, best, -1e30), row, mlp, TOP, HP)
            score += _relevance(tl.where(q < count, column, -1e30), q, mlp, TOP, HP)
        here = head + i
        tl.store(out + b.to(tl.int64) * texts + here, score, mask=here < texts)
