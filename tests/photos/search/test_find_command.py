"""`seps find`: indexes what is new, answers, and prints what other programs can read."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from messages import mentions
from seps.cli.main import call, main
from seps.images.dates import nanoseconds
from seps.photos import library as photo_library
from seps.photos.search.searcher import Searcher
from seps.photos.search.written import _write_new
from seps.photos.store.places import data_folder, default_store
from seps.photos.store.store import Store, writer_lock
from stores import gallery, index, model_folder, paint


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def folder(tmp_path: Path, data: Path) -> Path:
    """A gallery of six whose default store is made without a bank, which takes less time."""
    made = gallery(tmp_path / "photos", 6)
    index(made, default_store(data, made, model_folder()))
    return made


def find(*words: object) -> int:
    return call("find", [str(word) for word in (*words, "--model", model_folder())])


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_the_first_call_makes_a_store_and_the_next_ones_index_what_is_new(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = gallery(tmp_path / "photos", 2)
    assert find("a dog", folder) == 0
    said = capsys.readouterr()
    store = default_store(data, folder, model_folder())
    assert "time" in said.err and str(store) in said.err and "Indexed 2 pictures" in said.err
    head, *lines = said.out.splitlines()
    assert head.split() == ["rank", "score", "confidence", "date", "picture", "size"]
    expected = Searcher(store, model_folder()).search("a dog")
    good = sum(bool(hit.good) for hit in expected)
    assert len(lines) == 3 - (good == 2) and (good == 2 or "---" in lines.pop(good))  # the line of seps search
    assert [line.split()[1] for line in lines] == [f"{hit.score:.3f}" for hit in expected]
    assert all(str(folder / hit.path) in line for line, hit in zip(lines, expected, strict=True))
    paint(folder / "new.jpg", 50)
    (folder / "p00.jpg").unlink()
    assert find("a dog", folder, "--paths") == 0
    said = capsys.readouterr()
    assert "Indexed" in said.err and "1 gone" in said.err
    assert set(said.out.splitlines()) == {str(folder / "new.jpg"), str(folder / "sub" / "p01.jpg")}


def test_nothing_new_opens_no_model_for_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the search loads a model then, and nothing is written."""
    loaded: list[str] = []
    real = photo_library.load_engine

    def load(name: Any, **options: Any) -> Any:
        loaded.append("index")
        return real(name, **options)

    monkeypatch.setattr(photo_library, "load_engine", load)  # what find imports; the searcher has its own name
    monkeypatch.setattr("seps.photos.indexing.build.writer_lock", lambda _: pytest.fail("nothing is to be written"))
    assert find("a dog", folder, "--paths") == 0
    assert loaded == []
    monkeypatch.setattr("seps.photos.indexing.build.writer_lock", writer_lock)
    os.utime(folder / "p00.jpg")
    assert find("a dog", folder, "--paths") == 0
    assert loaded == ["index"]


