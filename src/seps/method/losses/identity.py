"""Identity losses of re-identification: label-smoothed cross-entropy and the soft-margin batch-hard triplet.

Shapes: A anchors (the rows of this process), B rows of the whole batch, I identities, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import InputError
from seps.method.precision import float_matmul

_NO_LABEL = -(2**40)


def identity_loss(scores: Tensor, labels: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy with smoothed labels: scores (A, I), labels (A,) -> scalar mean.

    With e = `smoothing` the target is `1 - e + e / I` at the right identity and `e / I` at the others (Szegedy 2016).
    Raises `InputError` for shapes that do not fit, no sample, or labels that are no whole numbers.
    """
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise InputError(
            f"identity_loss needs scores (samples, identities) and labels (samples,), but "
            f"{tuple(scores.shape)} and {tuple(labels.shape)} came."
        )
    if not 0 <= smoothing < 1:
        raise InputError(f"smoothing must be at least 0 and below 1, but {smoothing!r} came.")
    if not len(labels):
        raise InputError("identity_loss is a mean and needs at least one sample, but none came.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels must hold whole numbers, one per sample, but {labels.dtype} came.")
    # torch refuses a label outside the scores, all but its own sign for "pass over", -100: that one is not wanted here.
    return F.cross_entropy(scores.float(), labels, label_smoothing=smoothing, ignore_index=_NO_LABEL)


def batch_hard_triplet(
    features: Tensor,
    labels: Tensor,
    others: Tensor | None = None,
    other_labels: Tensor | None = None,
    *,
    first: int = 0,
) -> Tensor:
    """Soft-margin batch-hard triplet (Hermans 2017): `mean log(1 + exp(d_positive - d_negative))`, Euclidean.

    For each anchor the positive is the farthest row of its identity, the negative the nearest row of another one.
    An anchor without another row of its identity is its own positive, at distance 0.

    Args:
        features, labels: (A, C) and (A,), the anchors.
        others, other_labels: (B, C) and (B,), the rows to compare with, the anchors among them; by default the
            anchors. With several processes: the rows of all processes.
        first: row i of `features` is row `first + i` of `others`.

    Raises `InputError` for shapes that do not fit, and for an anchor without a row of another identity.
    """
    others = features if others is None else others  # (B, C)
    other_labels = labels if other_labels is None else other_labels  # (B,)
    if features.ndim != 2 or labels.shape != features.shape[:1] or other_labels.shape != others.shape[:1]:
        raise InputError(
            f"batch_hard_triplet needs features (rows, width) with one label per row, but {tuple(features.shape)} and "
            f"{tuple(labels.shape)} came, others {tuple(others.shape)} and {tuple(other_labels.shape)}."
        )
    if features.shape[1] != others.shape[1] or not 0 <= first <= len(others) - len(features):
        raise InputError(
            f"features {tuple(features.shape)} must be the rows from first={first} on of others {tuple(others.shape)}."
        )
    return hardest_triplets(euclidean(features, others), labels, other_labels, first=first)


def hardest_triplets(distances: Tensor, labels: Tensor, other_labels: Tensor, *, first: int = 0) -> Tensor:
    """`batch_hard_triplet` from distances (A, B) of any kind; the other arguments as there. Returns the scalar mean.

    Raises `InputError` for an anchor without a row of another identity.
    """
    same = labels[:, None] == other_labels[None, :]  # (A, B)
    if bool(same.all(dim=1).any()):
        raise InputError("an anchor of the triplet loss has no row of another identity: take two or more per batch.")
    itself = torch.arange(len(labels), device=labels.device)[:, None] + first  # (A, 1)
    itself = itself == torch.arange(len(other_labels), device=labels.device)[None, :]  # (A, B)
    # The distance to itself is 0 by definition; computed, it is rounding noise under a square root.
    distances = distances.masked_fill(itself, 0.0)  # (A, B)
    positive = distances.masked_fill(~same, float("-inf")).amax(dim=1)  # (A, B) -> (A,)
    negative = distances.masked_fill(same, float("inf")).amin(dim=1)  # (A, B) -> (A,)
    return F.softplus(positive - negative).mean()


def euclidean(left: Tensor, right: Tensor) -> Tensor:
    """Distances (A, B) of rows (A, C) and (B, C) in float32; the derivative at distance 0 is finite."""
    left, right = left.float(), right.float()  # (A, C), (B, C)
    squared = left.square().sum(1)[:, None] + right.square().sum(1)[None, :] - 2 * float_matmul(left, right.T)  # (A, B)
    return squared.clamp_min(1e-12).sqrt()  # (A, B)
