"""Files that commands write never replace something that the command did not write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from seps.captioning.journal import Journal
from seps.cli.main import main
from seps.cli.shared.outputs import check_output, check_picture, save_picture, write_output
from seps.retrieval.data import DataError

COMMANDS = {
    "--json": ["eval", "--data", "data.jsonl"],
    "--report": ["caption", "photos", "--out", "dense.jsonl"],
}


@pytest.mark.parametrize("text", ['{"image": "a.jpg", "captions": ["x"]}\n', '{"mine": 1}', "notes", "[1]"])
@pytest.mark.parametrize("option", COMMANDS)
def test_a_foreign_file_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(text)
    # The data are not there or no data at all: the sentence about the output must come first.
    assert main([*COMMANDS[option], option, "data.jsonl"]) == 2
    assert f"{option} data.jsonl exists and was not written by this command" in capsys.readouterr().err
    assert Path("data.jsonl").read_text() == text and len(list(tmp_path.iterdir())) == 1


PICTURES = {
    "--sheet": ["duplicates", "--store", "none"],
    "--html": ["duplicates", "--store", "none"],
    "--out": ["explain", "photo.jpg", "a dog"],
}


@pytest.mark.parametrize("option", PICTURES)
def test_pictures_and_pages_of_others_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "mine.html" if option == "--html" else "mine.png"
    if option == "--html":
        Path(name).write_text("<!doctype html><p>my page")
    else:
        Image.new("RGB", (4, 4), "red").save(name)
    before = Path(name).read_bytes()
    assert main([*PICTURES[option], option, name]) == 2
    assert f"{option} {name} exists and was not made by seps; it was left" in capsys.readouterr().err
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_an_earlier_picture_of_ours_is_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"why{suffix}"
    for color in ("red", "blue"):
        save_picture(Image.new("RGB", (4, 4), color), check_picture(path, "--out"))
    with Image.open(path) as found:
        red, _, blue = found.convert("RGB").getpixel((1, 1))
    assert blue > red and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("path", "said"), [("folder", "is a folder"), ("none/out.json", "does not exist")])
def test_impossible_outputs_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert main(["eval", "--data", "data.jsonl", "--json", path]) == 2
    assert said in capsys.readouterr().err


def test_an_earlier_result_and_an_empty_file_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.touch()
    write_output(check_output(path, "--json", "rsum"), {"rsum": 1.0})
    write_output(check_output(path, "--json", "rsum"), {"rsum": 2.0})
    assert json.loads(path.read_text()) == {"rsum": 2.0} and list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_output(path, {"rsum": object()})
    assert json.loads(path.read_text()) == {"rsum": 2.0} and list(tmp_path.iterdir()) == [path]


OURS = {"image": "a.jpg", "sha256": "aa", "dense": "a dog", "model": "m"}


def test_a_data_set_of_one_line_without_a_line_feed_is_not_taken_for_a_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    text = '{"image": "a.jpg", "captions": ["a dog"]}'
    out.write_text(text)
    with pytest.raises(DataError, match="did not write"), Journal(out):
        pass
    assert out.read_text() == text


def test_a_whole_last_line_without_its_line_feed_is_kept_and_a_torn_one_cut(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    line = json.dumps(OURS)
    out.write_text(line)
    with Journal(out) as journal:
        assert journal.good.read("a.jpg") == OURS
        journal.write_good({**OURS, "image": "b.jpg"})
    assert [json.loads(one)["image"] for one in out.read_text().splitlines()] == ["a.jpg", "b.jpg"]
    out.write_text(f"{line}\n{line[:30]}")
    with Journal(out) as journal:
        assert list(journal.good.entries) == ["a.jpg"]
    assert out.read_text() == f"{line}\n"
