"""What a store of many pictures needs: indexes that stay whole while rows come, filters, and parts joined cheaply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seps.images.sources import row_id
from seps.photos.store.filters import Filters
from seps.photos.store.lance.table import open_dataset
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from stores import plain_settings

ROWS, WIDTH = 12_000, 16
FEW = 30


def vectors(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float16)


def put(store: Store, names: list[str], values: Any) -> None:
    facts = (1, 1, "0" * 64, 9, 9, b"\xff\xd8")
    rows = zip(names, values, strict=True)
    store.put([Row(row_id(n, None), n, None, *facts, vector, b"", None, None, None, n) for n, vector in rows])


def make(place: Path, count: int = ROWS) -> Store:
    """`FEW` rows in the folder `few`, the others in `many`."""
    store = Store.create(place, plain_settings(WIDTH, (1, 1)))
    put(store, [f"few/{i}" if i < FEW else f"many/{i}" for i in range(count)], vectors(count))
    return store


def index_facts(store: Store) -> tuple[int, int, int]:
    """Parts of the vector index, partitions of the first, rows that are in none."""
    facts = open_dataset(store.location).stats.index_stats("vector_idx")
    return len(facts["indices"]), facts["indices"][0]["num_partitions"], facts["num_unindexed_rows"]


@pytest.fixture
def indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("seps.photos.store.lance.table.INDEX_ABOVE", 10_000)
    store = make(tmp_path / "s")
    store.tidy()
    assert index_facts(store) == (1, 109, 0)
    return store


def test_a_filter_finds_all_of_its_pictures_beside_an_index(indexed: Store) -> None:
    """Few pictures of a folder lie in many partitions: looking into some of them would lose the others."""
    for seed in range(5):
        found = indexed.nearest(vectors(1, seed + 1)[0], FEW, ["path"], Filters(folder="few")).values("path")
        assert sorted(found) == sorted(f"few/{i}" for i in range(FEW))


def test_as_many_as_asked_for_are_found_beside_an_index(indexed: Store) -> None:
    found = indexed.nearest(vectors(1, 1)[0], ROWS, ["path"]).values("path")
    assert len(set(found)) == ROWS


def test_an_index_keeps_its_partitions_when_rows_are_added(indexed: Store) -> None:
    """New rows join the partitions that there are, in a segment of their own until they are many."""
    names = [f"many/new-{i}" for i in range(2_000)]
    values = 3 * vectors(2_000, 9)
    put(indexed, names[:500], values[:500])
    indexed.tidy(always=True)
    assert index_facts(indexed) == (2, 109, 0)
    put(indexed, names[500:], values[500:])
    indexed.tidy(always=True)
    assert index_facts(indexed) == (2, 109, 0)
    for place in (0, 700, 1_999):  # what is nearest to a long vector is that vector
        assert indexed.nearest(3 * values[place].astype(np.float32), 1, ["path"]).values("path") == [names[place]]
    for name in ("few/3", names[0], names[-1]):
        assert indexed.get(row_id(name, None), ["path"]) == {"path": name}
    assert row_id(names[-1], None) in indexed.containing("1999", 9)


def test_joining_small_parts_leaves_large_ones_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a million pictures the other way rewrites many gigabytes for some new photos."""
    monkeypatch.setattr("seps.photos.store.lance.upkeep.SMALL_ROWS", 1000)
    store = make(tmp_path / "s", 3000)
    store.tidy(always=True)
    before = {path.name for path in (tmp_path / "s").rglob("data/*")}
    for i in range(40):
        put(store, [f"more/{i}"], vectors(1, i))
    store.tidy()
    after = {path.name for path in (tmp_path / "s").rglob("data/*")}
    assert before <= after
    assert len(after) == len(before) + 1
    assert len(store) == 3040
