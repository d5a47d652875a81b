"""k-reciprocal re-ranking of gallery distances (Zhong et al., CVPR 2017) on sparse neighbour lists.

The published code holds three dense N x N matrices. Here each entry keeps its nearest neighbours alone, its
encoding is a short sorted list, and the Jaccard distance is summed through lists inverted over the gallery.

Shape letters: Q queries, G gallery entries, N = Q + G, C features, K neighbours, E entries of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._checks import matrix

if TYPE_CHECKING:
    from ._checks import Array

_BLOCK_ENTRIES = 1 << 23
_TILE_ENTRIES = 1 << 25
_QUERY_ROWS = 512


class _Sparse(NamedTuple):
    """Rows of (column, value) lists: row r holds entries bounds[r] to bounds[r + 1], columns ascending."""

    bounds: Tensor
    columns: Tensor
    values: Tensor


@torch.no_grad()
def rerank(
    query: Array,
    gallery: Array,
    k1: int = 20,
    k2: int = 6,
    lambda_value: float = 0.3,
    *,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Re-ranked distances (Q, G) from features (Q, C) and (G, C), taken as they are given.

    k1: neighbours that must be mutual; k2: neighbours whose encodings are averaged; lambda_value: weight of
    the original distance (squared Euclidean over the row's largest), the rest goes to the Jaccard distance.
    dtype: precision of the encodings. float16 gives the published figures to the last bit or so; float32 is
    the same formula without its rounding (about 0.002 in a distance).
    Memory: the answer, the features and about 1 GB, never N x N. Raises ValueError on wrong shapes or values.
    """
    features, queries = _checked(query, gallery, k1, k2, lambda_value, dtype)
    keep = min(max(k1 + 1, k2), len(features))
    neighbours, largest, original = _nearest(features, queries, keep)
    members = _expanded_sets(neighbours[:, : k1 + 1], neighbours[:, : round(k1 / 2) + 1])
    encoding = _encode(features, largest, *members, dtype)
    if k2 > 1:
        encoding = _average(encoding, neighbours[:, :k2])
    inverted = _invert(encoding, queries)
    # The weight is rounded to `dtype` as well: that is how the published figures came about.
    weight = torch.tensor(1.0 - lambda_value, dtype=dtype, device=features.device)
    for start in range(0, queries, _QUERY_ROWS):
        stop = min(start + _QUERY_ROWS, queries)
        shared = _shared(encoding, inverted, start, stop, len(features) - queries)
        jaccard = 1.0 - shared / (2.0 - shared)
        original[start:stop].mul_(lambda_value).add_(jaccard * weight)
    return original


