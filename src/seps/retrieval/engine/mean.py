"""The size `vector` of our models: one vector per picture, and a score that is one product.

    v = (1 - g) p + g d     of a picture with a description, else p
    S(q, v) = slope v q

p, d and q have length one: the mean of the picture's patches, of its description's words and of the query's words, as
the graphs of `seps export --vector` compute them. g is the weight of the description in the model's score. NumPy
alone: an engine without torch keeps and scores pictures by this file.

Shapes: B pictures, T queries, K queries of each picture, C width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from seps.retrieval.config import VECTOR
from seps.retrieval.engine.packing import Array, PackingError, Precision, packed_shape, unpack
from seps.retrieval.engine.queries import Queries

if TYPE_CHECKING:
    from seps.retrieval.engine.layout import ImageColumns

ALIGNED_SLOPE = 1.35
"""About what the alignment of words and patches (Eq. 5, both directions) gains where the cosine of both means gains 1,
measured with `base` on dev."""


def mixed(pixels: Array, words: Array, described: Array, weight: float) -> Array:
    """(B, C) v from p and d (B, C); `described` (B,) bool, `weight` is g."""
    mixture: Array = np.where(described[:, None], (1 - weight) * pixels + weight * words, pixels).astype(np.float32)
    return mixture


@dataclass
class MeanPictures:
    """Pictures of one vector each."""

    vectors: Array
    """(B, C) v."""
    pixels: Array
    """(B, C) p."""
    described: Array
    """(B,) bool."""
    layout: MeanLayout

    def __len__(self) -> int:
        return len(self.vectors)

    def rows(self, start: int, stop: int) -> MeanPictures:
        """Pictures `start` to `stop`."""
        some = slice(start, stop)
        return MeanPictures(self.vectors[some], self.pixels[some], self.described[some], self.layout)

    def without_descriptions(self) -> MeanPictures:
        """The same pictures, their pixels alone."""
        return MeanPictures(self.pixels, self.pixels, np.zeros(len(self), bool), self.layout)

    def as_queries(self) -> Queries:
        """See `Pictures`."""
        return Queries(None, self.pixels)

    def score(self, queries: Array, chosen: Array | None = None) -> Array:
        """(B, T) scores of queries (T, C); with `chosen` (B, K) of each picture with those queries of its own."""
        scores: Array = np.float32(self.layout.slope) * (self.vectors @ queries.T)
        return scores if chosen is None else np.take_along_axis(scores, chosen, axis=1)


@dataclass(frozen=True)
class MeanLayout:
    """v in the column `vector`; of a described picture p in the column `mean`."""

    kind: ClassVar[str] = "mean"
    size: ClassVar[str] = VECTOR
    precision: ClassVar[Precision] = "float16"
    described_column: ClassVar[str] = "mean"
    columns: ClassVar[tuple[str, ...]] = ("vector", "mean")
    appearance_columns: ClassVar[tuple[str, ...]] = ("vector", "mean")

    width: int
    """C."""
    grid: tuple[int, int]
    """The patches, down and across, that p is the mean of."""
    slope: float
    """What a score gains where the product of the vectors gains 1."""

    def __post_init__(self) -> None:
        """Raises ValueError for values that no layout has."""
        if not all(type(value) is int and value > 0 for value in (self.width, *self.grid)) or not self.slope > 0:
            raise ValueError("width, grid and slope must be positive numbers")

    @property
    def vector_width(self) -> int:
        """See `Layout`."""
        return self.width

    @property
    def facts(self) -> dict[str, Any]:
        """See `Layout`."""
        return {"precision": self.precision, "patches": 0, "means": False, "words": None, "kind": self.kind}

    def unpack(self, images: ImageColumns, device: object = "cpu") -> MeanPictures:
        """See `Layout`; the product is the processor's."""
        vectors, means = images.vectors(), images.values("mean")
        pixels, described = vectors.copy(), np.array([mean is not None for mean in means], bool)
        for row in described.nonzero()[0]:
            pixels[row] = unpack(means[row])[0]
        return MeanPictures(vectors, pixels, described, self)

    def appearance(self, images: ImageColumns) -> Array:
        """See `Layout`: p."""
        pixels = self.unpack(images).pixels
        unit: Array = pixels / np.maximum(np.linalg.norm(pixels, axis=1, keepdims=True), 1e-12)
        return unit

    def faults(self, row: Mapping[str, Any]) -> list[str]:
        """See `Layout`."""
        try:
            if row["mean"] is not None:
                right = packed_shape(row["mean"]) == (1, self.width)
                return [] if right else ["the mean of its patches has another width"]
        except PackingError as error:
            return [f"its state is damaged: {error}"]
        length = float(np.linalg.norm(np.array(row["vector"], np.float32)))
        return [] if abs(length - 1) < 1e-3 or not length else [f"its vector has the length {length:.3f}, not 1"]
