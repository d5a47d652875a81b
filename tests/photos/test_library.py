"""A folder's model, store and search as one object."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from datetime import date, datetime, timezone
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import seps
from messages import naming
from seps.photos.indexing.opening import IndexOptions
from seps.photos.library import Library
from seps.photos.search.results import Explained, Results
from seps.photos.search.searcher import Searcher
from seps.photos.store.filters import Filters
from seps.photos.store.places import default_store
from seps.photos.store.rows import StoreError
from stores import TEXTS, gallery, index, model, model_folder, paint

PLAIN = IndexOptions(bank=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("library")
    folder = gallery(place / "photos")
    Library(folder, model=model_folder(), store=place / "s", options=PLAIN).close()
    return folder, place / "s"


@pytest.fixture
def library(made: tuple[Path, Path]) -> Any:
    with seps.Library(made[0], store=made[1], update=False) as library:
        yield library


def test_it_finds_what_the_search_finds(library: Library, made: tuple[Path, Path]) -> None:
    hits = library.search(TEXTS[2], 5)
    expected = Searcher(made[1], model()).search(TEXTS[2], 5)
    assert isinstance(hits, Results) and [one.hit for one in hits] == expected and len(hits) == 5
    assert hits.paths == [made[0] / hit.path for hit in expected] and all(path.is_file() for path in hits.paths)
    assert (hits[0].rank, hits[0].score, hits[0].confidence) == (1, expected[0].score, expected[0].confidence)
    assert hits[0].good is expected[0].good and hits[0].size == (60, 44)
    assert [one.rank for one in hits[1:3]] == [2, 3] and isinstance(hits[1:3], Results)
    assert json.dumps([one.as_dict() for one in hits])
    assert len(library) == 8 and library.folder == made[0] and "8 pictures" in repr(library)
    assert library.engine is library.searcher.engine


def test_filters(library: Library) -> None:
    below = library.search("a dog", folder="sub")
    assert {one.path.parent.name for one in below} == {"sub"} and len(below) == 4
    assert [one.hit for one in below] == library.searcher.search("a dog", filters=Filters("sub"))
    assert not library.search("a dog", min_size=45) and len(library.search("a dog", min_size=44)) == 8
    for later in ("2100-01-01", date(2100, 1, 1), datetime(2100, 1, 1, tzinfo=timezone.utc)):
        assert not library.search("a dog", since=later) and len(library.search("a dog", until=later)) == 8
    with pytest.raises(StoreError, match="confidence"):
        library.search("a dog", min_confidence=0.5)
    store = library.searcher.store
    store.settings = replace(store.settings, calibration={"place": 0.0, "scale": 0.1, "images": 8.0})
    every = library.search("a dog")
    sure = library.search("a dog", min_confidence=every[3].confidence)
    assert [one.id for one in sure] == [one.id for one in every[:4]] and every[0].good is not None
    with pytest.raises(ValueError, match="between 0 and 1"):
        library.search("a dog", min_confidence=2)
    with pytest.raises(ValueError, match="read"):
        library.search("a dog", since="yesterday")
    assert [one.id for one in library.search("a dog", folder=Path("sub"))] == [one.id for one in below]
    with pytest.raises(ValueError, match=naming("2024-05-31T00:00:00", "2024-05-30")):
        library.search("a dog", since="2024-05-31", until="2024-05-30")
    for find in (partial(library.search, "a dog"), partial(library.similar, below[0])):
        with pytest.raises(ValueError, match=naming("sbu", "sub")):
            find(folder="sbu")


def test_an_explanation_has_the_score_and_shows_itself(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit = library.search("a photo of a dog")[0]
    why = hit.explain()
    assert isinstance(why, Explained) and why.score == hit.score
    parts = why.explanation
    assert abs(sum(part.contribution for part in parts.words) + parts.rest + parts.added - hit.score) < 1e-4
    assert set(why.words) >= {"photo", "dog"} and why.path == hit.path
    shown: list[Image.Image] = []
    monkeypatch.setattr(Image.Image, "show", lambda self, title=None: shown.append(self))
    why.show()
    assert shown and shown[0].size == why.image().size
    with Image.open(why.save(tmp_path / "why.png")) as written:
        assert written.size == shown[0].size
    assert "data:image/png;base64," in why._repr_html_() and f"score {hit.score:.3f}" in repr(why)


def test_pages_of_hits_have_thumbnails_and_no_markup_of_names(library: Library) -> None:
    hits = library.search("<script>alert(1)</script> a dog", 3)
    page = hits._repr_html_()
    assert page.count("data:image/jpeg;base64,") == 3 and "<script>" not in page and "&lt;script&gt;" in page
    assert all(one.path.name in page for one in hits)
    assert hits[0].thumbnail()[:2] == b"\xff\xd8" and hits[0].image().size == (60, 44)
    assert len(repr(hits).splitlines()) == 3 and str(hits[0].path) in repr(hits)
    assert repr(hits[:0]) == "<nothing found>" and "nothing found" in hits[:0]._repr_html_()


def test_similar_takes_a_file_bytes_an_image_and_a_hit(library: Library, made: tuple[Path, Path]) -> None:
    file = made[0] / "p02.jpg"
    expected = [hit.path for hit in Searcher(made[1], model()).search_image(file, 4)]
    hit = next(one for one in library.search("a dog") if one.path == file)
    for picture in (file, str(file), file.read_bytes(), hit):
        found = library.similar(picture, 4)
        assert [one.hit.path for one in found] == expected and found[0].path == file
    with Image.open(file) as opened:
        assert library.similar(opened, 1)[0].path == file
    with pytest.raises(ValueError, match="picture"):
        library.similar(file)[0].explain()
    assert {one.path.parent.name for one in library.similar(file, folder="sub")} == {"sub"}


def _odd_pictures() -> dict[str, bytes]:
    """Files whose bare pixels are not what is to be seen: turned by EXIF, transparent, of 16 bits, of a palette."""
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 256, (36, 48, 3), np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    clear = rough.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    values = np.asarray(rough.convert("L")).astype(np.uint16) * 257
    return {
        "turned.jpg": _encoded(rough, "JPEG", exif=turned),
        "clear.png": _encoded(clear, "PNG"),
        "wide.png": _encoded(Image.fromarray(values), "PNG"),
        "palette.gif": _encoded(rough.convert("P"), "GIF", transparency=3),
    }


def _encoded(picture: Image.Image, kind: str, **more: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **more)
    return out.getvalue()


@pytest.mark.parametrize("name", sorted(_odd_pictures()))
def test_a_pillow_image_is_seen_as_its_file_is(library: Library, name: str) -> None:
    data = _odd_pictures()[name]
    expected = [(one.id, one.score) for one in library.similar(data, 8)]
    with Image.open(io.BytesIO(data)) as picture:
        found = [(one.id, one.score) for one in library.similar(picture, 8)]
    near = 2e-2 if name.endswith("jpg") else 1e-6  # a JPEG may be decoded smaller
    assert dict(found) == pytest.approx(dict(expected), abs=near)


def test_what_is_no_picture_is_told(library: Library) -> None:
    for wrong in (None, 3, np.zeros((9, 9, 3), np.uint8)):
        with pytest.raises(TypeError, match="image"):
            library.similar(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=naming("8", "16", "floating")):
        library.similar(Image.new("F", (9, 9)))


def test_add_indexes_what_came_and_refuses_what_is_outside(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "photos", 3)
    calls: list[tuple[int, int]] = []
    calling = lambda done, total: calls.append((done, total))  # noqa: E731
    with Library(folder, model=model_folder(), store=tmp_path / "s", options=PLAIN, progress=calling) as library:
        assert calls[-1] == (3, 3) and len(library) == 3
        came = paint(folder / "later" / "new.jpg", 99)
        report = library.add(came)
        assert report.new == 1 and len(library) == 4
        assert library.similar(came, 1)[0].path == came
        outside = paint(tmp_path / "elsewhere.jpg", 1)
        with pytest.raises(ValueError, match="outside"):
            library.add(outside)
        with pytest.raises(ValueError, match="folder"):
            library.add(folder / "none.jpg")
        came.unlink()
        assert library.update().deleted == 1 and len(library) == 3
    # The store knows its model and its folder.
    again = Library(store=tmp_path / "s")
    assert again.folder == folder and len(again.search("a dog")) == 3
    gone = again.search("a dog")[0]
    gone.path.unlink()
    assert gone.image().format == "JPEG" and again.similar(gone, 1)
    again.searcher.store.delete([gone.id])
    with pytest.raises(StoreError, match="no picture"):
        gone.explain()
    again.close()
    assert len(again.search("a dog")) == 2


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder"):
        Library()
    with pytest.raises(ValueError, match="store"):
        Library(tmp_path, model=model())
    with pytest.raises(ValueError, match="store"):
        Library(store=tmp_path / "none").search("a dog")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "away"))):
        Library(tmp_path / "away", model=model_folder(), store=tmp_path / "s")
    with pytest.raises(ValueError, match=naming("'gpu'", "'cpu'")):
        Library(tmp_path, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=naming("cuda:0", "GPU")):
            Library(tmp_path, device="cuda:0")


def test_a_query_is_a_text(library: Library) -> None:
    for wrong in (None, 5, b"a dog", ["a dog", "a cat"]):
        with pytest.raises(ValueError, match=naming(type(wrong).__name__)):
            library.search(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="query"):
        library.search(" ")


def test_the_default_store_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = gallery(tmp_path / "My photos", 2)
    with Library(folder, model=model_folder(), options=PLAIN) as library:
        assert Path(library.location) == default_store(tmp_path / "data", folder, model_folder()) and len(library) == 2
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    with Library(folder, model=model_folder(), options=PLAIN) as library:
        assert Path(library.location).is_relative_to(tmp_path / "home")


def test_duplicates_are_those_of_the_store(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fake = ModuleType("seps.photos.duplicates.duplicates")
    fake.find_duplicates = lambda store, **options: asked.append((store, options)) or ["group"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert library.duplicates(near=0.9) == ["group"]
    assert asked == [(library.searcher.store, {"filters": library.scope(), "near": 0.9})]


def test_every_door_of_a_store_of_two_folders_gives_paths_that_are_there(tmp_path: Path) -> None:
    first, second = gallery(tmp_path / "a", 3), gallery(tmp_path / "b", 4)
    store = tmp_path / "s"
    index(first, store)
    index(second, store, add=True)
    for folder, names in ((first, {first}), (second, {second}), (None, {first, second})):
        with Library(folder, store=store) as library:
            wanted = {file for name in names for file in name.rglob("*.jpg")}
            hits = library.search("a dog", 20)
            assert set(hits.paths) == wanted and len(library) == len(wanted)
            assert {one.path for one in library.similar(hits[0], 20)} == wanted
            assert {Path(one.as_dict()["path"]) for one in hits} == wanted
            assert hits[-1].explain().path == hits[-1].path and hits[-1].image().size == (60, 44)
            assert library.search("a dog", folder="sub").paths or folder != first
            both = {copy.path for found in library.duplicates(kind="file") for copy in found.pictures}
            assert bool(both) == (folder is None)  # the same pictures are in both folders


def test_with_nothing_new_no_model_is_loaded_for_pictures(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seps.photos.library.load_engine", lambda *_, **__: pytest.fail("not needed"))
    with Library(made[0], store=made[1], options=PLAIN) as library:
        assert len(library.search("a dog")) == 8 and library.update().unchanged == 8


def test_excluded_pictures_are_not_exported(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "photos", 4)
    with Library(folder, model=model_folder(), store=tmp_path / "s", options=PLAIN) as library:
        assert library.export("parquet", tmp_path / "v") == len(library) == 4
    hiding = replace(PLAIN, exclude=("sub/",))
    with Library(folder, model=model_folder(), store=tmp_path / "s", options=hiding) as library:
        assert library.export("parquet", tmp_path / "w") == len(library) == len(library.search("a dog")) == 2
