"""How the vectors of a store are found, and how those of a large store are indexed.

The index is an inverted file with whole vectors (IVF_FLAT): the vectors are
clustered into partitions, a query is compared with all centres and then with every vector of the nearest partitions.
Nothing is rounded, so it loses what lies in other partitions and nothing else. One-bit codes (IVF_RQ) take a tenth of
the space, but at 200,000 vectors they needed four times as many vectors read again from the table, which took three
times as long as the whole search.

A dot product grows with the length of a vector, and queries are sentences and not pictures: the nearest pictures of a
sentence lie in more partitions than those of a picture would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from seps.photos.store.tables import CandidateEstimate, pool
from seps.retrieval.engine.packing import Array

PROBED_SHARE = 1 / 8
"""Partitions that a query looks into, of all; `benchmarks.search.million` measures the recall of other shares."""
LEAST_PROBES = 64
"""In a smaller index: the rows of so many partitions are compared in milliseconds, and with 32 of 110 partitions of
vectors without any clusters the recall fell to 0.94."""
REBUILT_FACTOR = 1.5
"""The index is made anew when the number of partitions that it should have is so many times what it has, or the other
way round: when the store has 2.25 times the rows that it had. Until then new rows join the partitions that there are
(`upkeep`)."""
NAME = "vector_idx"


def partitions(rows: int) -> int:
    """Partitions of an index of `rows` rows: the square root, so that centres are as many as the rows of a partition.

    The time of a query is that of `partitions + probes * rows / partitions` products, which is least near here.
    """
    return max(1, int(rows**0.5))


def probes(rows: int) -> int:
    """Partitions that a query looks into at least; more where a filter or a large count leaves too few images."""
    return max(LEAST_PROBES, round(PROBED_SHARE * partitions(rows)))


def outdated(rows: int, made: Sequence[int]) -> bool:
    """Whether an index whose segments have `made` partitions each is made anew for `rows` rows.

    Segments of one index share their partitions. Where they do not, another program has changed the index.
    """
    wanted = partitions(rows)
    return len(set(made)) != 1 or not wanted / REBUILT_FACTOR <= made[0] <= wanted * REBUILT_FACTOR


def is_outdated(dataset: Any) -> bool:
    """`outdated` of the index of a Lance dataset."""
    segments = dataset.stats.index_stats(NAME)["indices"]
    return outdated(dataset.count_rows(), [int(segment.get("num_partitions", 0)) for segment in segments])


def build(dataset: Any, rows: int) -> None:
    """Index the vectors of a Lance dataset of `rows` rows; an index that is there is replaced."""
    parts = {"num_partitions": partitions(rows), "metric": "dot"}
    dataset.create_index("vector", "IVF_FLAT", name=NAME, replace=True, **parts)


def nearest(
    dataset: Any,
    query: Array,
    count: int,
    columns: Sequence[str],
    where: str | None,
    estimate: CandidateEstimate | None = None,
) -> Any:
    """An Arrow table of the `count` rows of a Lance dataset whose vectors have the largest products with `query`, best
    first; with `estimate` of those that it finds best, of several times as many rows. `where` is a condition in SQL."""
    rows = dataset.count_rows()
    # No effort beyond the least number of partitions, and no largest one: that would make a condition lose rows.
    effort = {"minimum_nprobes": probes(rows), "search_effort": 0.0}
    asked = {"column": "vector", "q": query, "k": count, "metric": "dot", **effort}
    more: dict[str, Any] = {"filter": where, "prefilter": True}
    if estimate is None:
        return dataset.to_table(nearest=asked, columns=[*columns, "_distance"], **more)
    asked["k"] = pool(count, rows)
    near = dataset.to_table(nearest=asked, columns=["bank", "_distance"], with_row_id=True, **more)
    distances, levels = (near.column(name).to_numpy().astype("float32") for name in ("_distance", "bank"))
    return _rows(dataset, near.column("_rowid").to_numpy()[estimate.best(distances, levels, count)], columns)


def _rows(dataset: Any, chosen: Array, columns: Sequence[str]) -> Any:
    """An Arrow table of rows by their numbers, in this order. They are those of this version of the table."""
    named = f"_rowid IN ({', '.join(map(str, chosen.tolist())) or 'NULL'})"
    found = dataset.to_table(columns=list(columns), filter=named, with_row_id=True)
    places = {row: place for place, row in enumerate(found.column("_rowid").to_pylist())}
    return found.take(pa.array([places[row] for row in chosen.tolist()], pa.int64())).drop_columns("_rowid")
