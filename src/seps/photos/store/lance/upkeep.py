"""Upkeep of a store's table after rows came or went: it costs what was added, not what is there.

A Lance table is a list of parts, one per commit, and an index is a list of segments, each of which covers some parts.

- **Parts** are joined when many are small. Joining copies rows, so parts that are large beside the others stay.
- **Indexes** are extended by a segment for the new rows, with the partitions that the vector index has. A segment is
  merged with the newer ones when they are no longer small beside it. So there are few segments, and a row is copied
  a number of times that grows with the logarithm of the table.
- **Deleted rows** stay in their parts, hidden, until they are a tenth of the table: a part without them has other row
  numbers, for which Lance writes every segment that covers it anew.

Each step is one commit of the table: a process that is killed leaves the last whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FRAGMENTS = 32
"""Small parts of the table beyond which they are joined."""
SMALL_ROWS = 16_384
"""Rows of a part that is large enough not to be joined any more."""
JOINED_ROWS = 65_536
"""Rows that a part gets by joining."""
EXTENDED_ROWS = 1024
"""New rows from which the indexes are extended; fewer are compared one by one in a millisecond."""
DELETED_SHARE = 0.1
"""Deleted rows, of all that are in the parts, from which they are taken out."""
GROWTH = 2
"""A part or a segment is copied with others when it has at most so many times their rows."""
VERSIONS = 64
"""Versions of the table beyond which the old ones are removed, where nothing else made that necessary."""


def parts_to_join(rows: Mapping[int, int]) -> set[int]:
    """Of the parts, `rows` by number, those to join: the small ones but any that is large beside all smaller ones."""
    small = sorted((count, part) for part, count in rows.items() if count < SMALL_ROWS)
    total = sum(count for count, _ in small)
    while small and small[-1][0] > GROWTH * (total - small[-1][0]):
        total -= small.pop()[0]
    return {part for _, part in small}


def segments_to_merge(sizes: Sequence[int], new: int) -> int:
    """How many of the last segments, `sizes` in rows, become one with a segment of `new` rows."""
    count, total = 0, new
    for size in reversed(sizes):
        if size > GROWTH * total:
            break
        count, total = count + 1, total + size
    return count


def join(dataset: Any, *, always: bool = False) -> bool:
    """Join small parts of a Lance dataset where there are many, and take out deleted rows; whether anything changed.

    `always`: join all parts below `JOINED_ROWS`, and take deleted rows out of every part that has a tenth of them.
    """
    parts = {part.fragment_id: part for part in dataset.get_fragments()}
    rows = {number: int(part.physical_rows) for number, part in parts.items()}
    deleted = sum(int(part.num_deletions) for part in parts.values())
    if always or deleted > DELETED_SHARE * sum(rows.values()):
        found = dataset.optimize.compact_files(target_rows_per_fragment=JOINED_ROWS)
    else:
        chosen = parts_to_join(rows)
        if len(chosen) <= FRAGMENTS:
            return False
        left = sorted(parts.keys() - chosen)
        found = dataset.optimize.compact_files(
            target_rows_per_fragment=JOINED_ROWS, excluded_fragment_ids=left, materialize_deletions=False
        )
    return bool(found.fragments_removed)


def extend(dataset: Any, *, few: bool = False) -> bool:
    """Bring the rows that came into every index of a Lance dataset; whether anything changed.

    `few`: also fewer rows than `EXTENDED_ROWS`.
    """
    rows = {part.fragment_id: int(part.physical_rows) for part in dataset.get_fragments()}
    changed = False
    for index in dataset.describe_indices():
        covered = [set(segment.fragment_ids) for segment in index.segments]
        new = sum(count for part, count in rows.items() if not any(part in some for some in covered))
        if new >= EXTENDED_ROWS or (few and new):
            sizes = [sum(rows.get(part, 0) for part in some) for some in covered]
            merged = segments_to_merge(sizes, new)
            dataset.optimize.optimize_indices(index_names=[index.name], num_indices_to_merge=merged)
            changed = True
    return changed
