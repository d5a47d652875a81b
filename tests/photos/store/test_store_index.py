"""Indexing: what is new, changed, moved and gone; one writer; stores of other kinds; nothing lost when it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tarfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from messages import naming
from seps.images.sources import row_id
from seps.photos.indexing import build as indexing
from seps.photos.indexing import embedding
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.maintenance import status, verify
from seps.photos.store.lance.table import open_dataset
from seps.photos.store.rows import FORMAT, OutdatedStoreError, Row, StoreError, StoreSettings
from seps.photos.store.store import Filters, Store, writer_lock
from stores import gallery, index, model, model_folder, paint, plain_settings

Form = Literal["NFC", "NFD"]


def paths(store: Path) -> set[tuple[str, str | None]]:
    return {(row.path, row.member) for row in Store.open(store).known().values()}


def test_incremental(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g"), tmp_path / "s"
    first = index(folder, store)
    assert (first.new, first.described, first.problems) == (8, 4, [])
    again = index(folder, store)
    assert (again.new, again.changed, again.unchanged) == (0, 0, 8)

    paint(folder / "p00.jpg", 100)  # changed
    (folder / "p02.jpg").unlink()  # deleted
    os.replace(folder / "p04.jpg", folder / "sub" / "new name.jpg")  # moved
    shutil.copy(folder / "p06.jpg", folder / "copy.jpg")  # copied
    paint(folder / "新しい.jpg", 200)
    report = index(folder, store)
    assert (report.new, report.changed, report.moved, report.unchanged, report.deleted) == (1, 1, 2, 5, 2)
    names = {path for path, _ in paths(store)}
    assert {"新しい.jpg", "copy.jpg", "sub/new name.jpg"} <= names and not {"p02.jpg", "p04.jpg"} & names
    assert len(Store.open(store)) == 9 and verify(Store.open(store)) == []


def test_moved_images_are_not_embedded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = gallery(tmp_path / "g", described=0), tmp_path / "s"
    index(folder, store)
    os.replace(folder / "sub", folder / "other")
    monkeypatch.setattr(embedding.Preparer, "embed", lambda *given: [])
    assert index(folder, store).moved == 4
    assert verify(Store.open(store)) == []


def test_exchanged_names_are_told_apart(tmp_path: Path) -> None:
    """Each file's content is that of a row which the same run writes anew."""
    folder, store = gallery(tmp_path / "g", 4, described=0), tmp_path / "s"
    index(folder, store, batch_size=1)
    os.replace(folder / "p00.jpg", folder / "x")
    os.replace(folder / "p02.jpg", folder / "p00.jpg")
    os.replace(folder / "x", folder / "p02.jpg")
    monkey = pytest.MonkeyPatch()
    monkey.setattr(indexing, "COMMIT_ROWS", 1)
    index(folder, store, batch_size=1)
    monkey.undo()
    assert verify(Store.open(store)) == []


def test_a_new_description_is_taken_over(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 3, described=0), tmp_path / "s"
    index(folder, store)
    extra = tmp_path / "dense.jsonl"
    extra.write_text('{"image": "p00.jpg", "dense": "A new text."}\n')
    options = IndexOptions(bank=False, dense=[extra])
    report = index_folder(folder, store, model(), model_folder(), options=options)
    assert (report.changed, report.unchanged, report.described) == (1, 2, 1)
    assert [row.description for row in Store.open(store).known().values() if row.path == "p00.jpg"] == ["A new text."]


def test_shards(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 3)
    with tarfile.open(tmp_path / "g" / "a.tar", "w") as shard:
        shard.add(paint(tmp_path / "one.jpg", 50), "in/one.jpg")
        shard.add(paint(tmp_path / "two.jpg", 51), "two.jpg")
        shard.add(Path(__file__), "readme.txt")
    (folder / "shard.jsonl").write_text('{"image": "two.jpg", "shard": "a.tar", "dense": "The second."}\n')
    index(folder, tmp_path / "s")
    found = Store.open(tmp_path / "s").known().values()
    assert {(row.path, row.member) for row in found if row.member} == {("a.tar", "in/one.jpg"), ("a.tar", "two.jpg")}
    assert [row.description for row in found if row.member == "two.jpg"] == ["The second."]
    assert verify(Store.open(tmp_path / "s")) == []
    os.utime(folder / "a.tar")
    assert index(folder, tmp_path / "s").changed == 2


