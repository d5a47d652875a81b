"""Locks and readers under faults: one writer whatever happens, sentences instead of raw errors."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

from full_disk import full_disk
from messages import naming
from seps import locks
from seps.cli.main import main
from seps.images.sources import row_id
from seps.locks import FREE, LOCK_TABLE, FileInUse, FileLock, RemoteLock
from seps.photos.store.rows import Row, StoreError
from seps.photos.store.store import Store, writer_lock
from stores import gallery, index, model_folder, plain_settings

HOLD = """
import errno, os, sys, time
from pathlib import Path
from seps import locks
if sys.argv[2] == "marker":
    def none(handle):
        raise OSError(errno.ENOTSUP, "not supported")
    locks._try_lock = none
lock = locks.FileLock(Path(sys.argv[1]), Path("x")).__enter__()
print("held", flush=True)
time.sleep(60)
"""


def no_flock(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOTSUP) -> None:
    """As a network file system without locks answers."""
    import fcntl

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("kind", ["flock", "marker"])
def test_a_killed_holder_frees_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), kind], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        if kind == "marker":
            no_flock(monkeypatch)
        with pytest.raises(FileInUse, match=naming(process.pid)):
            FileLock(path, tmp_path).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with FileLock(path, tmp_path), pytest.raises(FileInUse, match=f"process {os.getpid()} on "):
            FileLock(path, tmp_path).__enter__()
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("kind", ["flock", "marker"])
def test_a_disk_that_is_full_for_a_while_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "marker":
        no_flock(monkeypatch)
    lock = FileLock(tmp_path / "lock", tmp_path)
    with full_disk(0), pytest.raises(OSError, match="large"):
        lock.__enter__()
    assert not (tmp_path / "lock.held").exists()
    with FileLock(tmp_path / "lock", tmp_path), pytest.raises(FileInUse):
        lock.__enter__()
    with lock:
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_cannot_be_removed_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    lock = FileLock(tmp_path / "lock", tmp_path).__enter__()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="ead-only"):
            lock.__exit__()
    with FileLock(tmp_path / "lock", tmp_path):
        pass


def test_a_store_can_be_written_once_the_disk_has_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gallery(tmp_path / "g", 1)
    arguments = ["index", str(folder), "--model", model_folder(), "--store", str(tmp_path / "s"), "--no-bank"]
    with full_disk(0):
        assert main(arguments) == 2
    assert "[Errno" not in capsys.readouterr().err
    assert main(arguments) == 0


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_can_be_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    no_flock(monkeypatch, number)
    folder = gallery(tmp_path / "g", 1)
    assert index(folder, tmp_path / "s").new == 1
    with writer_lock(str(tmp_path / "s")), pytest.raises(StoreError, match="process"):
        index(folder, tmp_path / "s")
    assert index(folder, tmp_path / "s").unchanged == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_store_that_cannot_be_written_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    folder = gallery(tmp_path / "g", 1)
    index(folder, tmp_path / "s")
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("writer.lock"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(locks.os, "open", refuse)
    for arguments in ([str(folder), "--model", model_folder()], ["--compact"]):
        assert main(["index", *arguments, "--store", str(tmp_path / "s")]) == 2
        told = capsys.readouterr().err
        assert f"{os.strerror(number)}" in told and "--store" in told and "[Errno" not in told


def test_a_store_in_the_place_of_a_file_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gallery(tmp_path / "g", 1)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "s"):
        assert main(["index", str(folder), "--model", model_folder(), "--store", str(place)]) == 2
        told = capsys.readouterr().err
        assert "written" in told and "[Errno" not in told
    assert (tmp_path / "file").read_text() == "mine"


class Slow(RemoteLock):
    """Lets several processes read the stale row before any of them takes it."""

    together: threading.Barrier

    def _row(self) -> dict[str, Any] | None:
        row = super()._row()
        if not getattr(self, "read", False):
            self.read = True
            self.together.wait(30)
        return row


def test_one_of_many_takes_a_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SIGN_SECONDS", 60)
    for attempt in range(5):
        place = str(tmp_path / str(attempt))
        RemoteLock(place)._make()  # by a process that died
        monkeypatch.setattr(locks, "STALE_SECONDS", 0.0)
        Slow.together = threading.Barrier(4)
        entered: list[RemoteLock] = []

        def take(place: str = place, entered: list[RemoteLock] = entered) -> None:
            lock = Slow(place)
            with contextlib.suppress(FileInUse):
                entered.append(lock.__enter__())

        takers = [threading.Thread(target=take) for _ in range(4)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        assert len(entered) == 1
        entered[0].check()
        entered[0].__exit__(None, None, None)
        rows = lance.dataset(f"{place}/{LOCK_TABLE}.lance").to_table().to_pylist()
        assert [row["token"] for row in rows] == [FREE]
        monkeypatch.setattr(locks, "STALE_SECONDS", 120.0)
        with RemoteLock(place):  # a free lock needs no waiting
            pass


def test_a_holder_that_signed_again_is_not_robbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(locks, "SIGN_SECONDS", 60)
    place = str(tmp_path / "s")
    holder = RemoteLock(place).__enter__()

    class Interrupted(RemoteLock):
        def _update(self, condition: str, values: dict[str, Any]) -> int:
            holder._update(f"token = '{holder._token}'", {"time": 2e9})
            return super()._update(condition, values)

    with pytest.raises(FileInUse):
        Interrupted(place).__enter__()
    holder.check()
    holder.__exit__(None, None, None)


def filled(place: Path, count: int) -> Store:
    """A store in many small parts."""
    store = Store.create(place, plain_settings(4, (1, 1)))
    for start in range(0, count, 10):
        names = [f"{i:04}.jpg" for i in range(start, start + 10)]
        facts = (1, 1, "0" * 64, 9, 9, b"\xff\xd8")
        vector = np.ones(4, np.float16)
        tokens = np.random.default_rng(start).bytes(20_000)
        store.put([Row(row_id(n, None), n, None, *facts, vector, tokens, None, None, None, None) for n in names])
    return store


@pytest.mark.parametrize("columns", [["tokens"], ["id", "tokens"]])
def test_reading_goes_on_while_the_table_is_compacted(tmp_path: Path, columns: list[str]) -> None:
    filled(tmp_path / "s", 200)
    reader, writer = Store.open(tmp_path / "s"), Store.open(tmp_path / "s")
    seen = []
    for number, batch in enumerate(reader.scan(["path", *columns], batch_size=7)):
        if number in (1, 4):
            writer.delete([row_id("0199.jpg", None)])
            writer.tidy(always=True)
        assert list(batch.rows()[0]) == ["path", *columns]
        seen += batch.values("path")
    assert sorted(seen)[:199] == [f"{i:04}.jpg" for i in range(199)] and len(seen) == len(set(seen))


def test_a_store_that_is_deleted_while_it_is_read_gets_a_sentence(tmp_path: Path) -> None:
    import shutil

    store = filled(tmp_path / "s", 20)
    shutil.rmtree(tmp_path / "s")
    for work in (lambda: list(store.scan(["tokens"])), lambda: store.rows([row_id("0001.jpg", None)])):
        with pytest.raises(StoreError, match="read"):
            work()


DAMAGED = ["", "{", "[]", "{}", '{"format": "x"}', '{"grid": [3, 3]}', '{"grid": 3}']


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_settings_get_a_sentence(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gallery(tmp_path / "g", 1)
    index(folder, tmp_path / "s")
    Store.open(tmp_path / "s").table.newest.update_schema_metadata({"seps": text})
    place = str(tmp_path / "s")
    for arguments in (["search", "a dog"], ["index", "--status"], ["index", str(folder), "--model", model_folder()]):
        assert main([*arguments, "--store", place]) == 2
        assert "settings" in capsys.readouterr().err


def test_a_folder_without_pictures_of_the_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(gallery(tmp_path / "g", 3), tmp_path / "s")
    search = ["search", "a dog", "--store", str(tmp_path / "s"), "--json", "--folder"]
    assert main([*search, "."]) == 0 and capsys.readouterr().out.count('"rank"') == 3
    assert main([*search, "sub"]) == 0 and capsys.readouterr().out.count('"rank"') == 1
    assert main([*search, "nowhere"]) == 2
    assert "picture" in (told := capsys.readouterr().err) and "sub" in told