def _checked(
    query: Array, gallery: Array, k1: int, k2: int, lambda_value: float, dtype: torch.dtype
) -> tuple[Tensor, int]:
    query, gallery = matrix("query", query), matrix("gallery", gallery)
    if query.shape[1] != gallery.shape[1] or query.device != gallery.device:
        raise ValueError(
            f"query {tuple(query.shape)} on {query.device} and gallery {tuple(gallery.shape)} on "
            f"{gallery.device} must have features of one width, on one device."
        )
    if k1 < 1 or k2 < 1:
        raise ValueError(f"k1 and k2 count neighbours and must be 1 or more; got k1={k1}, k2={k2}.")
    if not 0.0 <= lambda_value <= 1.0:
        raise ValueError(f"lambda_value is a weight from 0 to 1; got {lambda_value}.")
    if dtype not in (torch.float16, torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float16, torch.float32 or torch.float64; got {dtype}.")
    double = torch.float64 in (query.dtype, gallery.dtype)
    work = torch.float64 if double else torch.float32
    features = torch.cat([query.to(work), gallery.to(work)])
    if not bool(torch.isfinite(features).all()):
        raise ValueError("The features hold NaN or infinity; no distance can be ranked. Check the model's output.")
    if not bool(torch.isfinite(4 * features.square().sum(dim=1)).all()):
        raise ValueError(f"The features are too large: their squared distances leave {work}. Scale them to length 1.")
    return features, len(query)


def _nearest(features: Tensor, queries: int, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours (N, keep) nearest first, itself included; largest distance (N,); scaled distances (Q, G).

    Each pair's distance is computed once: a tile of rows against itself and all later rows serves both.
    """
    total = len(features)
    squares = features.square().sum(dim=1)
    nearest = (
        features.new_full((total, keep), torch.inf),
        torch.zeros(total, keep, dtype=torch.long, device=features.device),
    )
    # Equal features throughout leave nothing to divide by: the tiny floor makes every scaled distance zero.
    largest = features.new_full((total,), torch.finfo(features.dtype).tiny)
    original = features.new_empty(queries, total - queries)
    size = max(1, _TILE_ENTRIES // total)
    for start in range(0, total, size):
        stop = min(start + size, total)
        tile = torch.addmm(squares[start:], features[start:stop], features[start:].T, alpha=-2.0)
        tile.add_(squares[start:stop, None]).clamp_(min=0.0).diagonal().zero_()
        _merge(nearest, largest, slice(start, stop), tile, start)
        if stop < total:
            _merge(nearest, largest, slice(stop, total), tile[:, stop - start :].T.contiguous(), start)
        if start < queries:
            asked = min(stop, queries)
            original[start:asked] = tile[: asked - start, queries - start :]
    return nearest[1], largest, original.div_(largest[:queries, None])


def _merge(nearest: tuple[Tensor, Tensor], largest: Tensor, rows: slice, tile: Tensor, first: int) -> None:
    """Take the distances of `rows` to the entries from `first` on into what is known of them."""
    values, columns = nearest
    new_values, new_columns = _smallest(tile, min(values.shape[1], tile.shape[1]))
    # The new columns come after all the old ones, so a stable sort leaves equal distances in column order.
    merged, order = torch.cat([values[rows], new_values], dim=1).sort(dim=1, stable=True)
    both = torch.cat([columns[rows], new_columns + first], dim=1)
    values[rows] = merged[:, : values.shape[1]]
    columns[rows] = both.gather(1, order[:, : values.shape[1]])
    largest[rows] = torch.maximum(largest[rows], tile.amax(dim=1))


def _smallest(block: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Each row's smallest values (R, keep) in order and their columns, equal values by column."""
    values, columns = block.topk(min(keep + 1, block.shape[1]), dim=1, largest=False)
    # topk may take any of several values equal to the last one: only then is the whole row sorted.
    tied = values[:, keep - 1 : keep] == values[:, keep:]
    columns, order = columns[:, :keep].sort(dim=1)
    values, again = values.gather(1, order).sort(dim=1, stable=True)
    columns = columns.gather(1, again)
    for some in _chunks(tied.nonzero()[:, 0], 64):
        columns[some] = block[some].sort(dim=1, stable=True).indices[:, :keep]
    return values, columns


def _mutual(neighbours: Tensor) -> Tensor:
    """(N, K) bool: whether the row is in turn among the K neighbours of its neighbour."""
    mutual = torch.empty_like(neighbours, dtype=torch.bool)
    rows = torch.arange(len(neighbours), device=neighbours.device)
    for some in _chunks(rows, _BLOCK_ENTRIES // neighbours.shape[1] ** 2):
        mutual[some] = (neighbours[neighbours[some]] == some[:, None, None]).any(dim=2)
    return mutual


def _expanded_sets(wide: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) of the expanded k-reciprocal sets, sorted by row, then column.

    wide (N, k1 + 1), narrow (N, k1 / 2 + 1): nearest neighbours. A mutual neighbour brings its own mutual
    neighbours of the narrow list along if more than two thirds of them are already in the set.
    """
    total, width = wide.shape
    wide_mutual, narrow_mutual = _mutual(wide), _mutual(narrow)
    parts = []
    everyone = torch.arange(total, device=wide.device)
    for some in _chunks(everyone, _BLOCK_ENTRIES // (width * width * narrow.shape[1])):
        own = wide[some].masked_fill(~wide_mutual[some], -1)
        offered = narrow[wide[some]].masked_fill(~narrow_mutual[wide[some]], -2)
        known = (offered[..., None] == own[:, None, None, :]).any(dim=3).sum(dim=2)
        enough = (3 * known > 2 * (offered >= 0).sum(dim=2)) & (own >= 0)
        brought = offered.masked_fill(~enough[..., None], -1).flatten(1)
        key = some[:, None] * total + torch.cat([own, brought], dim=1)
        key = key[torch.cat([own, brought], dim=1) >= 0]
        parts.append(torch.unique(key))
    keys = torch.cat(parts)
    return keys // total, keys % total


def _encode(features: Tensor, largest: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> _Sparse:
    """Each row's set weighted by exp(-distance) and brought to sum 1."""
    weights = features.new_empty(len(rows))
    everything = torch.arange(len(rows), device=rows.device)
    for some in _chunks(everything, _BLOCK_ENTRIES // features.shape[1]):
        gap = features[rows[some]].sub_(features[columns[some]])
        weights[some] = gap.square_().sum(dim=1).div_(largest[rows[some]]).neg_().exp_()
    bounds = _bounds(rows, len(features))
    sums = torch.segment_reduce(weights, "sum", lengths=bounds.diff())
    return _Sparse(bounds, columns, (weights / sums[rows]).to(dtype))


def _average(encoding: _Sparse, neighbours: Tensor) -> _Sparse:
    """Mean encoding of each row's nearest neighbours, itself included."""
    total, count = neighbours.shape
    keys, values = [], []
    everyone = torch.arange(total, device=neighbours.device)
    for some in _chunks(everyone, 2048):
        near = neighbours[some].flatten()
        owner, entry = _entries(encoding.bounds, near)
        key = some[owner // count] * total + encoding.columns[entry]
        merged, place = torch.unique(key, return_inverse=True)
        # Sums of a few float16 values are exact in float64, so their order does not matter.
        summed = torch.zeros(len(merged), dtype=torch.float64, device=key.device)
        summed.index_add_(0, place, encoding.values[entry].double())
        keys.append(merged)
        values.append((summed / count).to(encoding.values.dtype))
    merged = torch.cat(keys)
    return _Sparse(_bounds(merged // total, total), merged % total, torch.cat(values))


def _invert(encoding: _Sparse, queries: int) -> _Sparse:
    """The gallery's rows transposed: for each of the N columns, the gallery entries that hold it."""
    total = len(encoding.bounds) - 1
    first = int(encoding.bounds[queries])
    rows = torch.repeat_interleave(
        torch.arange(total - queries, device=encoding.columns.device), encoding.bounds.diff()[queries:]
    )
    columns, order = encoding.columns[first:].sort(stable=True)
    return _Sparse(_bounds(columns, total), rows[order], encoding.values[first:][order])


def _shared(encoding: _Sparse, inverted: _Sparse, start: int, stop: int, gallery: int) -> Tensor:
    """Sums of element-wise minima (stop - start, G) between queries' and gallery's encodings.

    Adds the queries' first entries, then the second ones, and so on: within a step no sum is touched twice,
    so the order of rounding is the published one, and the same on every device.
    """
    shared = torch.zeros(stop - start, gallery, dtype=encoding.values.dtype, device=encoding.values.device)
    flat = shared.view(-1)
    begin, end = encoding.bounds[start:stop], encoding.bounds[start + 1 : stop + 1]
    for step in range(int((end - begin).max())):
        row = (begin + step < end).nonzero().squeeze(1)
        own = begin[row] + step
        owner, entry = _entries(inverted.bounds, encoding.columns[own])
        target = row[owner] * gallery + inverted.columns[entry]
        flat[target] += torch.minimum(encoding.values[own][owner], inverted.values[entry])
    return shared


def _entries(bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of the given rows one after the other: (position in `rows` (E,), entry (E,))."""
    lengths = bounds[rows + 1] - bounds[rows]
    owner = torch.repeat_interleave(lengths)
    shift = bounds[rows] - (lengths.cumsum(0) - lengths)
    return owner, torch.arange(len(owner), device=rows.device) + shift[owner]


def _bounds(sorted_rows: Tensor, total: int) -> Tensor:
    """Where each of `total` rows begins and ends in a sorted list of row numbers: (total + 1,)."""
    counts = torch.bincount(sorted_rows, minlength=total)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _chunks(positions: Tensor, size: int) -> Iterator[Tensor]:
    """`positions` (E,) in pieces of at most `size`, which is taken as 1 if it is less."""
    for start in range(0, len(positions), max(1, size)):
        yield positions[start : start + max(1, size)]
