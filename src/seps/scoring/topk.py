"""Where rows of scores go: a whole matrix, or only the best of each query.

Shapes: B images, T texts, k best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seps.nn.checks import InputError


@dataclass
class TopK:
    """The best of each query, best first; of equal scores the lower index comes first."""

    scores: Tensor
    """(queries, k) float32."""
    indices: Tensor
    """(queries, k) positions in the gallery."""


def best_of(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row and their positions, ties to the lower position."""
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True)
    return ranked.values[:, :count], ranked.indices[:, :count]


class Matrix:
    """Collects rows into (B, T), in `out` where given."""

    def __init__(self, out: Tensor | None, images: int | None, texts: int, device: torch.device) -> None:
        if out is not None and (
            out.dim() != 2 or out.shape[1] != texts or (images is not None and out.shape[0] != images)
        ):
            raise InputError(
                f"out has the shape {tuple(out.shape)}, but the scores are "
                f"({images if images is not None else 'images'}, {texts})."
            )
        self._device, self._texts = device, texts
        if out is None and images is not None:
            out = torch.empty(images, texts, device=device)
        self._out = out
        self._rows: list[Tensor] = []
        self._done = 0

    def add(self, rows: Tensor) -> None:
        """Take the scores (b, T) of the next images."""
        if self._out is None:
            self._rows.append(rows)
            return
        stop = self._done + rows.shape[0]
        if stop > self._out.shape[0]:
            raise InputError(f"out has room for {self._out.shape[0]} images, but more came; make it larger.")
        self._out[self._done : stop] = rows.to(self._out.device)
        self._done = stop

    def result(self) -> Tensor:
        """The matrix (B, T)."""
        if self._out is not None:
            return self._out[: self._done] if self._done < self._out.shape[0] else self._out
        if not self._rows:
            return torch.empty(0, self._texts, device=self._device)
        return torch.cat(self._rows)


class BestPerText:
    """Keeps the best k images of every text while images stream by."""

    def __init__(self, count: int, texts: int, device: torch.device) -> None:
        self._count = count
        self._scores = torch.empty(texts, 0, device=device)
        self._indices = torch.empty(texts, 0, dtype=torch.long, device=device)
        self._done = 0

    def add(self, rows: Tensor) -> None:
        """Take the scores (b, T) of the next images."""
        new = torch.arange(self._done, self._done + rows.shape[0], device=rows.device)
        scores = torch.cat([self._scores, rows.T], dim=1)
        indices = torch.cat([self._indices, new.expand(rows.shape[1], -1)], dim=1)
        self._scores, places = best_of(scores, self._count)
        self._indices = indices.gather(1, places)
        self._done += rows.shape[0]

    def result(self) -> TopK:
        """The best of each text: (T, k)."""
        return TopK(self._scores, self._indices)


class BestPerImage:
    """Keeps the best k texts of every image."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor) -> None:
        """Take the scores (b, T) of the next images."""
        self._parts.append(best_of(rows, self._count))

    def result(self) -> TopK:
        """The best of each image: (B, k)."""
        if not self._parts:
            return TopK(torch.empty(0, self._count), torch.empty(0, self._count, dtype=torch.long))
        scores, indices = zip(*self._parts, strict=True)
        return TopK(torch.cat(scores), torch.cat(indices))