def test_a_damaged_file_is_read_once(
    folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else every search of a folder with one such file would open the model, and calibrate again."""
    (folder / "bad.jpg").write_bytes(b"no picture")
    calls: list[str] = []
    real = photo_library.load_engine
    monkeypatch.setattr(photo_library, "load_engine", lambda name, **more: calls.append("load") or real(name, **more))
    for _ in range(3):
        assert find("a dog", folder, "--paths") == 0
    assert calls == ["load"]
    told, store = capsys.readouterr().err, default_store(data, folder, model_folder())
    assert told.count("bad.jpg") == 1 and mentions(told, "1", "format")
    again = f"seps index --store {store}"
    assert told.count(again) == 2
    assert index(folder, store).problems  # seps index tries again
    (folder / "worse.jpg").write_bytes(b"no picture either")  # this one is new
    assert find("a dog", folder, "--paths") == 0
    told = capsys.readouterr().err
    assert "worse.jpg" in told and "bad.jpg" not in told and told.count(again) == 1 and calls == ["load", "load"]
    (folder / "worse.jpg").unlink()
    paint(folder / "bad.jpg", 77)
    assert find("a dog", folder, "--paths") == 0
    assert str(folder / "bad.jpg") in capsys.readouterr().out and calls == ["load"] * 3
    (folder / "p00.jpg").write_bytes(b"damaged later")  # the store keeps what it knew of it
    for _ in range(2):
        assert find("a dog", folder, "--paths") == 0
    assert len(calls) == 4 and str(folder / "p00.jpg") in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bad.mp4", "bad.tar"])
def test_a_damaged_video_or_shard_is_named_once(
    folder: Path, data: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith(".tar"):
        with tarfile.open(folder / name, "w") as tar:
            tar.add(paint(tmp_path / "in.jpg", 9), "in.jpg")
        (folder / name).write_bytes((folder / name).read_bytes()[:900])
    else:
        (folder / name).write_bytes(b"no video")
    store = default_store(data, folder, model_folder())
    for _ in range(3):
        assert find("a dog", folder, "--paths") == 0
    told = capsys.readouterr().err
    assert told.count(f"  {name}: ") == 1 and told.count(f"seps index --store {store}") == 2
    with (folder / name).open("ab") as file:
        file.write(b"more")  # another file now
    assert find("a dog", folder, "--paths") == 0
    assert capsys.readouterr().err.count(f"  {name}: ") == 1


def test_a_store_of_another_model_says_what_to_do(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = default_store(data, folder, "mini")
    index(folder, store)  # as if another release had shipped other weights under this name
    assert main(["find", "a dog", str(folder), "--model", "mini"]) == 2
    said = capsys.readouterr().err
    assert "model" in said or "weights" in said
    assert f"delete {store}" in said and len(Store.open(store)) == 6
    assert main(["find", "a dog", str(folder), "--store", str(store), "--model", "mini"]) == 2  # named, so it counts


def test_the_current_folder_is_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert find("a dog", "--paths", "-k", "1") == 0
    assert Path(out(capsys).strip()).parent in (folder, folder / "sub")


def test_paths_for_pipes(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    odd = folder / "two\nlines \u00e9.jpg"
    paint(folder / "x.jpg", 70)
    os.replace(folder / "x.jpg", odd)
    expected = {str(path).encode() for path in folder.rglob("*.jpg")}
    assert find("a dog", folder, "-0") == 0
    written = capfdbinary.readouterr().out
    assert written.endswith(b"\0") and set(written[:-1].split(b"\0")) == expected
    assert find("a dog", folder, "--paths") == 0
    assert set(capfdbinary.readouterr().out.replace(b"two\nlines", b"two_lines").splitlines()) == {
        path.replace(b"two\nlines", b"two_lines") for path in expected
    }


@pytest.mark.slow
def test_a_real_pipe(folder: Path) -> None:
    """The list goes into xargs, and what is said besides does not."""
    command = f"{sys.executable} -m seps.cli.main find 'a dog' {folder} --model {model_folder()} -0 | xargs -0 ls -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, env=os.environ)
    assert len(done.stdout.splitlines()) == 6


def test_json_and_csv_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find("a dog", folder, "--json") == 0
    values = json.loads(out(capsys))
    assert [value["rank"] for value in values] == [1, 2, 3, 4, 5, 6]
    assert all(os.path.isfile(value["path"]) and value["date_source"] == "file" for value in values)
    assert find("a dog", folder, "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(out(capsys))))
    assert [(row["path"], float(row["score"]), row["date"]) for row in rows] == [
        (value["path"], value["score"], value["date"]) for value in values
    ]


def test_names_stay_whole_where_standard_output_lacks_their_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, name in enumerate(("é.jpg", "日本.jpg", "🐶.jpg")):
        paint(folder / name, number)
    index(folder, tmp_path / "s")
    for option in ("--json", "--csv", "--paths"):
        written = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="backslashreplace"))
            assert find("a dog", "--store", tmp_path / "s", option) == 0
            sys.stdout.flush()
            text = written.getvalue().decode()
        rows = {"--json": lambda text: json.loads(text), "--csv": lambda text: list(csv.DictReader(io.StringIO(text)))}
        names = text.splitlines() if option == "--paths" else [row["path"] for row in rows[option](text)]
        assert sorted(names) == sorted(str(path) for path in folder.iterdir())


def test_a_store_that_can_only_be_read_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = gallery(tmp_path / "photos", 2), tmp_path / "s"
    index(folder, store)
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("writer.lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr(os, "open", refuse)
    words = ["find", "a dog", str(folder), "--store", str(store), "--paths"]
    for more in ([], ["--no-update"]):
        assert main([*words, *more]) == 0
        assert len(out(capsys).splitlines()) == 2
    paint(folder / "new.jpg", 50)
    assert main(words) == 2
    assert "written" in (told := capsys.readouterr().err) and "add --no-update" in told
    assert main([*words, "--no-update"]) == 0 and len(out(capsys).splitlines()) == 2


def test_another_folder_than_that_of_the_store_is_told_the_commands_that_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = gallery(tmp_path / "photos", 2), tmp_path / "my store"
    index(folder, store)
    other = gallery(tmp_path / "other", 2)
    assert main(["find", "a dog", str(other), "--store", str(store)]) == 2
    command = f"seps index {other} --store '{store}'"
    told = capsys.readouterr().err
    assert f"{command} --moved" in told and f"{command} --add" in told
    assert main(["find", "a dog", str(folder / "sub"), "--store", str(store)]) == 2
    told = capsys.readouterr().err
    assert "--folder sub" in told and "--moved" not in told


def test_sums_with_pictures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--image", folder / "p00.jpg", "--minus-image", folder / "p02.jpg", "--json")
    assert find("a dog - stripes", folder, *words) == 0
    (best, *_) = json.loads(out(capsys))
    names = ["a dog", "- stripes", f"picture {folder / 'p00.jpg'}", f"- picture {folder / 'p02.jpg'}"]
    assert [part["part"] for part in best["parts"]] == names
    assert sum(part["score"] for part in best["parts"]) == pytest.approx(best["score"], abs=1e-5)
    assert find("--image", folder / "p00.jpg", folder, "--json") == 0  # one word that is a folder is the folder
    (best, *_) = json.loads(out(capsys))
    assert best["path"] == str(folder / "p00.jpg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["horse +"], "add"),
        ([], "look"),
        (["- grass"], "away"),
        (["a + b", "--min-confidence", "0.5"], "sentence"),
        (["a", "{nowhere}"], "folder"),
        (["a", "{folder}", "--store", "{new}", "--no-update"], "store"),
        (["a", "--store", "{new}"], "folder"),
        (["a", "{folder}", "--copy-to", "{folder}/sub/new"], "found"),
        (["a", "{folder}", "--html", "{folder}/p00.jpg"], "seps"),
        (["a", "{folder}", "--since", "soon"], "read"),
        (["a", "{folder}", "--exclude", ""], "names nothing"),
        (["a", "{folder}", "--json", "--csv"], "not allowed"),
    ],
)
def test_mistakes_are_sentences(
    folder: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    places = {"folder": str(folder), "new": str(tmp_path / "new"), "nowhere": str(tmp_path / "nowhere")}
    assert main(["find", *(word.format(**places) for word in words), "--model", model_folder()]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert not (tmp_path / "new").exists()


def test_sorting_and_dates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))):
        exif = Image.Exif()
        exif.get_ifd(0x8769)[0x9003] = f"20{10 + number}:01:01 00:00:00"
        Image.open(path).save(path, exif=exif)
    by_age = [str(path) for path in sorted(folder.rglob("*.jpg"))]
    os.utime(by_age[0], ns=(nanoseconds("2030-01-01"),) * 2)  # the file time does not count
    for order, expected in (("oldest", by_age), ("newest", by_age[::-1])):
        assert find("a dog", folder, "--paths", "--sort", order) == 0
        assert out(capsys).splitlines() == expected
    assert find("a dog", folder, "--json", "--sort", "oldest", "-k", "2") == 0
    best = json.loads(out(capsys))
    assert {value["rank"] for value in best} == {1, 2}  # the two best, then their order
    assert all(value["date_source"] == "exif" for value in best)
    assert find("a dog", folder, "--paths", "--since", "2011-01-01", "--until", "2013-01-01") == 0
    assert set(out(capsys).splitlines()) == set(by_age[1:3])


def test_copies_are_folded_here_and_in_a_store(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "p02.jpg", folder / "copy.jpg")
    assert find("a dog", folder, "--json") == 0
    answer = json.loads(out(capsys))
    (entry,) = [hit for hit in answer if "folded" in hit]
    both = {str(folder / "p02.jpg"), str(folder / "copy.jpg")}
    assert {entry["path"], *(copy["path"] for copy in entry["folded"])} == both
    assert [hit["rank"] for hit in answer] == [1, 2, 3, 4, 5, 6]
    assert find("a dog", folder, "--paths", "-k", "6") == 0
    assert len(both & set(paths := out(capsys).splitlines())) == 1 and len(paths) == 6  # six pictures, not five
    assert find("a dog", folder, "--paths", "--no-fold") == 0
    assert both < set(out(capsys).splitlines())
    assert find("a dog", folder) == 0
    assert out(capsys).count("(and 1 copy)") == 1
    search = ["--store", str(default_store(data, folder, model_folder())), "--json"]
    for words in (["a dog"], ["--image", str(folder / "p04.jpg")]):
        assert call("search", [*words, *search]) == 0
        found = json.loads(out(capsys))
        assert [len(hit.get("folded", ())) for hit in found].count(1) == 1 and len(found) == 6
        assert call("search", [*words, *search, "--no-fold"]) == 0
        assert len(json.loads(out(capsys))) == 7


def test_copies_never_overwrite(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "p00.jpg").write_bytes(b"mine")
    paint(folder / "sub" / "p00.jpg", 80)
    for _ in range(2):
        assert find("a dog", folder, "--copy-to", tmp_path / "c") == 0
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"p00.jpg", "p00 (2).jpg", "p00 (3).jpg", "p00 (4).jpg", "p00 (5).jpg", "p01.jpg", "p01 (2).jpg"} <= names
    assert (tmp_path / "c" / "p00.jpg").read_bytes() == b"mine" and len(names) == 1 + 2 * 7
    originals = sorted(path.read_bytes() for path in folder.rglob("*.jpg"))
    copies = sorted(path.read_bytes() for path in (tmp_path / "c").iterdir() if path.name != "p00.jpg")
    assert copies == sorted(originals * 2)


def test_a_copy_that_fails_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    real = Path.open

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        real(path, mode, **options).close()
        return Full()

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match="No space"):
        _write_new(tmp_path, "a.jpg", b"data")
    assert list(tmp_path.glob("*.jpg")) == []


def test_the_page_holds_its_thumbnails_and_escapes_names(folder: Path, tmp_path: Path) -> None:
    os.replace(folder / "p00.jpg", folder / "<b>&.jpg")
    page = tmp_path / "o.html"
    for _ in range(2):  # a page of ours may be replaced
        assert find("<script> + a dog", folder, "--html", page) == 0
    text = page.read_text()
    assert text.count("data:image/jpeg;base64,/9j/") == 6 and text.count("<figure>") == 6
    assert "&lt;b&gt;&amp;.jpg" in text and "<b>" not in text and "<script>" not in text
    assert (folder / "p02.jpg").as_uri() in text


def test_exclusions_are_counted_and_take_nothing_away(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find("a dog", folder, "--paths", "--exclude", "sub/") == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert mentions(said.err, "3", "pictures")
    assert "--exclude" in said.err
    assert find("a dog", folder, "--paths") == 0
    assert len(out(capsys).splitlines()) == 6
    (folder / ".sepsignore").write_text("*\n")
    assert find("a dog", folder, "--paths") == 0
    said = capsys.readouterr()
    assert said.out == "" and "pictures" in said.err


def test_while_another_process_indexes_what_is_there_is_searched(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paint(folder / "new.jpg", 55)
    with writer_lock(str(default_store(data, folder, model_folder()))):
        assert find("a dog", folder, "--paths") == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 6 and "being" in said.err


def test_a_store_that_would_lose_much_is_not_touched(folder: Path, data: Path) -> None:
    for path in (folder / "sub").iterdir():
        path.unlink()
    words = ["find", "a dog", str(folder), "--model", model_folder(), "--paths"]
    assert main(words) == 2
    store = default_store(data, folder, model_folder())
    assert len(Store.open(store)) == 6
    assert main([*words, "--prune"]) == 0 and len(Store.open(store)) == 3


def test_a_store_of_several_folders_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A named store keeps its model and its precision, and all of its folders are looked at."""
    a, b, store = gallery(tmp_path / "a", 2), gallery(tmp_path / "b", 2), tmp_path / "s"
    assert call("index", [str(a), str(b), "--store", str(store), "--model", model_folder(), "--size", "small", "--no-bank"]) == 0  # fmt: skip  # noqa: E501
    paint(b / "new.jpg", 60)
    capsys.readouterr()
    assert call("find", ["a dog", "--store", str(store), "--paths", "--no-fold"]) == 0
    assert set(out(capsys).splitlines()) == {str(path) for place in (a, b) for path in place.rglob("*.jpg")}
    assert Store.open(store).settings.layout.size == "small" and not Store.open(store).settings.bank
    for place in (a, b):  # one of its folders alone
        assert call("find", ["a dog", str(place), "--store", str(store), "--paths"]) == 0
        assert set(out(capsys).splitlines()) == {str(path) for path in place.rglob("*.jpg")}


def test_where_data_lies_on_each_system(tmp_path: Path) -> None:
    home = Path("/home/u")
    assert data_folder({}, "linux", home) == home / ".local" / "share"
    assert data_folder({"XDG_DATA_HOME": "/d"}, "linux", home) == Path("/d")
    assert data_folder({"XDG_DATA_HOME": "relative"}, "linux", home) == home / ".local" / "share"
    assert data_folder({}, "darwin", home) == home / "Library" / "Application Support"
    assert data_folder({"LOCALAPPDATA": "/l"}, "win32", home) == Path("/l")
    folder = tmp_path / "My photos \u00e9"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    stores = {default_store(tmp_path, place, "mini") for place in (folder, f"{folder}/", tmp_path / "link")}
    assert len(stores) == 1 and next(iter(stores)).name.startswith("My-photos-")
    assert default_store(tmp_path, folder, "base") not in stores
    assert default_store(tmp_path, tmp_path, "mini") not in stores
