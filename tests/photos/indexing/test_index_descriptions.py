"""Descriptions: what cannot be used is named, what the store has stays until it is replaced or taken away."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest

from messages import naming
from seps.cli.main import main
from seps.images.sources import DataError
from seps.photos.indexing.build import IndexOptions, IndexReport, index_folder
from seps.photos.store.store import Store
from stores import gallery, index, model, model_folder, paint


def texts(store: Path) -> dict[str, str]:
    return {row.path: row.description for row in Store.open(store).known().values() if row.description is not None}


def index_with(folder: Path, store: Path, *dense: Path, **options: object) -> IndexReport:
    settings = IndexOptions(workers=1, bank=False, dense=dense, **options)  # type: ignore[arg-type]
    return index_folder(folder, store, model(), model_folder(), options=settings)


def write(file: Path, *lines: object) -> Path:
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


BAD = [
    ("{broken", "JSON"),
    ("[1]", "object"),
    ({"dense": "of nothing"}, "picture"),
    ({"image": "p00.jpg", "description": "under another key"}, "'dense'"),
    ({"image": "p00.jpg", "dense": ["a list"]}, "text"),
    ({"image": "p00.jpg", "dense": " "}, "text"),
    ({"image": "none.jpg", "dense": "of a picture that is not there"}, "none.jpg"),
    ('{"image": "p00.jpg", "dense": "\\ud800"}', "surrogate"),
]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("line", "why"), BAD, ids=[why for _, why in BAD])
def test_a_line_that_cannot_be_used_is_named_and_the_others_count(
    tmp_path: Path, line: object, why: str, inside: bool
) -> None:
    folder, store = gallery(tmp_path / "g", 3, described=0), tmp_path / "s"
    good = [{"image": name, "dense": f"Text of {name}."} for name in ("p02.jpg", "sub/p01.jpg")]
    file = write((folder if inside else tmp_path) / "extra.jsonl", good[0], line, good[1])
    extra = () if inside else (file,)
    with pytest.raises(DataError, match=why):
        index_with(folder, store, *extra, strict=True)
    report = index_with(folder, store, *extra)
    assert [problem.name for problem in report.description_problems] == ["extra.jsonl, line 2"]
    assert report.problems == []
    assert texts(store) == {line["image"]: line["dense"] for line in good} and report.described == 2


def test_lines_of_data_sets_and_of_failed_captions_are_no_fault(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 3, described=1)
    write(folder / "dense.failed.jsonl", {"image": "p00.jpg", "reason": "a refusal", "kind": "refusal"})
    write(folder / "._data.jsonl", "\0\5\7")
    assert index(folder, tmp_path / "s").description_problems == []


def test_one_pattern_or_file_may_come_as_a_text(tmp_path: Path) -> None:
    """Its letters would be taken for patterns, and '*' of '*.gif' is everything."""
    folder = gallery(tmp_path / "g", 3, described=2)
    described = index(folder, tmp_path / "s").described
    (folder / "data.jsonl").rename(tmp_path / "dense.jsonl")
    report = index(folder, tmp_path / "s", exclude="*.gif", forget_descriptions="p00.jpg")
    assert (described, report.described, report.excluded) == (2, 1, 0)
    options = IndexOptions(workers=1, bank=False, dense=str(tmp_path / "dense.jsonl"))  # type: ignore[arg-type]
    assert index_folder(folder, tmp_path / "t", model(), model_folder(), options=options).described == 2


@pytest.mark.parametrize("name", ["batch_size", "workers"])
def test_numbers_of_options_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=naming(name, "IndexOptions")):
        IndexOptions(**{name: 0})  # type: ignore[arg-type]


def test_a_file_that_is_not_there_stops(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="file"):
        index_with(gallery(tmp_path / "g", 1), tmp_path / "s", tmp_path / "none.jsonl")


def test_descriptions_stay_with_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = gallery(tmp_path / "g", 4, described=0), tmp_path / "s"
    lines = [{"image": name, "dense": f"Text of {name}."} for name in ("p00.jpg", "p02.jpg")]
    index_with(folder, store, write(tmp_path / "d.jsonl", *lines))
    before = texts(store)
    report = index(folder, store)
    assert (report.unchanged, report.changed, report.described) == (4, 0, 2) and texts(store) == before

    index_with(folder, store, write(tmp_path / "d.jsonl", {"image": "p00.jpg", "dense": "Another."}))
    assert texts(store) == {"p00.jpg": "Another.", "p02.jpg": "Text of p02.jpg."}

    os.replace(folder / "p02.jpg", folder / "renamed.jpg")
    index(folder, store)
    assert texts(store) == {"p00.jpg": "Another.", "renamed.jpg": "Text of p02.jpg."}

    arguments = ["index", str(folder), "--store", str(store), "--model", model_folder(), "--forget-descriptions"]
    assert main([*arguments, "p0.jpg"]) != 0
    assert "p0.jpg" in capsys.readouterr().err and len(texts(store)) == 2
    assert main([*arguments, "p00.jpg"]) == 0
    assert texts(store) == {"renamed.jpg": "Text of p02.jpg."}
    assert main([*arguments, "*"]) == 0
    rows = Store.open(store).rows(list(Store.open(store).known())).values()
    assert all(row.dense is None and row.words is None for row in rows)


def test_a_picture_that_changed_keeps_its_description_and_is_named(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 2, described=0), tmp_path / "s"
    index_with(folder, store, write(tmp_path / "d.jsonl", {"image": "p00.jpg", "dense": "Text."}))
    paint(folder / "p00.jpg", 300)
    report = index(folder, store)
    assert texts(store) == {"p00.jpg": "Text."}
    assert [problem.name for problem in report.description_problems] == ["p00.jpg"]


def test_forgetting_what_a_file_still_says_is_told(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 2, described=1), tmp_path / "s"
    index(folder, store)
    report = index_with(folder, store, forget_descriptions=("p00.jpg",))
    assert "JSONL" in report.description_problems[0].why and len(texts(store)) == 1


@pytest.mark.parametrize("on_disk", ["NFD", "NFC"])
def test_accents_may_be_written_either_way(tmp_path: Path, on_disk: str) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    name = unicodedata.normalize(on_disk, "caf\xe9/\xfcber.jpg")
    other = unicodedata.normalize("NFC" if on_disk == "NFD" else "NFD", name)
    assert name != other
    paint(folder / name, 1)
    report = index_with(folder, store, write(tmp_path / "d.jsonl", {"image": other, "dense": "Over it."}))
    assert texts(store) == {name: "Over it."} and report.description_problems == []
