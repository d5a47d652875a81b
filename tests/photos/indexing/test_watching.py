"""`seps index --watch`: indexes what is new, survives a folder that vanishes, ends on Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from seps.cli.main import call
from seps.photos.indexing.build import IndexReport, index_folder
from seps.photos.indexing.opening import IndexOptions
from seps.photos.indexing.watching import Watch, list_folders
from seps.photos.store.store import Store
from stores import gallery, model, model_folder, paint


class Watched:
    """A watch over folders, with what it said and did."""

    def __init__(self, store: Path, *folders: Path) -> None:
        self.said: list[str] = []
        self.reports: list[IndexReport] = []
        self.store, self.folders = store, folders
        self.watch = Watch(lambda: list_folders([str(folder) for folder in folders]), self.index, self.said.append)

    def index(self) -> None:
        options = IndexOptions(workers=2, bank=False)
        self.reports.append(index_folder(self.folders, self.store, model(), model_folder(), options=options))


def test_it_indexes_when_something_changes_and_only_then(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 3)
    watched = Watched(tmp_path / "s", folder)
    assert [watched.watch.step() for _ in range(3)] == [True, False, False]
    paint(folder / "new.jpg", 50)
    assert watched.watch.step() and watched.reports[-1].new == 1
    os.utime(folder / "new.jpg", ns=(1, 1))
    assert watched.watch.step() and watched.reports[-1].changed == 1
    (folder / "data.jsonl").write_text('{"image": "new.jpg", "dense": "A new one."}\n')
    assert watched.watch.step() and Store.open(tmp_path / "s").described() == 4
    (folder / ".sepsignore").write_text("sub/\n")
    assert watched.watch.step() and watched.reports[-1].excluded == 1
    assert not watched.watch.step() and watched.said == []


def test_a_folder_that_vanishes_is_said_once_and_loses_nothing(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 3)
    watched = Watched(tmp_path / "s", folder)
    watched.watch.step()
    os.replace(folder, tmp_path / "away")
    for _ in range(3):
        assert not watched.watch.step()
    (said,) = watched.said
    assert f"{folder}" in said and "Watching" in said
    assert len(Store.open(tmp_path / "s")) == 3 and len(watched.reports) == 1
    paint(tmp_path / "away" / "new.jpg", 51)
    os.replace(tmp_path / "away", folder)
    assert watched.watch.step()
    assert len(watched.said) == 2
    assert watched.reports[-1].new == 1 and not watched.watch.step()


def test_an_empty_place_to_mount_at_loses_nothing(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 3)
    watched = Watched(tmp_path / "s", folder)
    watched.watch.step()
    os.replace(folder, tmp_path / "away")
    folder.mkdir()
    for _ in range(2):
        assert not watched.watch.step()
    assert len(watched.said) == 1 and "--prune" in watched.said[0]
    assert len(Store.open(tmp_path / "s")) == 3
    folder.rmdir()
    os.replace(tmp_path / "away", folder)
    assert watched.watch.step() and len(watched.said) == 2


def test_the_other_folders_go_on(tmp_path: Path) -> None:
    a, b = gallery(tmp_path / "a", 2), gallery(tmp_path / "b", 2)
    paint(b / "p00.jpg", 80)
    watched = Watched(tmp_path / "s", a, b)
    watched.watch.step()
    os.replace(b, tmp_path / "away")
    paint(a / "new.jpg", 52)
    assert watched.watch.step() and watched.reports[-1].new == 1
    assert len(watched.said) == 1 and len(Store.open(tmp_path / "s")) == 5


def test_a_folder_that_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    watched = Watched(tmp_path / "s", folder)
    (folder / "data.jsonl").unlink()
    (folder / ".sepsignore").symlink_to(folder / ".sepsignore")  # a link to itself cannot be read
    assert not watched.watch.step() and "read" in watched.said[0]
    (folder / ".sepsignore").unlink()
    assert watched.watch.step() and watched.reports[-1].new == 2


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not what():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.1)


def count(store: Path) -> int:
    try:
        return len(Store.open(store))
    except ValueError:
        return 0


def test_an_interrupt_that_a_library_swallows_still_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the database does: it makes an error of the interrupt, and the read is tried again."""
    from seps.cli.pictures import index as command

    folder, before = gallery(tmp_path / "g", 1), signal.getsignal(signal.SIGINT)
    calls: list[int] = []

    def interrupted(*_: object) -> IndexReport:
        calls.append(1)
        assert len(calls) < 4, "the interrupt was lost"
        paint(folder / f"new{len(calls)}.jpg", len(calls))
        if len(calls) == 2:
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        return IndexReport()

    monkeypatch.setattr(command, "_index", interrupted)
    words = [str(folder), "--store", str(tmp_path / "s"), "--model", model_folder(), "--watch", "--every", "0.01"]
    assert call("index", words) == 0
    assert len(calls) == 2 and "Stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_the_command_indexes_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 2), tmp_path / "s"
    words = ["index", str(folder), "--store", str(store), "--model", model_folder(), "--no-bank"]
    command = [sys.executable, "-m", "seps.cli.main", *words, "--watch", "--every", "0.2"]
    told = tmp_path / "told.txt"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with told.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        # A picture is stored before it is told: Ctrl-C in between would be right, too.
        wait_for(lambda: "2 new" in told.read_text(), process)
        paint(folder / "new.jpg", 53)
        wait_for(lambda: "1 new" in told.read_text(), process)
        assert count(store) == 3
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Ctrl-C" in said and "Stopped" in said
