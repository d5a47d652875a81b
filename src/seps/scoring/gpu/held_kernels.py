"""Triton kernels of the fused backend that keep one operand in shared memory and let the other stream by.

held_norms   D of many texts stays, the tables H_k of one image stream by
slot_align   e of one image stays, the words of the texts stream by, a fixed number of rows for each text

The norms take 64 to 256 padded patches, the alignment up to 256; `kernels` has those for other shapes, and for what
these leave out.

For `slot_align` prefix tokens stand in the padding of the patches: their places in D are 1, their rows of H are zero,
and their columns of e have a single one.

Shapes: B images, T texts, M words, N patches (Z padded), Q merged patches.
"""

# Kernel code is typed by Triton, not by mypy.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _left(rows, present, Z, START: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr):
    """D, or the extra token's weights, of `W` patches: (ROWS, W)."""
    n = START + tl.arange(0, W)
    if EXACT:
        return tl.load(rows + n[None, :], mask=present, other=0.0)
    else:
        return tl.load(rows + n[None, :], mask=present & (n < Z)[None, :], other=0.0)


@triton.jit
def _tile(base, QZ, Z, START: tl.constexpr, W: tl.constexpr, columns, used, EXACT: tl.constexpr):
    """Rows of H of `W` patches: (W, columns)."""
    i = START + tl.arange(0, W)
    place = base + (i * QZ)[:, None] + columns[None, :]
    if EXACT:
        return tl.load(place, mask=used[None, :], other=0.0)
    else:
        return tl.load(place, mask=(i < Z)[:, None] & used[None, :], other=0.0)


@triton.jit
def _sweep(
    a0,
    a1,
    a2,
    own,
    base,
    place,
    t,
    texts,
    first,
    stop,
    Q,
    Z,
    START: tl.constexpr,
    W: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Add what `W` columns of H from `START` on give with `S0`, `S1` and `S2` rows, for k from `first` to `stop`."""
    column = tl.arange(0, GROUP * W)
    one = tl.arange(0, GROUP)
    mine = own.to(tl.float32)
    apart = texts.to(tl.int64)
    for k in tl.range(first, stop, GROUP, num_stages=STAGES):
        columns = (k + column // W) * Z + START + column % W
        used = k + column // W < Q
        if not EXACT:
            used = used & (START + column % W < Z)
        acc = tl.dot(a0, _tile(base, Q * Z, Z, 0, S0, columns, used, EXACT))
        if S1 > 0:
            acc = tl.dot(a1, _tile(base, Q * Z, Z, S0, S1, columns, used, EXACT), acc)
        if S2 > 0:
            acc = tl.dot(a2, _tile(base, Q * Z, Z, S0 + S1, S2, columns, used, EXACT), acc)
        if GROUP == 1:
            spot = place + k * apart + t
            total = tl.sum(acc * mine, axis=1)
            there = t < texts
        else:
            spot = place + (k + one)[None, :] * apart + t[:, None]
            total = tl.sum(tl.reshape(acc, (ROWS, GROUP, W)) * mine[:, None, :], axis=2)
            there = (t < texts)[:, None] & (k + one < Q)[None, :]
        if START > 0:
            total += tl.load(spot, mask=there, other=0.0)
        if INVERSE:
            total = tl.where(total > 1e-36, tl.rsqrt(tl.maximum(total, 1e-36)), 0.0)
        tl.store(spot, total, mask=there)
    # Other threads read these sums in the next sweep.
    tl.debug_barrier()


@triton.jit(do_not_specialize=["texts", "images", "PER", "FIRST", "Q"])
def held_norms_kernel(
    left,
    table,
    out,
    texts,
    images,
    Q,
    Z,
    STRIDE,
    FIRST,
    PER,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    WL: tl.constexpr,
    CL: tl.constexpr,
    GROUP: tl.constexpr,
    LAST: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """`D^T H_k D` of `ROWS` texts, one image and `PER` values of k: (T, B, Z), (B, Z, Q, Z) -> (B, STRIDE, T).

    With `INVERSE` its inverse root, zero for a length of zero. The rows of `out` are written from `FIRST` on. H_k comes
    block after block of columns: 1 to 3 `BLOCKS` of `W` patches, then one of `WL`, with zeros in its columns beyond
    `CL`. The table holds the upper blocks in steps of `W`, those off the diagonal doubled. `GROUP` values of k at once,
    `LAST` in the last block.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1)
    first = tl.program_id(2) * PER
    stop = tl.minimum(first + PER, Q)
    present = (t < texts)[:, None]
    rows = left + ((t.to(tl.int64) * images + b) * Z)[:, None]
    base = table + b.to(tl.int64) * Z * Q * Z
    place = out + (b.to(tl.int64) * STRIDE + FIRST) * texts
    a0 = _left(rows, present, Z, 0, W, EXACT)
    _sweep(
        *(a0, a0, a0, a0, base, place, t, texts, first, stop, Q, Z),
        *(0, W, W, 0, 0, ROWS, GROUP, EXACT, STAGES, INVERSE and BLOCKS == 1 and WL == 0),
    )
    if BLOCKS > 1:
        a0 = _left(rows, present, Z, 0, 2 * W, EXACT)
        c1 = _left(rows, present, Z, W, W, EXACT)
        _sweep(
            *(a0, a0, a0, c1, base, place, t, texts, first, stop, Q, Z),
            *(W, W, 2 * W, 0, 0, ROWS, GROUP, EXACT, STAGES, INVERSE and BLOCKS == 2 and WL == 0),
        )
    if BLOCKS > 2:
        c2 = _left(rows, present, Z, 2 * W, W, EXACT)
        _sweep(
            *(a0, c2, a0, c2, base, place, t, texts, first, stop, Q, Z),
            *(2 * W, W, 2 * W, W, 0, ROWS, GROUP, EXACT, STAGES, INVERSE and WL == 0),
        )
    if WL > 0:
        c3 = _left(rows, present, Z, BLOCKS * W, WL, EXACT)
        own = _left(rows, present, Z, BLOCKS * W, CL, EXACT)
        if BLOCKS == 1:
            _sweep(
                *(a0, c3, a0, own, base, place, t, texts, first, stop, Q, Z),
                *(W, CL, W, WL, 0, ROWS, LAST, EXACT, STAGES, INVERSE),
            )
        elif BLOCKS == 2:
            _sweep(
                *(a0, c3, a0, own, base, place, t, texts, first, stop, Q, Z),
                *(2 * W, CL, 2 * W, WL, 0, ROWS, LAST, EXACT, STAGES, INVERSE),
            )
        else:
            _sweep(
                *(a0, c2, c3, own, base, place, t, texts, first, stop, Q, Z),
                *(3 * W, CL, 2 * W, W, WL, ROWS, LAST, EXACT, STAGES, INVERSE),
            )