def test_hostile_files_are_listed_and_skipped(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    outside = paint(tmp_path / "outside" / "secret.jpg", 9)
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("I am no picture.\n" * 50)
    (folder / "cut.jpg").write_bytes(paint(tmp_path / "whole.jpg", 3, (300, 200)).read_bytes()[:900])
    (folder / "bomb.png").write_bytes(_bomb())
    (folder / "link.jpg").symlink_to(outside)
    (folder / "folder-link").symlink_to(outside.parent)
    (folder / "broken.tar").write_bytes(b"no tar at all" * 99)
    paint(folder / "wide.png", 4, (20_000, 3))
    os.mkfifo(folder / "pipe.jpg")
    bad_name = os.path.join(os.fsencode(folder), b"\xff\xfe.jpg")
    with open(bad_name, "wb") as file:
        file.write(outside.read_bytes())
    report = index(folder, tmp_path / "s")
    listed = {problem.name for problem in report.problems}
    assert {path for path, _ in paths(tmp_path / "s")} == {"p00.jpg", "sub/p01.jpg", "wide.png"}
    expected = {"empty.jpg", "text.jpg", "cut.jpg", "bomb.png", "link.jpg", "folder-link", "broken.tar", "pipe.jpg"}
    assert expected <= listed and len(listed) == len(expected) + 1
    assert all(problem.why for problem in report.problems)


def _bomb() -> bytes:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


def test_second_writer_is_told(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    with (
        writer_lock(str(tmp_path / "s")),
        pytest.raises(StoreError, match=naming(os.getpid())),
    ):
        index(folder, tmp_path / "s")
    index(folder, tmp_path / "s")


def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gallery(tmp_path / "g", 4)
    index(folder, tmp_path / "s")
    paint(folder / "more.jpg", 77)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("seps.photos.store.lance.table.to_table", full)
        with pytest.raises(StoreError, match="space left"):
            index(folder, tmp_path / "s")
    assert len(paths(tmp_path / "s")) == 4 and verify(Store.open(tmp_path / "s")) == []
    assert index(folder, tmp_path / "s").new == 1


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_what_was_embedded_when_a_run_ends_early_is_kept(tmp_path: Path, fault: type[BaseException]) -> None:
    folder = gallery(tmp_path / "g", 8)

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise fault

    with pytest.raises(fault):
        settings = IndexOptions(batch_size=2, workers=2, bank=False)
        index_folder(folder, tmp_path / "s", model(), model_folder(), options=settings, progress=stop)
    assert len(paths(tmp_path / "s")) == 4 and verify(Store.open(tmp_path / "s")) == []
    report = index(folder, tmp_path / "s")
    assert (report.new, report.unchanged) == (4, 4) and len(paths(tmp_path / "s")) == 8


def test_other_settings_models_and_folders_are_refused(tmp_path: Path) -> None:
    folder, other = gallery(tmp_path / "g", 2), gallery(tmp_path / "h", 2)
    index(folder, tmp_path / "s")
    with pytest.raises(StoreError, match=naming("patches", "small", "--size")):
        index(folder, tmp_path / "s", size="small")
    with pytest.raises(StoreError, match=naming("/g", "/h")):
        index(other, tmp_path / "s")
    shutil.rmtree(other)
    os.replace(folder, other)
    assert index(other, tmp_path / "s", moved=True).unchanged == 2
    store = Store.open(tmp_path / "s")
    store.set_settings(store.settings.__class__(**{**store.settings.__dict__, "model_hash": "0" * 32}))
    with pytest.raises(StoreError, match="model"):
        index(other, tmp_path / "s")
    with pytest.raises(ValueError, match="folder"):
        index(tmp_path / "nowhere", tmp_path / "t")


@pytest.mark.parametrize("other", [1, FORMAT - 1, FORMAT + 1])
def test_a_store_of_another_format_is_indexed_again(tmp_path: Path, other: int) -> None:
    """Its values mean something else: nothing is converted, and the command that makes it again is named."""
    folder = gallery(tmp_path / "g", 2)
    index(folder, tmp_path / "s")
    settings = {**json.loads(Store.open(tmp_path / "s").settings.to_json()), "format": other, "vector_codes": "int8"}
    open_dataset(str(tmp_path / "s")).update_schema_metadata({"seps": json.dumps(settings)})
    for work in (lambda: Store.open(tmp_path / "s"), lambda: index(folder, tmp_path / "s")):
        with pytest.raises(OutdatedStoreError, match=naming(other, "seps index", folder, "--store", f"{tmp_path}/s")):
            work()


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty"):
        with pytest.raises(StoreError, match="seps index"):
            Store.open(tmp_path / place)


def test_verify_finds_damage_and_compact_keeps_everything(tmp_path: Path) -> None:
    from dataclasses import replace

    folder = gallery(tmp_path / "g", 4)
    index(folder, tmp_path / "s", patches=4)
    store = Store.open(tmp_path / "s")
    rows = store.rows(sorted(store.known()))
    first = next(iter(rows.values()))
    store.put([replace(first, tokens=first.tokens[:-3], thumbnail=b"x")])
    (folder / "sub" / "p01.jpg").unlink()
    found = [str(problem) for problem in verify(store)]
    assert any("damaged" in text and first.path in text for text in found)
    assert any(text.startswith("sub/p01.jpg") and "file" in text for text in found)
    before = store.disk_bytes()
    store.tidy(always=True)
    assert store.disk_bytes() < before and len(store) == 4
    values = status(store)
    assert (values["images"], values["described"], values["patches"]) == (4, 4, 4)


def put_vectors(store: Store, names: Sequence[str], vectors: Any) -> None:
    facts = (1, 1, "0" * 64, 9, 9, b"\xff\xd8")
    rows = zip(names, vectors, strict=True)
    store.put([Row(row_id(n, None), n, None, *facts, vector, b"", None, None, None, None) for n, vector in rows])


def settings(width: int) -> StoreSettings:
    return plain_settings(width, (1, 1))


def test_large_stores_get_an_index_that_misses_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 110 partitions 64 are looked into, so that the index can miss; with one it does."""
    monkeypatch.setattr("seps.photos.store.lance.table.INDEX_ABOVE", 12_000)
    store = Store.create(tmp_path / "s", settings(16))
    random = np.random.default_rng(0)
    vectors = random.normal(size=(12_300, 16)).astype(np.float16)
    vectors[12_200:] *= 1.5  # so that they are among the best
    names = [str(i) for i in range(len(vectors))]
    put_vectors(store, names[:11_000], vectors[:11_000])
    store.tidy()
    assert not store.indexed()
    put_vectors(store, names[11_000:12_200], vectors[11_000:12_200])
    store.tidy()
    assert store.indexed() and store.indexed("id")
    put_vectors(store, names[12_200:], vectors[12_200:])  # rows that came after the index are found as well
    for name in ("7", "12299"):
        row = store.get(row_id(name, None), ["path"])
        assert row is not None and row["path"] == name
    store.delete([row_id("7", None)])
    assert store.get(row_id("7", None), ["path"]) is None
    put_vectors(store, ["7"], vectors[7:8])
    queries = random.normal(size=(20, 16)).astype(np.float32)
    best = np.argsort(-(queries @ vectors.astype(np.float32).T), axis=1)[:, :20]

    def recall() -> float:
        found = [store.nearest(query, 20, ["path"]).values("path") for query in queries]
        pairs = zip(found, best.tolist(), strict=True)
        return sum(len({int(name) for name in some} & set(wanted)) for some, wanted in pairs) / best.size

    assert recall() > 0.99
    assert any(place >= 12_200 for place in best.ravel())
    monkeypatch.setattr("seps.photos.store.lance.vector_index.LEAST_PROBES", 1)
    monkeypatch.setattr("seps.photos.store.lance.vector_index.PROBED_SHARE", 0.0)
    assert recall() < 0.9


HOSTILE = (
    "it's",
    "x' OR 1=1 --",
    "a') OR true OR starts_with(path, '",
    'say "hi"',
    "50%",
    "under_score",
    "back\\slash",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_filters_cannot_be_broken_out_of(tmp_path: Path, name: str) -> None:
    """A folder of that name is found alone: neither none, nor everything."""
    store = Store.create(tmp_path / "s", settings(4))
    names = [f"{name}/in.jpg", "other/out.jpg", "5000/out.jpg", "underXscore/out.jpg", "top.jpg"]
    put_vectors(store, names, np.ones((5, 4), np.float16))
    inside = Filters(folder=name)
    assert [path for images in store.scan(["path"], inside) for path in images.values("path")] == names[:1]
    assert store.nearest(np.ones(4), 10, ["path"], inside).values("path") == names[:1]


@pytest.mark.parametrize("stored", ["NFC", "NFD"])
@pytest.mark.parametrize("typed", ["NFC", "NFD"])
def test_a_folder_is_found_in_both_forms_of_unicode(tmp_path: Path, stored: Form, typed: Form) -> None:
    """A Mac decomposes what another system composes: the same name to everybody who reads it."""
    store = Store.create(tmp_path / "s", settings(4))
    names = [unicodedata.normalize(stored, "Ferien in T\u00fcrkiye/\u00e9t\u00e9.jpg"), "Ferien/out.jpg"]
    put_vectors(store, names, np.ones((2, 4), np.float16))
    inside = Filters(folder=unicodedata.normalize(typed, "Ferien in T\u00fcrkiye"))
    assert store.nearest(np.ones(4), 10, ["path"], inside).values("path") == names[:1]


@pytest.mark.parametrize("folder", [".", "./", "", None, "/", "a/.."])
def test_the_folder_itself_is_no_filter(folder: str | None) -> None:
    assert Filters(folder=folder).clause() is None
    assert Filters(folder=folder, min_size=3).clause() == "(width >= 3 AND height >= 3)"


def test_a_refused_run_leaves_no_folder_behind(tmp_path: Path) -> None:
    """What was not there before is not there after."""
    folder, place = gallery(tmp_path / "g", 2), tmp_path / "new" / "deep" / "s"
    with pytest.raises(StoreError, match="huge"):
        index(folder, place, size="huge")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(StoreError, match="huge"):
        index(folder, tmp_path / "mine" / "s", size="huge")
    assert list((tmp_path / "mine").iterdir()) == []  # a folder that was there stays
    index(folder, place)
    with pytest.raises(StoreError, match="small"):
        index(folder, place, size="small")
    assert len(Store.open(place)) == 2
