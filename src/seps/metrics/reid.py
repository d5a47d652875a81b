"""Cumulative match curve, mean average precision and mINP of re-identification.

Shape letters: Q queries, G gallery entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._checks import labels, matrix, refuse_nan

if TYPE_CHECKING:
    from ._checks import Array

_BLOCK_ENTRIES = 1 << 22


@dataclass(frozen=True)
class ReidMetrics:
    """cmc (max_rank,) float32 on the CPU, cmc[r - 1] the share of queries with a match among the first r.

    `mINP` is the mean of matches / rank of the hardest match; `valid_queries` had a match left to find. Of each of
    these V queries, on the CPU: its number `queries` (V,), average precision `precisions` (V,), rank of its first match
    `first_ranks` (V,). Their means are mAP and the curve, so that a bootstrap can draw queries or identities anew.
    """

    cmc: Tensor
    mAP: float
    mINP: float
    valid_queries: int
    queries: Tensor | None = None
    precisions: Tensor | None = None
    first_ranks: Tensor | None = None

    def as_dict(self) -> dict[str, float | int]:
        """Plain numbers for JSON: mAP, mINP, r1, r5, r10 (as far as the curve reaches), in percent."""
        places = {f"r{k}": 100.0 * float(self.cmc[k - 1]) for k in (1, 5, 10) if k <= len(self.cmc)}
        return {
            "mAP": 100.0 * self.mAP,
            "mINP": 100.0 * self.mINP,
            **places,
            "valid_queries": self.valid_queries,
        }


def cmc_map(
    distmat: Array, q_pids: Array, g_pids: Array, q_camids: Array, g_camids: Array, max_rank: int = 50
) -> tuple[Tensor, float]:
    """`(cmc, mAP)` by the Market-1501 protocol, from distances (Q, G); arguments and errors as of `reid_metrics`."""
    result = reid_metrics(distmat, q_pids, g_pids, q_camids, g_camids, max_rank)
    return result.cmc, result.mAP


def reid_metrics(
    distmat: Array,
    q_pids: Array,
    g_pids: Array,
    q_camids: Array,
    g_camids: Array,
    max_rank: int = 50,
    *,
    q_sceneids: Array | None = None,
    g_sceneids: Array | None = None,
) -> ReidMetrics:
    """CMC, mAP and mINP from distances (Q, G), identities and cameras (Q,) and (G,).

    Gallery entries with the query's identity and camera are passed over (with scene ids, those with its
    identity and scene instead: MSVR310). Queries left without a match are not counted. Equal distances keep
    the gallery's order. The curve has min(max_rank, G) places. Works in chunks of queries: about 300 MB
    beside `distmat`. Raises ValueError on shapes, NaN, scene ids on one side alone, or no query that counts.
    """
    distances = matrix("distmat", distmat)
    queries, gallery = distances.shape
    if max_rank < 1:
        raise ValueError(f"max_rank must be 1 or more; got {max_rank}.")
    if (q_sceneids is None) != (g_sceneids is None):
        raise ValueError("Scene ids were given for one side only: give both q_sceneids and g_sceneids, or neither.")
    device = distances.device
    q_ids = labels("q_pids", q_pids, queries, device)
    g_ids = labels("g_pids", g_pids, gallery, device)
    q_place = labels("q_camids", q_camids, queries, device)
    g_place = labels("g_camids", g_camids, gallery, device)
    if q_sceneids is not None and g_sceneids is not None:
        q_place = labels("q_sceneids", q_sceneids, queries, device)
        g_place = labels("g_sceneids", g_sceneids, gallery, device)

    parts = []
    rows = max(1, _BLOCK_ENTRIES // gallery)
    for start in range(0, queries, rows):
        block = distances[start : start + rows]
        refuse_nan("distmat", block, start)
        same = q_ids[start : start + rows, None] == g_ids[None, :]
        passed_over = same & (q_place[start : start + rows, None] == g_place[None, :])
        counted, *figures = _query_figures(block, same & ~passed_over, passed_over)
        parts.append((counted + start, *figures))
    numbers, first, precision, inverse = (torch.cat(column) for column in zip(*parts, strict=True))
    if len(first) == 0:
        raise ValueError(
            f"None of the {queries} queries has a match left in the gallery of {gallery} once "
            "those of the same camera (or scene) are removed. Check the identity and camera ids."
        )
    reach = min(max_rank, gallery)
    found = torch.bincount(first.clamp(max=reach + 1).cpu(), minlength=reach + 2)[1 : reach + 1].cumsum(0)
    cmc = (found.double() / len(first)).float()
    own = (numbers.cpu(), precision.cpu(), first.cpu())
    return ReidMetrics(cmc, float(precision.mean()), float(inverse.mean()), len(first), *own)


def _query_figures(block: Tensor, match: Tensor, passed_over: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number, first match's rank, average precision and matches / last match's rank, of the rows with a match."""
    counted = match.any(dim=1)
    block, match, passed_over = block[counted], match[counted], passed_over[counted]
    order = block.sort(dim=1, stable=True).indices
    match = match.gather(1, order)
    place = (~passed_over.gather(1, order)).cumsum(dim=1, dtype=torch.int32)
    found = match.cumsum(dim=1, dtype=torch.int32)
    total = found[:, -1]
    precision = torch.where(match, found.double() / place.clamp(min=1), 0.0).sum(dim=1) / total
    first = place.masked_fill(~match, torch.iinfo(torch.int32).max).amin(dim=1)
    last = place.masked_fill(~match, 0).amax(dim=1)
    return counted.nonzero()[:, 0], first, precision, total.double() / last
