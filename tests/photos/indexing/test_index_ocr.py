"""Text in pictures: read by the real library, found by its words, named as the source, resumable, and no noise."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont

from seps.cli.main import main
from seps.images.ocr import LEAST_CONFIDENCE, TextReader, is_text
from seps.images.sources import DataError, ImageSource
from seps.photos.indexing.reading import read_texts
from seps.photos.library import Library
from seps.photos.search.explaining import find_image
from seps.photos.store.store import Store
from stores import few_sentences, index, model_folder, paint

pytest.importorskip("rapidocr")
SIGN = "ZEPPELIN MUSEUM"


def draw(path: Path, *lines: str, size: tuple[int, int] = (480, 200)) -> Path:
    image = Image.new("RGB", size, (250, 246, 230))
    for number, line in enumerate(lines):
        ImageDraw.Draw(image).text((24, 24 + 60 * number), line, (20, 20, 60), ImageFont.load_default(40))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


@pytest.fixture(scope="module")
def reader() -> TextReader:
    return TextReader()


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of a sign, a blank wall and two photos, its store without text."""
    folder = tmp_path_factory.mktemp("ocr")
    draw(folder / "g/sign.png", SIGN, "Gate 27")
    draw(folder / "g/wall.png")
    paint(folder / "g/a.jpg", 1)
    paint(folder / "g/b.jpg", 2)
    (folder / "g/data.jsonl").write_text(json.dumps({"image": "a.jpg", "dense": "A painting by Okonkwo"}))
    with pytest.MonkeyPatch.context() as patch:
        few_sentences(patch)
        index(folder / "g", folder / "s")
    return folder / "g", folder / "s"


