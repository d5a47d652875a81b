"""Files that commands write never replace something that the command did not write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from full_disk import full_disk
from messages import mentions
from seps.cli.main import main
from seps.cli.shared.outputs import check_output, check_picture, save_picture, write_output
from seps.images.sources import DataError
from seps.photos.captions.journal import Journal

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
    assert mentions(capsys.readouterr().err, option, "data.jsonl")
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
    assert mentions(capsys.readouterr().err, option, name)
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_an_earlier_picture_of_ours_is_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"why{suffix}"
    for color in ("red", "blue"):
        save_picture(Image.new("RGB", (4, 4), color), check_picture(path, "--out"))
    with Image.open(path) as found:
        red, _, blue = found.convert("RGB").getpixel((1, 1))
    assert blue > red and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("path", "said"), [("folder", "folder"), ("none/out.json", "exist")])
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
    with pytest.raises(DataError, match="write"), Journal(out):
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


def test_a_picture_too_large_to_open_is_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's error for one is no OSError, and ended the command with a traceback."""
    Image.new("RGB", (64, 64)).save(tmp_path / "map.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="seps"):
        check_picture(tmp_path / "map.png", "--out")


def test_modules_on_a_full_disk_keeps_the_file_that_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of an earlier call was cut off in its middle, and the sentence named no file."""
    file = tmp_path / "real.py"
    assert main(["modules", "-o", str(file), "--style", "slim"]) == 0
    before = file.read_bytes()
    (tmp_path / "link.py").symlink_to(file)
    for name in ("real.py", "link.py"):
        with full_disk(20_000):
            assert main(["modules", "-o", str(tmp_path / name)]) == 2
        assert f"{file}: " in capsys.readouterr().err
        assert file.read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "real.py"]
    assert main(["modules", "-o", str(tmp_path / "link.py")]) == 0
    assert (tmp_path / "link.py").is_symlink() and file.read_bytes() != before


def test_a_picture_on_a_full_disk_keeps_the_one_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "why.png"
    save_picture(Image.new("RGB", (8, 8), "red"), path)
    before = path.read_bytes()
    noise = Image.effect_noise((200, 200), 90).convert("RGB")
    with full_disk(2000), pytest.raises(OSError, match=r"why\.png"):
        save_picture(noise, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_json_file_on_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_output(path, {"first": 1})
    with full_disk(2000), pytest.raises(OSError, match=r"/report\.json'"):
        write_output(path, {"second": "x" * 5000})
    assert json.loads(path.read_text()) == {"first": 1} and list(tmp_path.iterdir()) == [path]
