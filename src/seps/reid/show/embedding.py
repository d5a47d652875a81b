"""Vectors to points of a plane: principal components, or t-SNE (van der Maaten and Hinton 2008), both without chance.

Shapes: B vectors of D numbers, (B, 2) points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

STEPS, EXAGGERATED, EXAGGERATION = 750, 250, 12.0
LARGEST = 2000
"""Vectors that t-SNE takes: its tables have a cell for every two of them."""


def pca(vectors: Tensor) -> Tensor:
    """The two directions of largest variance: (B, D) -> (B, 2), each turned so that its largest value is positive."""
    centred = vectors.double() - vectors.double().mean(dim=0)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    points = F.pad(left * sizes, (0, max(0, 2 - len(sizes))))[:, :2]
    largest = points.gather(0, points.abs().argmax(dim=0, keepdim=True))
    return points * torch.where(largest < 0, -1.0, 1.0)


def explained(vectors: Tensor) -> float:
    """The part of the variance that the two components of `pca` have, 0 to 1."""
    centred = vectors.double() - vectors.double().mean(dim=0)
    sizes = torch.linalg.svdvals(centred).square()
    return float(sizes[:2].sum() / sizes.sum().clamp_min(1e-300))


def tsne(vectors: Tensor, perplexity: float = 15.0, steps: int = STEPS) -> Tensor:
    """t-SNE of vectors (B, D) by their Euclidean distances -> (B, 2), started from `pca`.

    Near vectors stay near; distances between groups, and their sizes, mean little. The perplexity is at most a third of
    the vectors. Raises ValueError for more than `LARGEST` vectors.
    """
    count = len(vectors)
    if count > LARGEST:
        raise ValueError(f"t-SNE takes at most {LARGEST} vectors, but got {count}: show fewer, or use PCA.")
    points = pca(vectors)
    if count < 4:
        return points
    wanted = affinities(vectors.double(), min(perplexity, (count - 1) / 3))
    points = 1e-4 * points / points.std().clamp_min(1e-12)
    # The customary rate, B / 12, fits sets of a hundred as well as of thousands.
    rate, moved, gains = max(count / EXAGGERATION, 50.0), torch.zeros_like(points), torch.ones_like(points)
    for step in range(steps):
        early = step < EXAGGERATED
        gradient = _gradient(points, wanted * (EXAGGERATION if early else 1.0))
        turned = (gradient > 0) == (moved > 0)
        gains = torch.where(turned, gains * 0.8, gains + 0.2).clamp_min(0.01)
        moved = (0.5 if early else 0.8) * moved - rate * gains * gradient
        points = points + moved
        points = points - points.mean(dim=0)
    return points


def affinities(vectors: Tensor, perplexity: float) -> Tensor:
    """P of t-SNE (B, B): symmetric, sum 1; each row's Gaussian is as wide as its perplexity asks, by bisection."""
    squares = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares.fill_diagonal_(math.inf)
    nearest = squares.amin(dim=1, keepdim=True)
    low, high = torch.zeros(len(vectors), 1).double(), torch.full((len(vectors), 1), math.inf).double()
    # A first width of the right order: one over the typical distance.
    precision = 1 / squares.masked_fill(squares.isinf(), 0).mean(dim=1, keepdim=True).clamp_min(1e-12)
    for _ in range(60):
        weights = torch.exp(-(squares - nearest) * precision)
        rows = weights / weights.sum(dim=1, keepdim=True)
        entropy = -torch.xlogy(rows, rows).sum(dim=1, keepdim=True)
        wide = entropy > math.log(perplexity)
        low, high = torch.where(wide, precision, low), torch.where(wide, high, precision)
        precision = torch.where(high.isinf(), precision * 2, (low + high) / 2)
    return (rows + rows.T) / (2 * len(vectors))


def _gradient(points: Tensor, wanted: Tensor) -> Tensor:
    """Of the Kullback-Leibler divergence from P to the Student kernel of the points (B, 2)."""
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernel = (1 / (1 + squares)).fill_diagonal_(0)
    forces = (wanted - kernel / kernel.sum()) * kernel
    return 4 * (forces.sum(dim=1, keepdim=True) * points - forces @ points)
