"""Upkeep of a large store costs what was added: bytes are counted, and nothing is lost when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seps.images.sources import row_id
from seps.photos.store.lance import table as lance_table
from seps.photos.store.lance import upkeep
from seps.photos.store.lance.table import open_dataset
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from stores import plain_settings

WIDTH, TOKENS = 16, 400
INDEXES = ("vector_idx", "dense_idx", "id_idx")


def names_of(start: int, stop: int) -> list[str]:
    return [f"{number % 7}/{number}.jpg" for number in range(start, stop)]


def vectors_of(start: int, stop: int) -> Any:
    return np.random.default_rng(start).normal(size=(stop - start, WIDTH)).astype(np.float16)


def rows_of(start: int, stop: int) -> list[Row]:
    facts = (1, 1, "0" * 64, 9, 9, b"\xff\xd8")
    noise = np.random.default_rng(start).bytes(TOKENS * (stop - start))
    rows = zip(names_of(start, stop), vectors_of(start, stop), strict=True)
    return [
        Row(row_id(n, None), n, None, *facts, vector, noise[TOKENS * i :][:TOKENS], None, None, None, f"a dog word{n}")
        for i, (n, vector) in enumerate(rows)
    ]


def put(store: Store, start: int, stop: int, step: int) -> None:
    for place in range(start, stop, step):
        store.put(rows_of(place, min(place + step, stop)))


def made(place: Path, count: int, step: int = 2000) -> Store:
    store = Store.create(place, plain_settings(WIDTH, (1, 1)))
    put(store, 0, count, step)
    store.tidy()
    return store


class Traffic:
    """Bytes that all datasets opened by a store read and wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Any] = []
        monkeypatch.setattr(lance_table, "open_dataset", self.open)

    def open(self, location: str) -> Any:
        self.opened.append(open_dataset(location))
        return self.opened[-1]

    def spent(self) -> int:
        found = [dataset.io_stats_incremental() for dataset in self.opened]
        return sum(one.read_bytes + one.written_bytes for one in found)


def segments(store: Store) -> dict[str, list[int]]:
    """Rows of the segments of each index."""
    dataset = open_dataset(store.location)
    rows = {part.fragment_id: part.count_rows() for part in dataset.get_fragments()}
    return {
        index.name: [sum(rows[part] for part in segment.fragment_ids) for segment in index.segments]
        for index in dataset.describe_indices()
    }


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_table, "INDEX_ABOVE", 5_000)
    monkeypatch.setattr(upkeep, "EXTENDED_ROWS", 200, raising=False)
    monkeypatch.setattr(upkeep, "SMALL_ROWS", 1_000, raising=False)


@pytest.mark.parametrize("step", [400, 10])
def test_adding_costs_the_same_in_a_store_of_three_times_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Few large commits, and more small ones than `FRAGMENTS`, which are joined."""
    spent = []
    for count in (6_000, 18_000):
        store = made(tmp_path / str(count), count)
        traffic = Traffic(monkeypatch)
        put(store, count, count + 400, step)
        traffic.spent()
        store.tidy()
        spent.append(traffic.spent())
        assert all(sizes == [count, 400] for sizes in segments(store).values())
        assert {"dense_idx", "id_idx", "vector_idx"} <= set(segments(store))
    # The list of the partitions is read, and they are as many as the square root of the rows.
    assert spent[1] < 3**0.5 * spent[0]


def test_writing_reads_ids_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index of ids Lance reads whole rows of all that came since: a run's cost was the square of its rows."""
    store = made(tmp_path / "s", 6_000)
    traffic = Traffic(monkeypatch)
    reads = []
    for start in range(6_000, 9_000, 500):
        before = sum(one.io_stats_incremental().read_bytes for one in traffic.opened)
        store.put(rows_of(start, start + 500))
        reads.append(sum(one.io_stats_incremental().read_bytes for one in traffic.opened))
        assert before == 0
    assert max(reads) - min(reads) < 2_500 * 50  # an id is of 20 bytes, a row of 500


