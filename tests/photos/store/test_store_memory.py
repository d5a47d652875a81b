"""What a store of many pictures holds in memory and reads, counted in bytes per picture."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seps.images.sources import row_id
from seps.photos.store import store as store_module
from seps.photos.store.lance.table import open_dataset
from seps.photos.store.rows import IndexedFile, Row
from seps.photos.store.store import Store
from stores import gallery, index, plain_settings

FEW, MANY = 2_000, 12_000


def put(store: Store, start: int, stop: int, words: int = 2) -> None:
    facts = (1, 1, "0" * 64, 9, 9, b"\xff\xd8", np.ones(4, np.float16), b"", None, None, None)
    names = [f"{number}.jpg" for number in range(start, stop)]
    texts = [" ".join(f"{name}{i}" for i in range(words)) if number % 2 else None for number, name in enumerate(names)]
    store.put([Row(row_id(n, None), n, None, *facts, text) for n, text in zip(names, texts, strict=True)])


def filled(place: Path, count: int, words: int = 2) -> Store:
    store = Store.create(place, plain_settings(4, (1, 1)))
    for start in range(0, count, 1_000):
        put(store, start, start + 1_000, words)
    return store


def growth(stores: list[Store], work: Callable[[Store], Any]) -> float:
    """Bytes of Python's memory per picture at the most: what more pictures add."""
    peaks = []
    for store in stores:
        work(store)  # what a first call keeps is no part of it
        tracemalloc.start()
        kept = work(store)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del kept
    return (peaks[1] - peaks[0]) / (MANY - FEW)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    place = tmp_path_factory.mktemp("memory")
    return [filled(place / str(count), count) for count in (FEW, MANY)]


def test_reading_everything_holds_little_more_than_the_ids(stores: list[Store]) -> None:
    """A reader remembers what it has read, for the case that a writer removes the version: it was 108 bytes each."""
    assert growth(stores, lambda store: sum(len(some) for some in store.scan(["path"], batch_size=500))) < 40


def test_files_of_all_pictures_are_held_once(stores: list[Store]) -> None:
    """Path, digest, description and their object, without a dictionary of each beside it: that was 750 bytes each."""
    assert growth(stores, lambda store: store.known()) < 600
    assert not hasattr(IndexedFile("a", "b", None, 1, 1, "c", None), "__dict__")


def test_described_pictures_of_a_new_version_are_counted_in_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While pictures come, there is another version every few seconds: all descriptions were read for each."""
    store = filled(tmp_path / "s", 3_000, words=40)
    assert store.described() == 1_500

    def spent() -> int:
        store.refresh()
        store.table.dataset = open_dataset(store.location)
        found = store.described()
        assert found == open_dataset(store.location).count_rows("dense IS NOT NULL")
        return int(store.table.dataset.io_stats_incremental().read_bytes)

    monkeypatch.setattr(store_module, "_FRESH", store_module.timedelta(days=1))
    assert spent() < 20_000
    put(store, 3_000, 3_010)
    assert spent() < 20_000
    store.delete([row_id("1.jpg", None), row_id("2.jpg", None)])
    assert spent() < 700_000  # of the part that has lost some
    put(store, 2_990, 2_993)  # they had descriptions of another length
    store.tidy(always=True)
    spent()


def test_a_run_with_nothing_to_do_makes_no_table_of_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gallery(tmp_path / "g", 3)
    index(folder, tmp_path / "s")
    made: list[int] = []
    monkeypatch.setattr("seps.photos.indexing.build._Indexer", lambda *_: made.append(1))
    assert index(folder, tmp_path / "s").unchanged == 3 and not made
