"""Any sensor to any sensor: queries by some sensors, a gallery by others, as with a thermal query and a colour gallery.

Where both sides have a sensor in common, its blocks are compared as usual. Where they have none, each side becomes one
vector per branch: the mean of its sensors' blocks at unit length. Such a comparison needs all sensors in one space, to
which the loss `shared` trains them (`loss.shared`).

Shapes: B samples, A anchors (the samples of this process), M sensors of which P are present, R branches, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.losses import batch_hard_triplet
from seps.metrics import ReidMetrics
from seps.reid.data import ReidDataset, ReidReader
from seps.reid.evaluate import Case, Features, distances, extract, measure
from seps.reid.network.model import Pattern, ReidModel, missing_cases


@dataclass(frozen=True)
class PairResult:
    """The figures of queries seen by some sensors against a gallery seen by some."""

    query: tuple[str, ...]
    gallery: tuple[str, ...]
    metrics: ReidMetrics

    @property
    def compared_by(self) -> str:
        """The sensors that both sides have, or "shared space"."""
        return " + ".join(name for name in self.query if name in self.gallery) or "shared space"

    def row(self) -> dict[str, Any]:
        """Plain values for JSON and tables."""
        return {
            "query": list(self.query),
            "gallery": list(self.gallery),
            "compared_by": self.compared_by,
            **self.metrics.as_dict(),
        }


def pooled(features: Features) -> Tensor:
    """(B, R, C): of each branch the mean of the present sensors' blocks at unit length, at unit length."""
    blocks = F.normalize(features.vectors, dim=-1)  # zeros where absent
    return F.normalize((blocks * features.present[:, None, :, None]).sum(dim=2), dim=-1)


def shared_distances(query: Features, gallery: Features) -> Tensor:
    """Cosine distances (Q, G) of the pooled vectors, averaged over the branches."""
    return 1 - torch.einsum("qrc,grc->qg", pooled(query), pooled(gallery)) / query.vectors.shape[1]


def evaluate_pairs(
    model: ReidModel,
    dataset: ReidDataset,
    reader: ReidReader,
    *,
    pattern: Pattern | None = None,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> list[PairResult]:
    """Every set of sensors as query against every set as gallery; absent sensors are left out on both sides.

    Texts have no part: they would be something that every two sets have in common.
    """
    kinds = missing_cases(model.modalities)
    cases = [Case(present, "leave-out", pattern or model.patterns[-1], "none") for present in kinds]
    same = dataset.query == dataset.gallery
    records = dataset.query if same else (*dataset.query, *dataset.gallery)
    features = extract(model, dataset, records, cases, reader, batch_size=batch_size, progress=progress)
    found = dict(zip(kinds, features, strict=True))
    count = len(dataset.query)
    results = []
    for asked in kinds:
        for kept in kinds:
            query, gallery = found[asked][:count], found[kept] if same else found[kept][count:]
            compare = distances if set(asked) & set(kept) else shared_distances
            results.append(PairResult(asked, kept, measure(dataset, compare(query, gallery))))
    return results


def shared_space_loss(own: Tensor, everyone: Tensor, labels: Tensor, present: Tensor, first: int = 0) -> Tensor:
    """The batch-hard triplet of single sensors at unit length, so that an identity is near itself in every sensor.

    Args:
        own, everyone: a branch's features of this process's samples (A, M C) and of all (B, M C).
        labels: (B,), of all. present: (M,) bool, the sensors of the batch.
        first: sample i of `own` is sample `first + i` of `everyone`.
    """
    sensors = int(present.sum())
    sides = [F.normalize(side.view(len(side), len(present), -1)[:, present], dim=-1) for side in (own, everyone)]
    repeated = labels.repeat_interleave(sensors)  # (B P)
    rows = slice(first * sensors, (first + len(own)) * sensors)
    return batch_hard_triplet(
        sides[0].flatten(0, 1), repeated[rows], sides[1].flatten(0, 1), repeated, first=first * sensors
    )


def matrix_of(results: Sequence[PairResult], figure: str) -> list[list[float]]:
    """One figure ("mAP", "r1") as a matrix, a row per set of query sensors, in the order of the results."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for result in results:
        rows.setdefault(result.query, []).append(float(result.metrics.as_dict()[figure]))
    return list(rows.values())