@pytest.mark.parametrize("indexed", [False, True])
def test_one_column_is_set_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    """Without an index of ids Lance read every column of every row, for each commit, and copied what changed."""
    monkeypatch.setattr(lance_table, "INDEX_ABOVE", 2_000 if indexed else 5_000)
    store = Store.create(tmp_path / "s", plain_settings(WIDTH, (1, 1)))
    put(store, 0, 3_000, 1_000)
    store.tidy()
    put(store, 3_000, 3_100, 100)
    parts = [(part.physical_rows, part.num_deletions) for part in open_dataset(store.location).get_fragments()]
    ids = [row_id(name, None) for name in names_of(2_990, 3_010)]
    traffic = Traffic(monkeypatch)
    store.put_excluded(dict.fromkeys(ids, True))
    assert traffic.spent() < 3_100 * 100
    assert store.settings.excluded == 20
    store.put_excluded({ids[0]: False, ids[19]: False})
    dataset = open_dataset(store.location)
    assert parts == [(part.physical_rows, part.num_deletions) for part in dataset.get_fragments()]
    found = {row["id"]: row["excluded"] for some in store.scan(["id", "excluded"]) for row in some.rows()}
    assert len(found) == 3_100 and {one for one, flag in found.items() if flag} == set(ids[1:19])
    assert store.settings.excluded == 18
    store.tidy()
    assert all(sum(sizes) == 3_100 for sizes in segments(store).values())
    whole = {row.id: row.tokens for start in range(0, 3_000, 1_000) for row in rows_of(start, start + 1_000)}
    assert all(whole[name] == row.tokens for name, row in store.rows(ids[:10]).items())


def test_segments_stay_few_and_find_what_an_exact_search_finds(tmp_path: Path) -> None:
    """Recall after many additions is that of an index made anew; every id and every word is found."""
    store, count = made(tmp_path / "s", 6_000), 6_000
    for _ in range(12):
        put(store, count, count + 250, 50)
        count += 250
        store.tidy()
    for sizes in segments(store).values():
        assert sum(sizes) == count == len(store) and len(sizes) <= 4
    starts = [*range(0, 6_000, 2000), *range(6_000, count, 50)]
    stored = [vectors_of(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]
    vectors = np.concatenate(stored).astype(np.float32)
    queries = np.random.default_rng(5).normal(size=(40, WIDTH)).astype(np.float32)
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]

    def recall() -> float:
        found = [set(store.nearest(query, 10, ["path"]).values("path")) for query in queries]
        wanted = [set(np.array(names_of(0, count))[places]) for places in best]
        return sum(len(a & b) for a, b in zip(found, wanted, strict=True)) / best.size

    extended = recall()
    open_dataset(store.location).drop_index("vector_idx")
    store.tidy()
    assert segments(store)["vector_idx"] == [count]
    assert extended >= recall() - 0.01 and extended > 0.97
    for number in (3, 6_100, count - 1):
        name = names_of(number, number + 1)[0]
        assert store.get(row_id(name, None), ["path"]) == {"path": name}
        assert row_id(name, None) in store.containing(str(number), 5)


def test_a_store_that_has_grown_gets_another_number_of_partitions(tmp_path: Path) -> None:
    store = made(tmp_path / "s", 5_000)
    facts = open_dataset(store.location).stats.index_stats("vector_idx")["indices"]
    assert [one["num_partitions"] for one in facts] == [70]
    put(store, 5_000, 12_000, 3_500)
    store.tidy()
    facts = open_dataset(store.location).stats.index_stats("vector_idx")["indices"]
    assert [one["num_partitions"] for one in facts] == [109]


def test_the_parts_that_are_joined_are_small_and_none_is_copied_often() -> None:
    sizes = {0: 70_000, 1: 900, 2: 100, **dict.fromkeys(range(10, 50), 5)}
    assert upkeep.parts_to_join(sizes) == {2, *range(10, 50)}
    assert upkeep.parts_to_join({0: 3, 1: 1, **dict.fromkeys(range(10, 50), 500)}) == {0, 1, *range(10, 50)}
    assert upkeep.parts_to_join({0: 3}) == upkeep.parts_to_join({}) == set()
    parts: dict[int, int] = {}
    copied = 0
    for number in range(4_000):  # one commit a day
        parts[number] = 1
        chosen = upkeep.parts_to_join(parts)
        if len(chosen) > upkeep.FRAGMENTS:
            joined = sum(parts.pop(part) for part in chosen)
            parts[number] = joined
            copied += joined
    assert len(parts) < 2 * upkeep.FRAGMENTS
    assert copied < 10 * 4_000


