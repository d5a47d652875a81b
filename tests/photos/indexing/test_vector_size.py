"""The size `vector` of our models: one vector per picture, as in `seps export --vector`; a score is one product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from seps.cli.main import main
from seps.images.decoding import decode_image
from seps.images.sources import ImageSource
from seps.photos.duplicates.duplicates import find_duplicates
from seps.photos.indexing.maintenance import status, verify
from seps.photos.library import Library
from seps.photos.search.explaining import StoredExplainer, kept_patches
from seps.photos.search.searcher import Searcher
from seps.photos.serve.app import create_app
from seps.photos.store.store import Store
from seps.retrieval.engine.layout import layout_values, read_layout
from seps.retrieval.engine.mean import MeanLayout
from seps.retrieval.vector_export import ImageVector, TextVector
from stores import TEXTS, explain_row, few_sentences, gallery, index, model


@pytest.fixture
def store(tmp_path: Path) -> Path:
    index(gallery(tmp_path / "g", 6, described=3), tmp_path / "s", size="vector")
    return tmp_path / "s"


@torch.no_grad()
def exported(text: str) -> np.ndarray:
    """The vector of a text by the module that is exported; its limit of words is that of a query."""
    batch = model().text.tokenize([text])
    return TextVector(model())(batch.ids, batch.mask)[0].numpy()


def test_a_vector_is_that_of_the_export_and_a_score_a_product(store: Path) -> None:
    searcher = Searcher(store, model())
    layout, weight = searcher.store.settings.layout, model().description_weight
    assert isinstance(layout, MeanLayout) and weight is not None
    wanted = {}
    for identity, row in searcher.store.rows(sorted(searcher.store.known())).items():
        source = ImageSource(Path(searcher.store.settings.root) / row.path)
        pixels = decode_image(source.path.read_bytes(), source, model().image_size)
        with torch.no_grad():
            vector = ImageVector(model())(pixels[None].float() / 255)[0].numpy()
        assert (row.mean is None) == (row.dense is None) and row.words is None and not row.tokens
        if row.dense is not None:
            vector = (1 - weight) * vector + weight * exported(row.dense)
        # bfloat16 in indexing where the machine has it
        assert np.asarray(row.vector, np.float32) == pytest.approx(vector, abs=0.01)
        wanted[identity] = np.asarray(row.vector, np.float32)
    for text in TEXTS:
        query = exported(text)
        for exact in (False, True):
            hits = searcher.search(text, 6, exact=exact)
            assert [hit.score - hit.terms.get("lexical", 0.0) for hit in hits] == [
                pytest.approx(layout.slope * float(wanted[hit.id] @ query), abs=1e-5) for hit in hits
            ]
    assert read_layout(layout_values(layout)) == layout


def test_levels_confidences_and_pictures_as_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_sentences(monkeypatch)
    folder = gallery(tmp_path / "g", 6, described=3)
    index(folder, tmp_path / "s", size="vector", bank=True)
    searcher = Searcher(tmp_path / "s", model())
    (best, *_) = searcher.search("a red square", 6)
    assert best.confidence is not None and "background" in best.terms
    assert searcher.search_image(folder / "p02.jpg", 1)[0].path == "p02.jpg"
    assert find_duplicates(searcher.store) == []
    assert verify(searcher.store) == [] and status(searcher.store)["kind"] == "mean"
    assert index(folder, tmp_path / "s", bank=True).unchanged == 6


@pytest.mark.parametrize("size", ["vector", "tiny"])
def test_without_patches_an_explanation_sums_to_the_score_and_reads_the_file(
    store: Path, tmp_path: Path, size: str
) -> None:
    if size != "vector":
        store = tmp_path / size
        index(tmp_path / "g", store, size=size, bank=True)
    searcher = Searcher(store, model())
    explainer = StoredExplainer(searcher)
    text = TEXTS[0]
    for hit in searcher.search(text, 6):
        answer = explainer.explain(hit.id, text, hit.score)
        assert answer is not None
        found, row = answer
        words = sum(part.contribution for part in found.words)
        cells = sum(found.patches) + found.elsewhere + sum(part.contribution for part in found.description)
        for parts in (words, cells):
            assert parts + found.rest + found.added == pytest.approx(hit.score, abs=1e-4)
        assert size != "vector" or abs(found.rest) < 2e-3
        assert any(found.kept) and not all(found.kept)
        assert bool(found.description) == (row["dense"] is not None)
        kept = kept_patches(searcher, hit.id, text)
        assert kept is not None and kept["kept"] == "".join("01"[cell] for cell in found.kept) and not kept["note"]
    away = tmp_path / "g" / hit.path
    away.rename(tmp_path / "elsewhere.jpg")
    answer, kept = explainer.explain(hit.id, text), kept_patches(searcher, hit.id, text)
    assert answer is not None and "thumbnail" in answer[0].note and kept is not None and "thumbnail" in kept["note"]
    with pytest.raises(pytest.fail.Exception, match="no file is needed"):
        explain_row(searcher, hit.id, text)


def test_every_door_says_that_the_file_is_away(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Library(store=store, model=model()) as library:
        identity = library.find("p00.jpg")
        assert not library.explain(identity, TEXTS[0]).note
        (tmp_path / "g" / "p00.jpg").rename(tmp_path / "elsewhere.jpg")
        assert "thumbnail" in library.explain(identity, TEXTS[0]).explanation.note
        with TestClient(create_app(library), base_url="http://127.0.0.1") as client:
            answer = client.get(f"/api/explain/{identity}", params={"q": TEXTS[0]})
    assert answer.status_code == 200 and "thumbnail" in answer.json()["note"]
    assert main(["explain", "p00.jpg", TEXTS[0], "--store", str(store)]) == 0
    assert "thumbnail" in capsys.readouterr().out


def test_faults_are_found(store: Path) -> None:
    layout = Store.open(store).settings.layout
    good = np.zeros(layout.width, np.float16)
    good[0] = 1
    assert layout.faults({"vector": good, "mean": None}) == []
    assert "length" in layout.faults({"vector": good * 2, "mean": None})[0]
    assert "damaged" in layout.faults({"vector": good, "mean": b"?"})[0]
    with pytest.raises(ValueError, match="positive"):
        read_layout({**layout_values(layout), "slope": 0.0})
