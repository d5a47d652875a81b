"""A store in object storage, over a server that speaks S3: one writer, several readers, nothing in local files.

Skipped where moto's server is not installed (pip install 'moto[server]').
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lance
import pytest

from seps import locks
from seps.cli.main import call
from seps.locks import FREE, LOCK_TABLE, FileInUse, RemoteLock
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.maintenance import status, verify
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store, writer_lock
from stores import gallery, index, model, model_folder, paint

moto = pytest.importorskip("moto.server", reason="moto's server is not installed (pip install 'moto[server]')")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    import boto3

    patch = pytest.MonkeyPatch()
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    settings = {
        "AWS_ENDPOINT": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        patch.setenv(name, value)
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="photos")
    yield "s3://photos"
    server.stop()
    patch.undo()


def put(folder: Path, place: str) -> int:
    return index_folder(folder, place, model(), model_folder(), options=IndexOptions(workers=2, bank=False)).new


def locked(place: str) -> bool:
    return [row["token"] for row in lance.dataset(f"{place}/{LOCK_TABLE}.lance").to_table().to_pylist()] != [FREE]


def test_index_search_and_read_while_one_writes(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr("seps.photos.store.store._FRESH", timedelta(0))
    monkeypatch.setattr("seps.photos.indexing.build.COMMIT_ROWS", 2)
    monkeypatch.chdir(tmp_path)
    folder, place = gallery(tmp_path / "g", 6), f"{bucket}/one"
    assert put(folder, place) == 6
    index(folder, tmp_path / "local")
    here, there = Searcher(tmp_path / "local", model()), Searcher(place, model())
    for exact in (False, True):
        assert there.search("a dog", exact=exact) == here.search("a dog", exact=exact)
    identity = there.search("a dog")[0].id
    assert there.store.get(identity, ["thumbnail"]) == here.store.get(identity, ["thumbnail"])

    for number in range(4):
        paint(folder / f"new{number}.jpg", 100 + number)
    seen: list[list[int]] = [[], []]
    stop = threading.Event()

    def read(counts: list[int]) -> None:
        reader = Searcher(place, model())
        while not stop.is_set():
            counts.append(len(reader.search("a dog", k=50)))

    readers = [threading.Thread(target=read, args=(counts,)) for counts in seen]
    for reader in readers:
        reader.start()
    assert put(folder, place) == 4
    stop.set()
    for reader in readers:
        reader.join()
    assert all(counts and counts == sorted(counts) and counts[0] >= 6 for counts in seen)
    assert len(there.search("a dog", k=50)) == 10
    assert verify(Store.open(place)) == []
    assert status(Store.open(place))["disk_bytes"] > 10 * 1000
    assert call("index", ["--store", place, "--compact"]) == 0
    assert len(Store.open(place)) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "local"]  # nothing of it is in local files


def test_second_writer_is_told(bucket: str, tmp_path: Path) -> None:
    folder, place = gallery(tmp_path / "g", 2), f"{bucket}/two"
    with writer_lock(place), pytest.raises(StoreError, match="process"):
        put(folder, place)
    assert put(folder, place) == 2
    assert not locked(place)


def test_a_killed_writer_holds_nobody_up_for_long(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{bucket}/three"
    monkeypatch.setattr(locks, "SIGN_SECONDS", 60)
    first = RemoteLock(place).__enter__()
    time.sleep(0.01)
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.0)
    with RemoteLock(place):
        with pytest.raises(FileInUse, match="taken"):
            first.check()
        first.__exit__(None, None, None)  # and does not give back what is no longer its own
        assert locked(place)
    assert not locked(place)


def test_the_holder_signs(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{bucket}/four"
    monkeypatch.setattr(locks, "SIGN_SECONDS", 0.05)
    with RemoteLock(place) as lock:
        before = lock._row()
        deadline = time.monotonic() + 10
        while lock._row() == before and time.monotonic() < deadline:
            time.sleep(0.05)
        after = lock._row()
        assert before is not None and after is not None and after["time"] > before["time"]
        lock.check()


def test_a_bucket_that_is_not_there(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        put(gallery(tmp_path / "g", 1), "s3://nowhere/x")
    with pytest.raises(StoreError, match="store"):
        Store.open(f"{bucket}/nothing")
