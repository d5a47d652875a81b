"""What people wrote into their files becomes descriptions: by default, with its source, and seen when it changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from metadata_files import SUBJECTS, packet, with_iptc
from seps.cli.main import main
from seps.images.metadata import WrittenText
from seps.photos.indexing.build import IndexOptions, IndexReport, index_folder
from seps.photos.indexing.descriptions import described
from seps.photos.library import Library
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from stores import few_sentences, index, model, model_folder, paint

HARBOUR = "harbour, Bürgerfest"


def rows(store: Path) -> dict[str, Row]:
    opened = Store.open(store)
    return {row.path: row for row in opened.rows(sorted(opened.known())).values()}


def texts(store: Path) -> dict[str, tuple[str | None, str | None]]:
    return {path: (row.dense, row.sources) for path, row in rows(store).items()}


def sidecar(photo: Path, inner: str = SUBJECTS, whole_name: bool = True) -> Path:
    file = photo.with_name(f"{photo.name}.xmp") if whole_name else photo.with_suffix(".xmp")
    file.write_bytes(packet(inner))
    return file


def write(folder: Path, **lines: str) -> None:
    text = "\n".join(json.dumps({"image": f"{name}.jpg", "dense": text}) for name, text in lines.items())
    (folder / "data.jsonl").write_text(text)


def counts(report: IndexReport) -> dict[str, int]:
    names = ("new", "changed", "moved", "unchanged", "deleted", "described")
    return {name: value for name in names if (value := getattr(report, name))}


def test_metadata_becomes_the_description_and_its_source_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    for number, name in enumerate("abcd"):
        paint(folder / f"{name}.jpg", number)
    sidecar(folder / "a.jpg")
    sidecar(folder / "b.jpg", "<dc:title>Evening</dc:title>", whole_name=False)
    (folder / "c.jpg").write_bytes(with_iptc((2, 120, b"Two boats"), (2, 25, b"boats")))
    write(folder, a="A quiet place.", d="Only a line")
    assert counts(index(folder, tmp_path / "s")) == {"new": 4, "described": 4}
    assert texts(tmp_path / "s") == {
        "a.jpg": (f"A quiet place. {HARBOUR}", "jsonl, sidecar keywords"),
        "b.jpg": ("Evening", "sidecar title"),
        "c.jpg": ("Two boats", "iptc caption"),
        "d.jpg": ("Only a line", "jsonl"),
    }
    assert counts(index(folder, tmp_path / "s")) == {"unchanged": 4, "described": 4}


def test_a_caption_in_the_file_scores_as_the_same_caption_in_a_line(tmp_path: Path) -> None:
    """So that the figures of described pictures hold for pictures with metadata."""
    paint(tmp_path / "g/a.jpg", 1)
    paint(tmp_path / "h/a.jpg", 1)
    write(tmp_path / "g", a="Two boats at dusk")
    sidecar(tmp_path / "h/a.jpg", "<dc:description>Two boats at dusk</dc:description>")
    for name in "gh":
        index(tmp_path / name, tmp_path / f"{name}.store")
    (one,), (other,) = (rows(tmp_path / f"{name}.store").values() for name in "gh")
    assert (one.dense, one.words, one.tokens) == (other.dense, other.words, other.tokens)


def test_changed_metadata_is_a_change(tmp_path: Path) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    for number, name in enumerate("ab"):
        paint(folder / f"{name}.jpg", number)
    index(folder, store)
    file = sidecar(folder / "a.jpg")
    assert counts(index(folder, store)) == {"changed": 1, "unchanged": 1, "described": 1}
    file.write_bytes(packet("<dc:title>Other</dc:title>"))
    os.utime(file, ns=(1, 1))
    assert counts(index(folder, store)) == {"changed": 1, "unchanged": 1, "described": 1}
    assert texts(store)["a.jpg"] == ("Other", "sidecar title")
    write(folder, a="A line.")
    index(folder, store)
    assert texts(store)["a.jpg"] == ("A line. Other", "jsonl, sidecar title")
    (folder / "data.jsonl").unlink()  # what a line said stays until it is taken away
    file.unlink()
    assert counts(index(folder, store)) == {"changed": 1, "unchanged": 1, "described": 1}
    assert texts(store)["a.jpg"] == ("A line.", "jsonl")
    assert counts(index(folder, store, forget_descriptions="*")) == {"changed": 1, "unchanged": 1}
    assert texts(store) == {"a.jpg": (None, None), "b.jpg": (None, None)}


def test_metadata_can_be_left_and_the_store_remembers_it(tmp_path: Path) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    sidecar(paint(folder / "a.jpg", 1))
    paint(folder / "b.jpg", 2)
    index(folder, store, metadata=False)
    assert texts(store)["a.jpg"] == (None, None)
    assert counts(index(folder, store)) == {"unchanged": 2}
    assert counts(index(folder, store, metadata=True)) == {"changed": 2, "described": 1}
    assert counts(index(folder, store)) == {"unchanged": 2, "described": 1}
    assert counts(index(folder, store, metadata=False)) == {"changed": 2}
    assert texts(store)["a.jpg"] == (None, None)


def test_moved_pictures_and_copies_keep_what_was_written(tmp_path: Path) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    sidecar(paint(folder / "a.jpg", 1))
    write(folder, a="A line.")
    index(folder, store)
    (folder / "data.jsonl").unlink()
    shutil.copy(folder / "a.jpg", folder / "b.jpg")
    (folder / "c").mkdir()
    (folder / "a.jpg").rename(folder / "c/a.jpg")
    (folder / "a.jpg.xmp").rename(folder / "c/a.jpg.xmp")
    assert counts(index(folder, store)) == {"new": 1, "moved": 1, "deleted": 1, "described": 2}
    assert texts(store) == {
        "b.jpg": ("A line.", "jsonl"),
        "c/a.jpg": (f"A line. {HARBOUR}", "jsonl, sidecar keywords"),
    }
    assert rows(store)["b.jpg"].words != rows(store)["c/a.jpg"].words


def test_bad_metadata_is_a_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    (sidecar(paint(folder / "a.jpg", 1))).write_bytes(packet()[:-9])
    os.mkfifo(folder / "b.jpg.xmp")
    paint(folder / "b.jpg", 2)
    (tmp_path / "far.xmp").write_bytes(packet())
    (folder / "c.jpg.xmp").symlink_to(tmp_path / "far.xmp")
    paint(folder / "c.jpg", 3)
    report = index(folder, tmp_path / "s")
    assert counts(report) == {"new": 3} and report.problems == []
    assert [problem.name for problem in report.description_problems] == ["a.jpg", "b.jpg"]


def test_sidecars_are_found_whatever_the_case_and_obey_excluding(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    for number, name in enumerate(("A.JPG", "b.jpg", "c.jpg")):
        paint(folder / name, number)
        (folder / f"{name.lower()}.XMP").write_bytes(packet())
    (folder / ".sepsignore").write_text("c.jpg.XMP\n")
    report = index(folder, tmp_path / "s")
    assert counts(report) == {"new": 3, "described": 2} and not any("other" in reason for reason in report.skipped)


def test_what_is_said_already_is_not_said_twice() -> None:
    parts = [
        WrittenText("title", "xmp", ("Evening",)),
        WrittenText("caption", "xmp", ("Two boats in the evening!",)),
        WrittenText("persons", "xmp", ("Ana", "Bo")),
        WrittenText("keywords", "iptc", ("boat", "boats", "Evening")),
    ]
    assert described(None, parts) == (
        "Evening. Two boats in the evening! Ana, Bo. boat",
        "xmp title, xmp caption, xmp persons, iptc keywords",
    )
    assert described("evening", parts[:1]) == ("evening", "jsonl")
    assert described(None, []) == (None, None)


def test_a_name_wins_and_every_door_says_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few_sentences(monkeypatch)
    folder, store = tmp_path / "g", tmp_path / "s"
    for number in range(30):
        sidecar(paint(folder / f"p{number}.jpg", number), "<dc:title>A photo of stripes</dc:title>")
    sidecar(folder / "p17.jpg", "<dc:subject><rdf:Bag><rdf:li>Oyarzabal</rdf:li></rdf:Bag></dc:subject>")
    options = IndexOptions(workers=1)
    index_folder(folder, store, model(), model_folder(), options=options)
    library = Library(store=store, model=model_folder(), update=False)
    best = library.search("oyarzabal at the lake")[0]
    assert best.path.name == "p17.jpg" and best.described_by == ["sidecar keywords"]
    assert best.terms["lexical"] > 0 and best.explain().explanation.described_by == ["sidecar keywords"]
    common = ["--store", str(store), "--model", model_folder()]

    def printed(*arguments: str) -> str:
        assert main([*arguments, *common]) == 0
        return capsys.readouterr().out

    assert "sidecar keywords" in printed("search", "oyarzabal", "-k", "1")
    answer: list[dict[str, Any]] = json.loads(printed("search", "oyarzabal", "-k", "1", "--json"))
    assert answer[0]["described_by"] == ["sidecar keywords"]
    assert "sidecar keywords" in printed("explain", "p17.jpg", "oyarzabal")


def test_the_option_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sidecar(paint(tmp_path / "g/a.jpg", 1))
    common = ["index", str(tmp_path / "g"), "--store", str(tmp_path / "s"), "--model", model_folder(), "--no-bank"]
    assert main([*common, "--no-metadata"]) == 0
    assert texts(tmp_path / "s")["a.jpg"] == (None, None)
    assert main([*common, "--metadata", "--json"]) == 0
    assert texts(tmp_path / "s")["a.jpg"] == (HARBOUR, "sidecar keywords")
