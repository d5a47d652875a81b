"""A model whose text side has learned further: its stores stay, and their confidences are made again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from seps.photos import Searcher
from seps.photos.indexing.build import IndexOptions, index_folder, report_if_current
from seps.photos.search.explaining import StoredExplainer
from seps.photos.search.searcher import OtherModelError
from seps.photos.store.store import Store
from seps.retrieval.model import RetrievalModel, model_hash, text_hash
from seps.retrieval.ranking.confidence import Calibration
from stores import few_sentences, gallery, model, model_folder

OPTIONS = IndexOptions(workers=2)


def moved(*names: str) -> RetrievalModel:
    """The tiny model with other weights where names begin so."""
    other = copy.deepcopy(model())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.startswith(names):
                parameter.mul_(1.3).add_(0.01)
    return other


def test_each_digest_is_of_its_own_side() -> None:
    whole = model_hash(model()), text_hash(model())
    for names in ("text.", "project_words."):
        other = moved(names)
        assert model_hash(other) == whole[0] and text_hash(other) != whole[1]
    for names in ("vision.", "project_patches.", "head."):
        other = moved(names)
        assert model_hash(other) != whole[0] and text_hash(other) == whole[1]


def test_a_projection_of_short_queries_is_of_neither_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a store depends on it: the store is up to date, and a word is read by it."""
    few_sentences(monkeypatch)
    photos, place, other = gallery(tmp_path / "g", described=0), tmp_path / "s", copy.deepcopy(model())
    index_folder(photos, place, model(), model_folder(), options=OPTIONS)
    other.set_short_queries(True)
    with torch.no_grad():
        other.project_short.weight.mul_(-1)
    before, after = Searcher(place, model()), Searcher(place, other)
    assert after.note("a dog") == ""
    long = "a very dark picture of a green square"
    assert [hit.as_dict() for hit in after.search(long)] == [hit.as_dict() for hit in before.search(long)]
    assert [hit.score for hit in after.search("a dog")] != [hit.score for hit in before.search("a dog")]


def test_a_short_query_that_is_read_apart_has_a_background_and_a_confidence_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what a sentence takes off; its confidence is that of words, whatever scores are worth for sentences."""
    few_sentences(monkeypatch)
    photos, place, other = gallery(tmp_path / "g", described=0), tmp_path / "s", copy.deepcopy(model())
    index_folder(photos, place, model(), model_folder(), options=OPTIONS)
    other.set_short_queries(True)
    text, sentence = "a red square", "a very dark picture of a green square"
    sure, taken = {}, {}
    for name, side in (("one", model()), ("apart", other)):
        searcher = Searcher(place, side)
        for query in (text, sentence):
            taken[name, query] = {hit.path: hit.terms["background"] for hit in searcher.search(query)}
            plain = {hit.path: hit.score - hit.terms["background"] for hit in searcher.search(query, exact=True)}
            taken[name, query, "plain"] = plain
        for worth in (0.0, 1.0):
            with monkeypatch.context() as patch:
                patch.setattr(Calibration, "confidence", lambda self, score, worth=worth: worth)
                sure[name, worth] = [hit.confidence for hit in searcher.search(text)]
        explained, _ = StoredExplainer(searcher).explain((best := searcher.search(text)[0]).id, text) or (None, None)
        assert explained is not None and explained.score == pytest.approx(best.score, abs=1e-5)
    assert taken["apart", text] == pytest.approx({path: value / 2 for path, value in taken["one", text].items()})
    assert taken["apart", sentence] == taken["one", sentence]
    assert taken["apart", text, "plain"] == pytest.approx(taken["one", text, "plain"])
    assert sure["one", 0.0] != sure["one", 1.0] and sure["apart", 0.0] == sure["apart", 1.0]


def test_a_store_of_the_former_text_side_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_sentences(monkeypatch)
    photos, place, later = gallery(tmp_path / "g", described=0), tmp_path / "s", moved("text.", "project_words.")
    index_folder(photos, place, model(), model_folder(), options=OPTIONS)
    before = Store.open(place)
    assert Searcher(before, model()).note("a dog") == ""

    searcher = Searcher(place, later)
    assert len(searcher.search("a dog")) == 8
    note = searcher.note("a dog")
    assert all(part in note for part in (text_hash(model())[:8], text_hash(later)[:8], f"seps index --store {place}"))

    report = index_folder(photos, place, later, model_folder(), options=OPTIONS)
    assert (report.unchanged, report.rescored, report.encoding) == (8, 8, 0.0)
    fresh = Searcher(place, later)
    assert fresh.note("a dog") == "" and fresh.store.settings.model_hash == before.settings.model_hash
    index_folder(photos, tmp_path / "anew", later, model_folder(), options=OPTIONS)
    same = Searcher(tmp_path / "anew", later)
    for query in ("a dog", "a red square on blue"):
        some, others = fresh.search(query), same.search(query)
        assert [hit.path for hit in some] == [hit.path for hit in others]
        assert [hit.score for hit in some] == pytest.approx([hit.score for hit in others], abs=1e-5)
        assert [hit.confidence for hit in some] == pytest.approx([hit.confidence for hit in others], abs=1e-4)

    with pytest.raises(OtherModelError):
        Searcher(place, moved("project_patches."))


def test_a_store_of_a_former_shipped_text_side_is_not_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_sentences(monkeypatch)
    photos, place = gallery(tmp_path / "g", 4, 0), tmp_path / "s"
    index_folder(photos, place, model(), model_folder(), options=OPTIONS)
    assert report_if_current(photos, place, options=OPTIONS) is not None
    monkeypatch.setattr("seps.photos.indexing.build.stated_text_hash", lambda name: "0" * 32)
    assert report_if_current(photos, place, options=OPTIONS) is None
