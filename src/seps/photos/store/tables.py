"""What a store asks of its table, and what passes between them: columns of images, and how candidates are chosen.

Lance and SQLite have tables (`seps.photos.store.lance`, `seps.photos.store.sqlite`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from seps.photos.store.rows import Row, StoreSettings
from seps.retrieval.engine.packing import Array

POOL = 8
"""Times the square root of the rows: images found by their vectors from which a `CandidateEstimate` chooses. The best
by the whole score lie among more of the nearest in a larger store, though not among a constant part of them."""


class Columns:
    """Some columns of some images, as they were read; `len` is the number of images. Values are lists by name."""

    def __init__(self, values: Mapping[str, Sequence[Any]]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(next(iter(self._values.values()), ()))

    def part(self, start: int, count: int) -> Columns:
        """At most `count` of the images."""
        return Columns({name: column[start : start + count] for name, column in self._values.items()})

    def chosen(self, wanted: Sequence[bool]) -> Columns:
        """The images that are wanted."""
        places = [place for place, one in enumerate(wanted) if one]
        return Columns({name: [column[place] for place in places] for name, column in self._values.items()})

    def only(self, names: Sequence[str]) -> Columns:
        """These columns."""
        return Columns({name: self._values[name] for name in names})

    def values(self, name: str) -> list[Any]:
        """One column as plain values."""
        return list(self._values[name])

    def rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Per image its columns (those of `names`) by name."""
        names = list(self._values) if names is None else names
        return [dict(zip(names, row, strict=True)) for row in zip(*(self._values[name] for name in names), strict=True)]

    def vectors(self, name: str = "vector") -> Array:
        """(B, C) float32: a column of vectors."""
        column = self._values[name]
        return np.stack(list(column)).astype(np.float32) if len(column) else np.empty((0, 0), np.float32)

    def blobs(self, name: str) -> Array | list[bytes]:
        """A column of bytes: (B, size) uint8 where all have one size, else a list."""
        column = self.values(name)
        sizes = {None if value is None else len(value) for value in column}
        if len(sizes) != 1 or None in sizes or sizes == {0}:
            return column
        return np.frombuffer(b"".join(column), np.uint8).reshape(len(column), -1)


@dataclass(frozen=True)
class CandidateEstimate:
    """What is known of an image's score before it is computed: `slope * product of vectors + level * bank`."""

    slope: float
    """About what a score grows by with the product."""
    level: float
    """Times the image's level over the bank of background queries."""

    def best(self, distances: Array, levels: Array, count: int) -> Array:
        """Places of the `count` best images, in their order; of equal ones the first.

        `distances` are 1 - product, `levels` NaN where there is none: such an image counts as the mean of the others.
        """
        known = levels[~np.isnan(levels)]
        usual = float(known.mean()) if len(known) else 0.0
        values = self.slope * (1 - distances.astype(np.float64)) + self.level * np.where(
            np.isnan(levels), usual, levels.astype(np.float64)
        )
        chosen: Array = np.sort(np.argsort(-values, kind="stable")[:count])
        return chosen


def pool(count: int, rows: int) -> int:
    """Images to find by their vectors where `count` candidates are chosen by a `CandidateEstimate`."""
    return max(2 * count, int(POOL * rows**0.5))


class Table(Protocol):
    """The rows of a store, and its settings.

    Reading is of the version that was opened, or of a later one; `again` opens the newest. Each write is one commit,
    all of it or nothing. Conditions are SQL over the columns. A table raises what its database raises (`rows.ERRORS`).
    """

    @property
    def version(self) -> int:
        """Of the commit that was opened."""
        ...

    @property
    def settings(self) -> str:
        """As `write_settings` got them. Raises KeyError without any."""
        ...

    def again(self) -> Table:
        """The table at its newest commit."""
        ...

    def count(self, where: str | None = None) -> int:
        """Rows that fit a condition."""
        ...

    def read(self, columns: Sequence[str], where: str | None, limit: int | None = None) -> Columns:
        """Some columns of the rows that fit, in any order."""
        ...

    def batches(self, columns: Sequence[str], where: str | None, size: int) -> Iterator[Columns]:
        """The same in batches."""
        ...

    def nearest(
        self, query: Array, count: int, columns: Sequence[str], where: str | None, estimate: CandidateEstimate | None
    ) -> Columns:
        """Rows whose vectors have the largest products with `query` (C,), best first; with `estimate`, of several times
        as many those that it finds best."""
        ...

    def containing(self, word: str, limit: int) -> set[str]:
        """Ids of rows with a word of letters and digits in their texts; of each way to look at most `limit`."""
        ...

    def described(self) -> int:
        """Rows with a description or with text in the picture."""
        ...

    def indexed(self, column: str) -> bool:
        """Whether a column has an index."""
        ...

    def disk_bytes(self) -> int:
        """Of the newest commit."""
        ...

    def put(self, rows: Sequence[Row], settings: StoreSettings) -> None:
        """Add rows, or take the place of those with the same id."""
        ...

    def set_column(self, name: str, by_id: Mapping[str, Any]) -> None:
        """Set one column of some rows."""
        ...

    def clear_levels(self) -> None:
        """Have the column `bank`, and no value in it."""
        ...

    def delete(self, where: str) -> None:
        """Take rows out."""
        ...

    def write_settings(self, text: str) -> None:
        """Keep these settings from now on."""
        ...

    def tidy(self, *, always: bool) -> None:
        """Upkeep after rows came or went; with `always` all that can be done."""
        ...
