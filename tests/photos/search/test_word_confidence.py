"""Confidences of a word or two: falling with the rank, and telling what is there from what is not."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seps.photos import Searcher
from seps.photos.indexing.build import index_folder
from seps.photos.store.filters import Filters
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking import bank
from seps.retrieval.ranking.confidence import RANKS, falling, isotonic, ranked, sentence_share, word_confidence

THERE = ("dog", "a dog", "beach", "a beach", "mountain", "a swimming pool")
NOT_THERE = ("microscope", "a giraffe", "scissors", "a violin", "pizza")
VALUES = st.lists(st.integers(-4, 4).map(float), max_size=12)


@given(VALUES)
def test_isotonic_against_its_slow_form(values: list[float]) -> None:
    """The fit at i is the least over starts up to i of the largest mean from there to an end from i on."""

    def mean(start: int, end: int) -> float:
        return sum(values[start : end + 1]) / (end + 1 - start)

    count = len(values)
    slow = [min(max(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)]
    assert isotonic(values) == pytest.approx(slow)


@given(st.lists(st.floats(-9, 9), max_size=3 * RANKS), st.integers(1, 2 * RANKS))
def test_what_comes_later_changes_nothing_before_its_group(values: list[float], k: int) -> None:
    whole = falling(values)
    assert whole == sorted(whole, reverse=True)
    depth = ranked(k, len(values))
    assert falling(values[:depth])[:k] == whole[:k] and (depth % RANKS == 0 or depth == len(values))


def test_how_much_of_a_sentence() -> None:
    shares = {"dog": 0, "a dog": 0, "the dogs": 0, "a": 0, "red car": 0.5, "a dog on the beach": 0.5}
    assert {text: sentence_share(text) for text in shares} == shares
    assert sentence_share("a black dog running on the beach") == 1
    assert 0 < word_confidence(-1e9) < word_confidence(0) < word_confidence(5) < 1


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    """The shipped photos, by pixels alone."""
    root = tmp_path_factory.mktemp("shipped")
    (root / "g").mkdir()
    for photo in Path(str(files("seps"))).joinpath("assets", "gallery").glob("*.jpg"):
        (root / "g" / photo.name).write_bytes(photo.read_bytes())
    index_folder(root / "g", root / "s", from_pretrained("mini"), "mini")
    return Searcher(root / "s")


def test_words_have_good_matches_where_they_are_there(shipped: Searcher) -> None:
    assert [text for text in THERE if not shipped.search(text, 1)[0].good] == []
    assert [text for text in NOT_THERE if shipped.search(text, 1)[0].good] == []


def test_confidences_fall_and_depend_on_no_number_of_results(shipped: Searcher) -> None:
    for text in ("dog", "a red flower", "two dogs on the grass in the sun"):
        hits = shipped.search(text, 54)
        sure = [hit.confidence for hit in hits]
        assert None not in sure and sure == sorted(sure, reverse=True)  # type: ignore[type-var]
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        for k in (1, 10):
            assert shipped.search(text, k) == hits[:k] == shipped.search(text, k, exact=True)
        limit = sure[2]
        assert shipped.search(text, 10, min_confidence=limit) == [hit for hit in hits[:10] if hit.confidence >= limit]  # type: ignore[operator]
    assert shipped.search("dog", 5, filters=Filters(folder="nowhere")) == []


def test_the_fit_by_hand(shipped: Searcher) -> None:
    """Of a word: its cosine minus the mean of the ten largest with nouns of its form, in nats, made falling."""
    for text, form in (("dog", 1), ("a dog", 0)):
        hits = shipped.search(text, 50)
        rows = shipped.store.select([hit.id for hit in hits], ["id", "vector"])
        known = dict(zip(rows.values("id"), rows.vectors(), strict=True))
        vectors = torch.stack([torch.from_numpy(known[hit.id]) for hit in hits])
        nouns = torch.from_numpy(bank.noun_vectors(shipped.engine))
        assert nouns.shape == (2, len(bank.nouns()), 384)
        largest = (vectors @ nouns[form].T).sort(dim=1, descending=True).values[:, :10].mean(dim=1)
        better = vectors @ torch.from_numpy(shipped.part_of_text(text).vector) - largest
        fits = falling((better * shipped.slope / shipped.engine.traits.score_unit).tolist())
        assert [hit.confidence for hit in hits] == pytest.approx(
            [word_confidence(fit, shipped.engine.traits.word_fit) for fit in fits], abs=1e-5
        )


def test_nouns_are_each_there_once() -> None:
    assert len(set(bank.nouns())) == len(bank.nouns()) > 400
    assert all(noun == noun.strip() and not noun.endswith(".") for noun in bank.nouns())
