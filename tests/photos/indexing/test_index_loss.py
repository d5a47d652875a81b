"""A row leaves the store only when its file is known to be absent, and many only when the user says so."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from messages import mentions, naming
from seps.cli.main import main
from seps.images import shards
from seps.images.sources import DataError
from seps.photos.indexing import gallery as gallery_module
from seps.photos.indexing.gallery import walk
from seps.photos.indexing.maintenance import verify
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from stores import gallery, index, model_folder, paint


def names(store: Path) -> set[str]:
    return {
        row.path if row.member is None else f"{row.path}:{row.member}" for row in Store.open(store).known().values()
    }


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, folder: Path, after: int = 0) -> Iterator[None]:
    """Reading `folder` fails with EIO after so many names, whoever the user is."""
    real = os.scandir

    class Entries:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __enter__(self) -> Iterator[Any]:
            return self.names()

        def __exit__(self, *_: object) -> None:
            self.inner.close()

        def names(self) -> Iterator[Any]:
            for number, entry in enumerate(self.inner):
                if number == after:
                    break
                yield entry
            raise OSError(errno.EIO, "Input/output error", str(folder))

    def scandir(place: Any) -> Any:
        return Entries(real(place)) if Path(place) == folder else real(place)

    with monkeypatch.context() as patch:
        patch.setattr(gallery_module.os, "scandir", scandir)
        yield


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("count", [1, 8, 30])
def test_an_empty_folder_deletes_nothing(tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As a disk that is not mounted looks."""
    folder, store = gallery(tmp_path / "g", count), tmp_path / "s"
    index(folder, store)
    before = names(store)
    empty(folder)
    arguments = ["index", str(folder), "--store", str(store), "--model", model_folder()]
    assert main(arguments) != 0
    assert "--prune" in capsys.readouterr().err
    assert names(store) == before and len(before) == count
    assert main([*arguments, "--prune"]) == 0 and names(store) == set()


def test_a_root_that_cannot_be_read_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = gallery(tmp_path / "g", 4), tmp_path / "s"
    index(folder, store)
    for after in (0, 2):
        with failing(monkeypatch, folder, after), pytest.raises(DataError, match="Input/output error"):
            index(folder, store)
    with failing(monkeypatch, folder), pytest.raises(DataError):
        index(folder, store, prune=True)
    assert len(names(store)) == 4


@pytest.mark.parametrize("after", [0, 1])
def test_a_folder_that_cannot_be_read_is_listed_and_its_rows_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder, store = gallery(tmp_path / "g", 8), tmp_path / "s"
    paint(folder / "sub" / "deep" / "x.jpg", 90)
    index(folder, store)
    before = names(store)
    (folder / "p00.jpg").unlink()  # in a folder that is read to its end
    for prune in (False, True):
        with failing(monkeypatch, folder / "sub", after):
            report = index(folder, store, prune=prune)
        assert [problem.name for problem in report.problems] == ["sub"]
        assert names(store) == before - {"p00.jpg"}
    assert report.kept >= 4 - after


def test_a_file_that_cannot_be_read_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = gallery(tmp_path / "g", 4), tmp_path / "s"
    index(folder, store)
    (folder / "p02.jpg").write_bytes(b"half of it, or of a dying disk")
    os.utime(folder / "p00.jpg")
    real: Callable[..., bytes] = shards._read

    def read(path: Path, *arguments: int) -> bytes:
        if path.name == "p00.jpg":
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        return real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_read", read)
        report = index(folder, store)
    assert (report.deleted, report.kept) == (0, 2)
    assert {problem.name for problem in report.problems} == {"p00.jpg", "p02.jpg"}
    assert all("keeps" in problem.why for problem in report.problems)
    assert len(names(store)) == 4
    assert index(folder, store).changed == 1  # what can be read again is


def test_a_file_whose_facts_cannot_be_read_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = gallery(tmp_path / "g", 4), tmp_path / "s"
    index(folder, store)
    real = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.name == "p00.jpg":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        report = index(folder, store)
    assert (report.kept, [problem.name for problem in report.problems]) == (1, ["p00.jpg"])
    assert len(names(store)) == 4


def shard(folder: Path, name: str, count: int) -> Path:
    with tarfile.open(folder / name, "w") as tar:
        for number in range(count):
            tar.add(paint(folder.parent / f"m{number}.jpg", 50 + number), f"m{number}.jpg")
    return folder / name


@pytest.mark.parametrize("damage", ["cut", "cut between", "no tar", "header"])
def test_a_damaged_tar_keeps_its_members(tmp_path: Path, damage: str) -> None:
    folder, store = gallery(tmp_path / "g", 2), tmp_path / "s"
    tar = shard(folder, "a.tar", 4)
    index(folder, store)
    before = names(store)
    data = tar.read_bytes()
    with tarfile.open(tar) as whole:
        third = whole.getmembers()[2].offset
    damaged = {
        "cut": data[: third + 600],
        "cut between": data[:third],
        "no tar": b"x" * 2000,
        "header": data[:third] + b"\xff" * 512 + data[third + 512 :],
    }[damage]
    tar.write_bytes(damaged)
    report = index(folder, store)
    assert names(store) == before
    assert any(problem.name == "a.tar" for problem in report.problems)
    shard(folder, "a.tar", 3)  # written anew and whole: what is not in it is gone
    assert index(folder, store).deleted == 1
    assert names(store) == before - {"a.tar:m3.jpg"}


