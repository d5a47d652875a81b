"""Candidates and exhaustive scoring: the same hits where all images are candidates, and while rows are being added."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.stores import TEXTS, few_sentences, gallery, index, model

from seps.images.sources import row_id
from seps.photos.search.results import Hit
from seps.photos.search.searcher import Searcher
from seps.photos.store.filters import Filters
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from seps.photos.store.tables import CandidateEstimate, pool

COPIES = 12
"""Rows that each picture of the gallery gets, with a level and a vector of its own."""
LEVELS = 2.0
"""Standard deviation of what is added to a level."""


def told(hits: list[Hit]) -> list[tuple[str, float]]:
    return [(hit.id, hit.score) for hit in hits]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of 8 pictures with levels."""
    few_sentences(monkeypatch)
    index(gallery(tmp_path / "g"), tmp_path / "s", bank=True)
    return tmp_path / "s"


def copies(store: Store, count: int = COPIES) -> list[Row]:
    """Further rows: the stored ones again, moved a little, each with another level."""
    random = np.random.default_rng(0)
    rows = [row for _, row in sorted(store.rows(sorted(store.known())).items())]
    made = []
    for number in range(count):
        for row in rows:
            path = f"copy/{number}/{row.path}"
            vector = np.asarray(row.vector, np.float32) + 0.2 * random.normal(size=len(row.vector))
            level = None if number == 3 else float(row.bank or 0.0) + LEVELS * float(random.normal())
            # Without a text: what a rare word adds depends on how many descriptions there are.
            facts = {"id": row_id(path, None), "path": path, "vector": vector.astype(np.float16), "bank": level}
            made.append(replace(row, dense=None, **facts))
    return made


@pytest.mark.parametrize("indexed", [False, True])
def test_all_rows_as_candidates_give_what_exhaustive_scoring_gives(
    place: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    """But for rounding, which depends on what is scored together; also beside a vector index."""
    store = Store.open(place)
    store.put([row for row in copies(store) if row.bank is not None])
    if indexed:
        monkeypatch.setattr("seps.photos.store.lance.table.INDEX_ABOVE", 50)
        monkeypatch.setattr("seps.photos.store.lance.vector_index.LEAST_PROBES", 1)
        store.tidy(always=True)
        assert store.indexed()
    searcher = Searcher(store, model())
    rows = len(store)
    for text in TEXTS:
        candidates, every = (searcher.search(text, rows, **how) for how in ({"candidates": rows}, {"exact": True}))
        assert [hit.id for hit in candidates] == [hit.id for hit in every]
        assert [hit.score for hit in candidates] == pytest.approx([hit.score for hit in every], abs=1e-6)
        assert searcher.search(text, 10, filters=Filters(folder="not there")) == []
    searcher.close()


def test_candidates_are_chosen_by_level_as_well(place: Path) -> None:
    """The levels decide the order here: half of all images by their vectors alone would miss many of the best."""
    store = Store.open(place)
    store.put(copies(store))
    searcher = Searcher(store, model())
    found = wanted = alone = 0
    half = len(store) // 2
    for text in TEXTS:
        best = {hit.id for hit in searcher.search(text, 5, exact=True)}
        found += len(best & {hit.id for hit in searcher.search(text, 5, candidates=half)})
        vector = searcher.part_of_text(text).vector
        alone += len(best & set(store.nearest(vector, half, ["id"]).values("id")))
        wanted += len(best)
    searcher.close()
    assert alone < 0.8 * wanted
    assert found == wanted


def test_a_prior_takes_the_first_of_equals_and_the_mean_for_a_missing_level() -> None:
    distances = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    levels = np.array([1.0, np.nan, 1.0, 3.0], np.float32)
    estimate = CandidateEstimate(slope=0.0, level=-1.0)
    assert estimate.best(distances, levels, 2).tolist() == [0, 2]
    assert estimate.best(distances, levels, 3).tolist() == [0, 1, 2]
    assert CandidateEstimate(1.0, 0.0).best(distances, levels, 2).tolist() == [0, 1]
    assert CandidateEstimate(1.0, 1.0).best(distances, levels, 9).tolist() == [0, 1, 2, 3]
    assert pool(200, 1000) == 400
    assert pool(200, 1_000_000) == 8000


def test_a_search_while_rows_are_added_sees_whole_commits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is that of the store after some commit: none of a commit's rows is missing, none is there twice."""
    monkeypatch.setattr("seps.photos.store.lance.upkeep.FRAGMENTS", 3)
    monkeypatch.setattr("seps.photos.store.store._FRESH", timedelta(0))
    store = Store.open(place)
    commits = [copies(store)[8 * n : 8 * n + 8] for n in range(COPIES)]
    searcher = Searcher(Store.open(place), model())
    scores = {hit.id: hit.score for hit in searcher.search(TEXTS[0], 500, exact=True)}
    answers: list[list[tuple[str, float]]] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                answers.append(told(searcher.search(TEXTS[0], 500)))
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    states = [set(scores)]
    for rows in commits:
        store.put([row for row in rows if row.bank is not None])
        store.tidy()
        states.append(states[-1] | {row.id for row in rows if row.bank is not None})
    done.set()
    asking.join()
    final = dict(told(searcher.search(TEXTS[0], 500, exact=True)))
    searcher.close()
    assert not failures
    assert answers
    assert final.keys() == states[-1]
    for answer in answers:
        seen = [identity for identity, _ in answer]
        assert len(seen) == len(set(seen))
        assert set(seen) in states
        # Scores round by what is scored together.
        assert dict(answer) == pytest.approx({identity: final[identity] for identity in seen}, abs=1e-6)