def test_segments_are_merged_when_they_are_not_large_beside_the_new() -> None:
    assert upkeep.segments_to_merge([1000], 400) == 0
    assert upkeep.segments_to_merge([1000], 500) == 1
    assert upkeep.segments_to_merge([1000, 100, 30], 20) == 2
    assert upkeep.segments_to_merge([], 20) == 0
    sizes, copied = [1_000_000], 0
    for _ in range(1000):
        merged = upkeep.segments_to_merge(sizes, 1000)
        last = sum(sizes[len(sizes) - merged :]) + 1000
        sizes = [*sizes[: len(sizes) - merged], last]
        copied += last
        assert len(sizes) <= 9
    assert copied < 12 * 1_000_000


def test_deleted_rows_leave_the_disk_when_they_are_a_tenth(tmp_path: Path) -> None:
    store = made(tmp_path / "s", 6_000)
    before = store.disk_bytes()
    ids = [row_id(name, None) for name in names_of(0, 3_000)]
    store.delete(ids[:300])
    store.tidy()
    assert store.disk_bytes() > 0.95 * before
    store.delete(ids[300:])
    store.tidy()
    assert len(store) == 3_000 and store.disk_bytes() < 0.7 * before
    assert store.get(ids[1], ["id"]) is None and len(store.nearest(np.ones(WIDTH), 5_000, ["id"])) == 3_000


def test_versions_do_not_pile_up_without_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store from which pictures only leave, or whose settings change, was never cleaned."""
    monkeypatch.setattr(upkeep, "VERSIONS", 8, raising=False)
    store = made(tmp_path / "s", 200)
    for name in names_of(0, 20):
        store.delete([row_id(name, None)])
        store.tidy()
        assert len(open_dataset(store.location).versions()) <= 9
    assert len(store) == 180


_SCRIPT = """
import sys
from seps.photos.store.lance import table, upkeep
from seps.photos.store import store as stores
table.INDEX_ABOVE, upkeep.EXTENDED_ROWS, upkeep.SMALL_ROWS = 5_000, 200, 1_000
from pathlib import Path
own = Path(sys.argv[3])
sys.path[:0] = [str(own.parent), str(own.parents[2])]
import test_store_upkeep as own
store, first = stores.Store.open(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    own.put(store, first, first + 400, 10)
    first += 400
    print(first, flush=True)
    store.tidy()
"""


def killed(place: Path, first: int, seconds: float) -> int:
    """Add rows to a store in another process, kill it so long after its first rows; how many rows it told of."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(place), str(first), __file__], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    told = int(process.stdout.readline())
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    return max([told, *map(int, rest.split())])


@pytest.mark.slow
@pytest.mark.parametrize("moments", [tuple(0.05 * n for n in range(int(os.environ.get("SEPS_KILLS", "2"))))])
def test_killed_during_upkeep(tmp_path: Path, moments: Sequence[float]) -> None:
    """Whatever was committed is there once, and indexes answer as a scan does; the next upkeep removes what is left."""
    place, count = tmp_path / "s", 6_000
    made(place, count)
    for moment in moments:
        told = killed(place, count, moment)
        store = Store.open(place)
        count = len(store)
        assert count >= told and count % 10 == 0
        ids = [row_id(name, None) for name in names_of(0, count)]
        assert set(store.select([ids[-1], ids[0], ids[told - 1]], ["id"]).values("id")) == {
            ids[-1],
            ids[0],
            ids[told - 1],
        }
        found = [identity for some in store.scan(["id"], batch_size=8192) for identity in some.values("id")]
        assert sorted(found) == sorted(ids)
    store.tidy()
    put(store, count, count + 400, 100)
    store.tidy()
    assert all(sum(sizes) == count + 400 for sizes in segments(store).values())
    dataset = open_dataset(store.location)
    listed = {Path(file.path).name for part in dataset.get_fragments() for file in part.data_files()}
    assert {path.name for path in place.rglob("data/*.lance")} == listed
    assert len(dataset.versions()) == 1
    assert len(set(store.nearest(np.ones(WIDTH), count + 400, ["path"]).values("path"))) == count + 400
