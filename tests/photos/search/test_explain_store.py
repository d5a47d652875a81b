"""`seps explain --store`: the same score as the search, whatever the store keeps, found by path or id."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import seps
from messages import mentions
from seps.cli.main import call
from seps.images.sources import row_id
from seps.photos.search.explaining import StoredExplainer, find_image
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError
from seps.retrieval.engine.loading import engine_of
from stores import gallery, index, model, model_folder, paint

QUERY = "an unbelievable dog, running!"
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "means in codes": {"precision": "int2", "means": 2, "words": 2},
    "all of them": {"patches": 4, "words": 2, "precision": "int4"},
}


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the model that is loaded already: reading it for every call takes most of the time."""
    monkeypatch.setattr("seps.photos.search.searcher.load_engine", lambda *_, **__: engine_of(model()))


def asked(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    assert call(command, words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_the_score_of_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Described and undescribed rows, by path and id: the digits that `seps search` prints, in parts that sum up."""
    folder = gallery(tmp_path / "g", 5, described=3)
    index(folder, tmp_path / "s", **KINDS[kind])
    store = ["--store", str(tmp_path / "s")]
    found = json.loads(asked(capsys, "search", QUERY, *store, "--json"))
    table = asked(capsys, "search", QUERY, *store).splitlines()[1:]
    assert len(found) == 5
    for hit, line in zip(found, table, strict=True):
        by_id = json.loads(asked(capsys, "explain", hit["id"], QUERY, *store, "--json"))
        assert round(by_id["score"], 6) == hit["score"]
        described = hit["path"][-6:] < "03.jpg"
        assert bool(by_id["description"]) == described
        assert ("no description" in by_id["note"]) == (not described)
        parts = sum(part["contribution"] for part in by_id["words"]) + by_id["rest"]
        assert parts == pytest.approx(hit["score"], abs=1e-5)
        by_image = sum(by_id["patches"]) + by_id["elsewhere"] + by_id["rest"]
        by_image += sum(part["contribution"] for part in by_id["description"])
        assert by_image == pytest.approx(hit["score"], abs=1e-5)
        shown = asked(capsys, "explain", hit["path"], QUERY, *store).splitlines()[0]
        assert shown.split(";")[0] == f"score {line.split()[1]}"


def test_pictures_are_found_by_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gallery(tmp_path / "g", 2)
    paint(folder / "caf\u00e9.jpg", 9)
    with tarfile.open(folder / "shard.tar", "w") as shard:
        shard.add(paint(tmp_path / "in:side.jpg", 8), "in:side.jpg")
    index(folder, tmp_path / "s")
    store = Searcher(tmp_path / "s", model()).store
    monkeypatch.chdir(folder / "sub")
    for name, wanted in (
        ("sub/p01.jpg", ("sub/p01.jpg", None)),
        ("./sub//p01.jpg", ("sub/p01.jpg", None)),
        ("p01.jpg", ("sub/p01.jpg", None)),
        (str(folder / "p00.jpg"), ("p00.jpg", None)),
        ("cafe\u0301.jpg", ("caf\u00e9.jpg", None)),
        ("shard.tar:in:side.jpg", ("shard.tar", "in:side.jpg")),
        (row_id("p00.jpg", None), ("p00.jpg", None)),
        (row_id("p00.jpg", None) + "-" + "0" * 12, ("p00.jpg", None)),
    ):
        assert find_image(store, name) == row_id(*wanted), name
    for name in ("p02.jpg", "../secret.jpg", "0" * 20, "", "shard.tar", "' OR 1=1 --"):
        with pytest.raises(StoreError, match="image"):
            find_image(store, name)
    assert StoredExplainer(Searcher(tmp_path / "s", model())).explain("0" * 20, QUERY) is None


def test_a_score_from_elsewhere_is_not_taken_over(tmp_path: Path) -> None:
    """What a search has shown counts only where it differs by rounding."""
    index(gallery(tmp_path / "g", 2), tmp_path / "s")
    searcher = Searcher(tmp_path / "s", model())
    hit = searcher.search(QUERY, 1)[0]
    explainer = StoredExplainer(searcher)
    for shown, taken in ((hit.score + 3e-7, True), (hit.score + 0.01, False)):
        answer = explainer.explain(hit.id, QUERY, shown)
        assert answer is not None and (answer[0].score == shown) == taken


def test_without_a_store_it_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(paint(tmp_path / "p.jpg", 3))
    plain = asked(capsys, "explain", path, "a dog", "--model", model_folder())
    assert "description" in plain and mentions(plain, "--store", "DIR")
    given = asked(capsys, "explain", path, "a dog", "--model", model_folder(), "--dense", "Two dogs.")
    assert "No description" not in given
    with pytest.raises(ValueError, match="together"):
        call("explain", [path, "a dog", "--store", "s", "--dense", "Two dogs."])


def test_the_thumbnail_is_drawn_where_the_file_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(gallery(tmp_path / "g", 2), tmp_path / "s")
    (tmp_path / "g").rename(tmp_path / "away")
    out = tmp_path / "why.png"
    said = asked(capsys, "explain", "p00.jpg", QUERY, "--store", str(tmp_path / "s"), "-o", str(out))
    assert out.is_file() and "thumbnail" in said


def test_an_explanation_is_not_drawn_on_another_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file was replaced after it was indexed: the parts of the score are those of what was there before."""
    folder = gallery(tmp_path / "g", 2)
    index(folder, tmp_path / "s")
    with Image.open(folder / "p00.jpg") as before:
        grey = np.asarray(before.convert("L")).mean()
    words = ["explain", "p00.jpg", QUERY, "--store", str(tmp_path / "s"), "-o", str(tmp_path / "why.png")]
    assert "changed" not in asked(capsys, *words)
    Image.new("RGB", (60, 44), (255, 0, 0)).save(folder / "p00.jpg")
    assert "thumbnail" in asked(capsys, *words)
    library = seps.Library(store=tmp_path / "s")
    why = next(one for one in library.search(QUERY) if one.path.name == "p00.jpg").explain()
    assert "changed" in why.note
    assert abs(np.asarray(why.photo.convert("L")).mean() - grey) < 3


def test_names_and_words_do_not_reach_the_terminal_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An escape sequence, a C1 control and a direction mark in a name or a sentence, as text and as JSON."""
    evil = "[red]x\x1b[31m\x9b2J\u202egpj.jpg"
    paint(tmp_path / "g" / evil, 1)
    index(tmp_path / "g", tmp_path / "s")
    store = ["--store", str(tmp_path / "s")]
    for more in ((), ("--json",)):
        for command, words in (
            ("search", ("a dog",)),
            ("explain", (evil, "a\x1b[31mdog \x9b2J")),
        ):
            said = asked(capsys, command, *words, *store, *more)
            assert all(line.isprintable() for line in said.split("\n"))
    assert json.loads(asked(capsys, "search", "a dog", *store, "--json"))[0]["path"] == evil
    assert "[red]x\\x1b[31m\\x9b2J\\u202egpj.jpg" in asked(capsys, "search", "a dog", *store)