@triton.jit
def _piece(
    p_rows,
    there,
    d_rows,
    x_rows,
    shown,
    e,
    sums,
    rests,
    Z,
    START: tl.constexpr,
    W: tl.constexpr,
    SLOTS: tl.constexpr,
    L: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add the products of the words with the kept patches, and with the extra tokens of all texts of the tile."""
    n = START + tl.arange(0, W)
    p_mask = there[:, None]
    d_mask = shown[:, None]
    own = tl.arange(0, 16)
    x_mask = (own < SLOTS)[None, :] & (n >= 0)[:, None]
    if not EXACT:
        p_mask = p_mask & (n < Z)[None, :]
        d_mask = d_mask & (n < Z)[None, :]
        x_mask = x_mask & (n < Z)[:, None]
    p = tl.load(p_rows[:, None] + n[None, :], mask=p_mask, other=0.0)
    d = tl.load(d_rows[:, None] + n[None, :], mask=d_mask, other=0.0)
    x = tl.load(x_rows[None, :] + n[:, None], mask=x_mask, other=0.0)
    kept = tl.reshape(tl.reshape(p, (SLOTS, L, W)) * d[:, None, :], (SLOTS * L, W))
    return tl.dot(kept, e, sums), tl.dot(p, x, rests)


@triton.jit
def _weights(e_rows, Z, QP: tl.constexpr, START: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr):
    """e of `W` patches: (W, QP)."""
    n = START + tl.arange(0, W)
    place = e_rows + (n * QP)[:, None] + tl.arange(0, QP)[None, :]
    if EXACT:
        return tl.load(place)
    else:
        return tl.load(place, mask=(n < Z)[:, None], other=0.0)


@triton.jit(
    do_not_specialize=[
        *("texts", "images", "M", "Q", "norm_texts", "norm_first", "out_stride", "out_first", "TILES", "BEGIN")
    ]
)
def slot_align_kernel(
    products,
    keep,
    extra,
    weights,
    norms,
    lengths,
    columns,
    out,
    texts,
    images,
    M,
    Q,
    Z,
    STRIDE,
    norm_texts,
    norm_first,
    out_stride,
    out_first,
    TILES,
    BEGIN,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    PREFIX: tl.constexpr,
    SLOTS: tl.constexpr,
    L: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    QP: tl.constexpr,
    LEAKY: tl.constexpr,
    RAGGED: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """S of `TILES` times `SLOTS` texts with one image, whose e stays in shared memory; long texts come in parts.

    `L` words from `BEGIN` on take a row each; rows beyond M repeat the last, which changes no maximum over words. From
    the `HEAD` of a long text to its `TAIL` the best word of each token stands in `columns` (B, texts, QP), and the sum
    over its words in `out`. With `RAGGED` some texts have fewer than M words. `products` are (T, M, B, Z) with the
    prefix in the padding, `keep` and `extra` (T, B, Z), `weights` (B, Z, QP), `norms` (B, STRIDE, norm_texts) inverse
    norms from `norm_first` on, the extra token's at Q; out is (B, out_stride),
    written from `out_first` on. LeakyReLU rises, so it is taken of the maxima.
    """
    b = tl.program_id(0)
    ROWS: tl.constexpr = SLOTS * L
    row = tl.arange(0, ROWS)
    local = row // L
    word = row - local * L
    own = tl.arange(0, SLOTS)
    sixteen = tl.arange(0, 16)
    q = tl.arange(0, QP)
    count = Q + 1 + PREFIX
    merged = (q < count) & (q != Q)
    bias = tl.where(merged, 0.0, -1e30)
    share = tl.where(merged, 1.0 / count, 0.0)
    e_rows = weights + b.to(tl.int64) * Z * QP
    e0 = _weights(e_rows, Z, QP, 0, W0, EXACT)
    if W1 > 0:
        e1 = _weights(e_rows, Z, QP, W0, W1, EXACT)
    if W2 > 0:
        e2 = _weights(e_rows, Z, QP, W0 + W1, W2, EXACT)
    if W3 > 0:
        e3 = _weights(e_rows, Z, QP, W0 + W1 + W2, W3, EXACT)
    n_base = norms + b.to(tl.int64) * STRIDE * norm_texts + norm_first
    first = tl.program_id(1) * TILES
    last = tl.minimum(first + TILES, tl.cdiv(texts, SLOTS))
    for tile in tl.range(first, last, num_stages=STAGES):
        head = tile * SLOTS
        t = head + local
        there = t < texts
        mine = head + own
        shown = mine < texts
        length = tl.load(lengths + mine, mask=shown, other=1)
        line = t.to(tl.int64) * M + tl.minimum(BEGIN + word, M - 1)
        p_rows = products + (line * images + b) * Z
        d_rows = keep + (mine.to(tl.int64) * images + b) * Z
        x_rows = extra + (tl.minimum(head + sixteen, texts - 1).to(tl.int64) * images + b) * Z
        sums = tl.zeros([ROWS, QP], dtype=tl.float32)
        rests = tl.zeros([ROWS, 16], dtype=tl.float32)
        sums, rests = _piece(p_rows, there, d_rows, x_rows, shown, e0, sums, rests, Z, 0, W0, SLOTS, L, EXACT)
        if W1 > 0:
            sums, rests = _piece(p_rows, there, d_rows, x_rows, shown, e1, sums, rests, Z, W0, W1, SLOTS, L, EXACT)
        if W2 > 0:
            sums, rests = _piece(p_rows, there, d_rows, x_rows, shown, e2, sums, rests, Z, W0 + W1, W2, SLOTS, L, EXACT)
        if W3 > 0:
            sums, rests = _piece(
                p_rows, there, d_rows, x_rows, shown, e3, sums, rests, Z, W0 + W1 + W2, W3, SLOTS, L, EXACT
            )
        inverse = tl.load(
            n_base + q.to(tl.int64)[None, :] * norm_texts + mine[:, None],
            mask=shown[:, None] & (q < Q)[None, :],
            other=1.0,
        )
        other = tl.load(n_base + Q * norm_texts.to(tl.int64) + mine, mask=shown, other=1.0)
        rest = tl.sum(tl.where(local[:, None] == sixteen[None, :], rests, 0.0), axis=1)
        rest = tl.reshape(rest, (SLOTS, L)) * other[:, None]
        cosine = tl.reshape(sums, (SLOTS, L, QP)) * inverse[:, None, :] + bias[None, None, :]
        best = tl.maximum(tl.max(cosine, axis=2), rest)
        valid = BEGIN + tl.arange(0, L)[None, :] < length[:, None]
        if RAGGED:
            cosine = tl.where(valid[:, :, None], cosine, -1e30)
            rest = tl.where(valid, rest, -1e30)
        column = tl.max(cosine, axis=1)
        across = tl.max(rest, axis=1)
        if LEAKY:
            best = tl.maximum(best, 0.1 * best)
        score = tl.sum(tl.where(valid, best, 0.0), axis=1) / length
        scores = out + b.to(tl.int64) * out_stride + out_first + mine
        if not (HEAD and TAIL):
            # The extra token stands at its own place.
            column = tl.where(q[None, :] == Q, across[:, None], column)
            held = columns + ((b.to(tl.int64) * texts + mine) * QP)[:, None] + q[None, :]
        if not HEAD:
            column = tl.maximum(column, tl.load(held, mask=shown[:, None], other=0.0))
            score += tl.load(scores, mask=shown, other=0.0)
        if TAIL:
            if not HEAD:
                across = tl.max(tl.where(q[None, :] == Q, column, -1e30), axis=1)
            if LEAKY:
                column = tl.maximum(column, 0.1 * column)
                across = tl.maximum(across, 0.1 * across)
            score += tl.sum(column * share[None, :], axis=1) + across / count
        else:
            tl.store(held, column, mask=shown[:, None])
        tl.store(scores, score, mask=shown)