@pytest.fixture
def place(indexed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    few_sentences(monkeypatch)
    shutil.copytree(indexed[1], tmp_path / "s")
    return tmp_path / "s"


def texts(store: Path) -> dict[str, str | None]:
    opened = Store.open(store)
    return {row.path: row.ocr for row in opened.rows(sorted(opened.known())).values()}


def test_lines_are_read_with_confidence_and_turned_upright(tmp_path: Path, reader: TextReader) -> None:
    upright = draw(tmp_path / "a.png", SIGN, "Gate 27")
    turned = tmp_path / "b.jpg"
    exif = Image.Exif()
    exif[0x0112] = 8  # to be turned by a quarter
    Image.open(upright).transpose(Image.Transpose.ROTATE_270).save(turned, exif=exif)
    for file in (upright, turned):
        source = ImageSource(file)
        lines = reader.lines(file.read_bytes(), source)
        assert all(sure > LEAST_CONFIDENCE for _, sure in lines)
        assert reader.text(file.read_bytes(), source).split() == [*SIGN.split(), "Gate", "27"]


def test_photos_without_text_bring_none(reader: TextReader) -> None:
    """Raw, each of these four gives a line."""
    folder = Path(str(files("seps"))) / "assets/gallery"
    raw = 0
    for name in ("black-dog-floor", "kitchen-stove", "mountain-trail", "coffee-cup"):
        source = ImageSource(folder / f"{name}.jpg")
        data = source.path.read_bytes()
        raw += bool(reader.lines(data, source))
        assert reader.text(data, source) == ""
    assert raw > 1


def test_words_in_a_picture_find_it_and_are_named_as_the_source(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Library(store=place, model=model_folder())
    before = {hit.id: hit.score for hit in library.search("zeppelin", exact=True)}
    library.close()
    report = read_texts(place)
    assert (report.read, report.with_text, report.problems) == (4, 1, [])
    assert texts(place) == {"sign.png": f"{SIGN}\nGate 27", "wall.png": "", "a.jpg": "", "b.jpg": ""}
    library = Library(store=place, model=model_folder())
    results = library.search("zeppelin", exact=True)
    first = results[0]
    assert first.path.name == "sign.png" and first.terms["lexical"] > 0
    assert first.described_by == ["text in the picture"] and first.text_in_picture == f"{SIGN}\nGate 27"
    after = {hit.id: hit.score - hit.terms.get("lexical", 0.0) for hit in results}
    assert after == pytest.approx(before, abs=1e-5)  # nothing else has changed
    assert library.search("okonkwo")[0].path.name == "a.jpg"
    explanation = first.explain().explanation
    assert explanation.words_in_picture == ["zeppelin"] == list(explanation.found_words)
    assert explanation.text_in_picture == f"{SIGN}\nGate 27"
    parts = sum(part.contribution for part in explanation.words) + explanation.rest + explanation.added
    assert parts == pytest.approx(explanation.score, abs=1e-4)
    library.close()
    capsys.readouterr()
    assert main(["search", "zeppelin", "--store", str(place), "-k", "1"]) == 0
    assert "text in the picture" in capsys.readouterr().out
    assert main(["explain", "sign.png", "zeppelin", "--store", str(place)]) == 0
    shown = capsys.readouterr().out
    assert SIGN in shown and "rare word in the picture" in shown


def test_a_run_that_is_stopped_keeps_what_it_read_and_goes_on(place: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_texts(place, progress=stop)
    assert [text is not None for text in texts(place).values()].count(True) == 2
    calls: list[tuple[int, int]] = []
    assert read_texts(place, progress=lambda *count: calls.append(count)).read == 2
    assert calls == [(1, 2), (2, 2)]
    assert read_texts(place).read == 0


def test_a_changed_picture_is_read_again_and_a_moved_or_described_one_is_not(tmp_path: Path) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    draw(folder / "sign.png", SIGN)
    draw(folder / "moved.png", "LIBRARY")
    index(folder, store, bank=False)
    assert read_texts(store).with_text == 2
    (folder / "moved.png").rename(folder / "there.png")
    (folder / "data.jsonl").write_text(json.dumps({"image": "there.png", "dense": "A sign"}))
    draw(folder / "sign.png", "CLOSED")
    index(folder, store, bank=False)
    # Described in the same run it was moved: it is another picture to the store.
    assert texts(store)["sign.png"] is None
    read_texts(store)
    assert texts(store) == {"sign.png": "CLOSED", "there.png": "LIBRARY"}
    (folder / "data.jsonl").write_text(json.dumps({"image": "there.png", "dense": "A sign of a library"}))
    (folder / "there.png").rename(folder / "again.png")
    (folder / "data.jsonl").unlink()
    index(folder, store, bank=False)
    assert texts(store)["again.png"] == "LIBRARY"


def test_a_picture_that_is_gone_or_changed_is_named_and_stays_for_later(tmp_path: Path) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    draw(folder / "sign.png", SIGN)
    draw(folder / "gone.png", "HELLO")
    draw(folder / "new.png", "OLD")
    index(folder, store, bank=False)
    (folder / "gone.png").unlink()
    (folder / "new.png").write_bytes(b"broken")
    report = read_texts(store)
    assert (report.read, report.with_text) == (1, 1)
    assert sorted(problem.name for problem in report.problems) == ["gone.png", "new.png"]
    assert texts(store) == {"sign.png": SIGN, "gone.png": None, "new.png": None}


def test_the_command_and_its_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_sentences(monkeypatch)
    folder, store = tmp_path / "g", tmp_path / "s"
    draw(folder / "sign.png", SIGN)
    paint(folder / "a.jpg", 1)
    asked = ["index", str(folder), "--store", str(store), "--model", model_folder(), "--ocr"]
    assert main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["text_looked_for"], printed["with_text"], printed["unread_texts"]) == (2, 1, [])
    assert main(asked) == 0
    assert "Text in 0 of 0 pictures" in capsys.readouterr().out
    assert main(["index", "--store", str(store), "--status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["text_looked_for"], status["with_text"]) == (2, 1)
    draw(folder / "b.png", "NEW")
    assert main(asked) == 0
    assert "Text in 1 of 1 picture" in capsys.readouterr().out


def test_a_row_that_leads_outside_is_not_read(place: Path, tmp_path: Path) -> None:
    outside = draw(tmp_path / "outside.png", "SECRET")
    store = Store.open(place)
    (identity,) = (key for key, file in store.known().items() if file.path == "sign.png")
    store._set_column("path", {identity: os.path.relpath(outside, store.settings.root)})
    report = read_texts(place)
    assert [problem for problem in report.problems if "leads out" in problem.why]
    assert "SECRET" not in str(texts(place))


def test_without_the_package_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.delitem(sys.modules, "rapidocr", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"seps\[ocr\]"):
        read_texts(place)
    new = place / "new"
    assert main(["index", str(place), "--store", str(new), "--ocr"]) == 2
    assert not new.exists()


@pytest.mark.parametrize(
    ("line", "sure", "kept"),
    [
        ("209", 0.99, True),
        ("A", 0.97, False),
        ("★★★★", 0.98, False),
        ("SVEEAGVSE", 0.55, False),
        ("出口を右", 0.93, True),
    ],
)
def test_which_lines_are_text(line: str, sure: float, kept: bool) -> None:
    assert is_text(line, sure) is kept


def test_a_large_store_finds_words_by_its_index(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_texts(place)
    store = Store.open(place)
    plain = {word: store.containing(word, 9) for word in ("zeppelin", "okonkwo", "nothing")}
    monkeypatch.setattr("seps.photos.store.lance.table.INDEX_ABOVE", 2)
    store.tidy()
    assert store.indexed("ocr") and store.indexed("dense")
    assert {word: store.containing(word, 9) for word in plain} == plain
    assert [len(found) for found in plain.values()] == [1, 1, 0]
    assert store.described() == 2
    assert find_image(store, "sign.png") == plain["zeppelin"][0]