def test_a_tenth_may_go_and_more_needs_a_word(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 5), tmp_path / "s"
    index(folder, store)
    (folder / "p00.jpg").unlink()  # one picture may go from any store but its last
    assert index(folder, store).deleted == 1
    (folder / "p02.jpg").unlink()
    (folder / "p04.jpg").unlink()
    with pytest.raises(StoreError, match=naming("2", "4", "pictures")):
        index(folder, store)
    assert index(folder, store, prune=True).deleted == 2

    folder, store = gallery(tmp_path / "h", 24), tmp_path / "t"
    index(folder, store)
    shutil.rmtree(folder / "sub")
    paint(folder / "new.jpg", 500)
    before = names(store)
    with pytest.raises(StoreError, match=naming("12", "24", "--prune")):
        index(folder, store)
    assert names(store) == before
    report = index(folder, store, prune=True)
    assert (report.deleted, report.new) == (12, 1)


def test_moving_a_whole_folder_is_no_loss(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 24, described=24), tmp_path / "s"
    index(folder, store)
    texts = {row.sha256: row.description for row in Store.open(store).known().values()}
    (folder / "data.jsonl").unlink()
    for name in ("p00.jpg", "p02.jpg"):
        (folder / name).unlink()
    (folder / "all").mkdir()
    for entry in list(folder.iterdir()):
        if entry.name != "all":
            os.replace(entry, folder / "all" / entry.name)
    report = index(folder, store)
    assert (report.moved, report.deleted, report.described) == (22, 24, 22)
    rows = Store.open(store).known().values()
    assert len(rows) == 22 and all(row.description == texts[row.sha256] for row in rows)
    assert verify(Store.open(store)) == []


def test_nothing_changes_when_the_new_place_of_a_moved_folder_is_empty(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 3), tmp_path / "s"
    index(folder, store)
    (tmp_path / "new").mkdir()
    with pytest.raises(StoreError, match="pictures"):
        index(tmp_path / "new", store, moved=True)
    assert Store.open(store).settings.root == str(folder) and len(names(store)) == 3


HIDDEN = (
    ".Trash-1000/files/a.jpg",
    "@eaDir/p00.jpg/SYNOPHOTO_THUMB_M.jpg",
    "._p00.jpg",
    "#recycle/b.jpg",
    ".hidden.png",
)


def test_system_folders_and_hidden_files_are_skipped(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    for number, name in enumerate(HIDDEN):
        paint(folder / Path(name).parent / "x.png", 60 + number)
        os.replace(folder / Path(name).parent / "x.png", folder / name)
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.add(paint(tmp_path / "m.jpg", 70), "m.jpg")
        tar.add(tmp_path / "m.jpg", "__MACOSX/._m.jpg")
    report = index(folder, tmp_path / "s")
    assert names(tmp_path / "s") == {"p00.jpg", "sub/p01.jpg", "a.tar:m.jpg"} and report.problems == []
    expected = {".Trash-1000", "@eaDir", "._p00.jpg", "#recycle", ".hidden.png", "a.tar:__MACOSX/._m.jpg"}
    assert set(report.skipped[gallery_module.HIDDEN]) == expected


def test_pictures_that_are_not_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gallery(tmp_path / "g", 2)
    for name in ("drawing.svg", "b.SVG", "IMG_3.flv", "IMG_4", "all.zip", "notes.txt"):
        (folder / name).write_bytes(b"x")
    assert main(["index", str(folder), "--store", str(tmp_path / "s"), "--model", model_folder()]) == 0
    told = capsys.readouterr().err
    assert mentions(told, "2", "b.SVG", "drawing.svg")
    assert "(IMG_4)" in told and "1 archives" in told and "1 videos" in told
    assert "5 were skipped" in told and "notes.txt" not in told


def test_a_name_in_a_tar_that_is_no_text(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    picture = paint(tmp_path / "m.jpg", 70).read_bytes()
    with tarfile.open(folder / "a.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        for name in ("caf\xe9.jpg", "good.jpg"):
            entry = tarfile.TarInfo(name)
            entry.size = len(picture)
            tar.addfile(entry, io.BytesIO(picture))
    report = index(folder, tmp_path / "s")
    assert [problem.name for problem in report.problems] == ["a.tar:caf\\udce9.jpg"]
    assert names(tmp_path / "s") == {"p00.jpg", "sub/p01.jpg", "a.tar:good.jpg"}


def test_the_walk_goes_in_a_fixed_order(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 6)
    found = [image.path for image in walk(folder).images]
    assert found == ["p00.jpg", "p02.jpg", "p04.jpg", "sub/p01.jpg", "sub/p03.jpg", "sub/p05.jpg"]
