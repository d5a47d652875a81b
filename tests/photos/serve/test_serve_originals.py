"""The files themselves: sent from inside the indexed folder alone, under types that can hold no script."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seps.images.sources import row_id
from seps.photos.search.searcher import Searcher
from seps.photos.serve.guard import LOOPBACK
from seps.photos.serve.originals import kind_of
from serving import Client, served
from stores import gallery, index, model, paint

ODD = 'sub/a "näme"; b.jpg'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """p00.jpg, a PNG and a TIFF, one name with odd letters, and a shard with one member."""
    folder = gallery(tmp_path / "g", 1)
    for name in ("x.png", "x.tiff", ODD):
        paint(folder / name, 3)
    paint(tmp_path / "inner.jpg", 4)
    with tarfile.open(folder / "shard.tar", "w") as shard:
        shard.add(tmp_path / "inner.jpg", "deep/inner.jpg")
    (tmp_path / "secret.jpg").write_bytes((tmp_path / "inner.jpg").read_bytes())
    index(folder, tmp_path / "s")
    return folder


def app(folder: Path, **options: Any) -> Client:
    return served(folder.parent / "s", **options)


def test_the_bytes_of_the_file(folder: Path) -> None:
    with app(folder) as client:
        for name, member, kind in (
            ("p00.jpg", None, "image/jpeg"),
            ("x.png", None, "image/png"),
            ("x.tiff", None, "application/octet-stream"),
            (ODD, None, "image/jpeg"),
            ("shard.tar", "deep/inner.jpg", "image/jpeg"),
        ):
            identity = row_id(name, member)
            expected = (folder.parent / "inner.jpg" if member else folder / name).read_bytes()
            answer = client.get(f"/api/original/{identity}")
            assert answer.status_code == 200 and answer.content == expected, name
            assert answer.headers["content-type"] == kind
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "sandbox" in answer.headers["content-security-policy"]
            assert "script" not in answer.headers["content-security-policy"]
            shown = answer.headers["content-disposition"]
            assert shown.startswith("attachment" if kind == "application/octet-stream" else "inline")
            saved = client.get(f"/api/original/{identity}?download=true")
            assert saved.content == expected
            assert saved.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        assert saved.headers["content-disposition"].endswith("''inner.jpg")
        odd = client.get(f"/api/original/{row_id(ODD, None)}")
        assert odd.headers["content-disposition"].endswith("''a%20%22n%C3%A4me%22%3B%20b.jpg")
        assert client.head(f"/api/original/{row_id('p00.jpg', None)}").content == b""


@pytest.mark.parametrize(
    ("part", "status"),
    [("bytes=10-5", 400), ("rubbish", 400), ("bytes=a-b", 400), ("bytes=99999999-", 416), ("bytes=-0", 416)],
)
def test_a_part_that_is_none_is_refused_as_all_errors_are(folder: Path, part: str, status: int) -> None:
    address = f"/api/original/{row_id('p00.jpg', None)}"
    with app(folder) as client:
        answer = client.get(address, headers={"Range": part})
        assert answer.status_code == status and answer.headers["content-type"] == "application/json"
        assert set(answer.json()) == {"error"} and answer.json()["error"].endswith(".")
        assert answer.headers.get("content-range", "").startswith("bytes */") == (status == 416)
        assert answer.headers["x-content-type-options"] == "nosniff"
        head = client.head(address, headers={"Range": part})
        assert (head.status_code, head.content) == (status, b"")
        good = client.get(address, headers={"Range": "bytes=0-9"})
        assert good.status_code == 206 and good.content == (folder / "p00.jpg").read_bytes()[:10]


def test_a_file_written_again_is_sent_while_it_is_a_picture(folder: Path) -> None:
    identity = row_id("p00.jpg", None)
    with app(folder) as client:
        paint(folder / "p00.jpg", 77, (90, 50))
        assert client.get(f"/api/picture/{identity}").json()["original"] == "changed"
        assert client.get(f"/api/original/{identity}").content == (folder / "p00.jpg").read_bytes()
        for text in ("<svg onload='alert(1)'>", "<html>", "password", ""):
            (folder / "p00.jpg").write_text(text)
            answer = client.get(f"/api/original/{identity}")
            assert answer.status_code == 404 and "image" in answer.json()["error"]
            assert client.get(answer.json()["thumbnail"]).status_code == 200


def test_what_is_no_plain_file_is_refused(folder: Path) -> None:
    identity = row_id("p00.jpg", None)
    with app(folder) as client:
        (folder / "p00.jpg").unlink()
        assert "gone" in client.get(f"/api/original/{identity}").json()["error"]
        os.mkfifo(folder / "p00.jpg")  # nobody writes: opening it must not wait
        assert client.get(f"/api/original/{identity}").status_code == 404
        (folder / "p00.jpg").unlink()
        (folder / "p00.jpg").mkdir()
        assert client.get(f"/api/original/{identity}").status_code == 404


def test_a_path_out_of_the_folder_is_not_followed(folder: Path) -> None:
    """A link in place of the file, of its folder, and a row that was changed."""
    from dataclasses import replace

    searcher = Searcher(folder.parent / "s", model())
    identity, deep = row_id("p00.jpg", None), row_id(ODD, None)
    row = searcher.store.rows([identity])[identity]
    evil = row_id("../secret.jpg", None)
    searcher.store.put([replace(row, id=evil, path="../secret.jpg")])
    (folder / "p00.jpg").unlink()
    (folder / "p00.jpg").symlink_to(folder.parent / "secret.jpg")
    (folder.parent / "elsewhere").mkdir()
    shutil.copy(folder.parent / "secret.jpg", folder.parent / "elsewhere" / 'a "näme"; b.jpg')
    shutil.rmtree(folder / "sub")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    with served(searcher) as client:
        for each in (identity, deep, evil):
            for address in ("original/{}", "original/{}?download=true", "image/{}"):
                answer = client.get(f"/api/{address.format(each)}")
                assert answer.status_code == 400 and "indexed" in answer.json()["error"]


def test_the_full_path_is_for_this_machine_alone(folder: Path) -> None:
    inner = row_id("shard.tar", "deep/inner.jpg")
    local = {"hosts": LOOPBACK, "local": True}
    for options, more, start in (
        (local, {}, str(folder)),
        (local, {"X-Forwarded-For": "192.0.2.7"}, "g"),  # a proxy on this machine, a client elsewhere
        (local, {"Via": "1.1 proxy"}, "g"),
        ({"hosts": LOOPBACK}, {}, "g"),
        ({"token": "t"}, {}, "g"),
    ):
        with app(folder, **options) as client:
            headers = {"Authorization": "Bearer t", **more}
            facts = client.get(f"/api/picture/{row_id('p00.jpg', None)}", headers=headers).json()
            assert facts["full_path"] == f"{start}/p00.jpg" and facts["date"]
            facts = client.get(f"/api/picture/{inner}", headers=headers).json()
            assert facts["full_path"] == f"{start}/shard.tar:deep/inner.jpg"


def test_kinds_by_the_first_bytes(tmp_path: Path) -> None:
    """What Pillow writes is known again; documents are no pictures."""
    shown = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp", "BMP": "image/bmp"}
    for kind in (*shown, "TIFF", "PPM", "JPEG2000", "AVIF"):
        Image.new("RGB", (8, 8)).save(tmp_path / "x", kind)
        found = kind_of((tmp_path / "x").read_bytes()[:32])
        assert found == ("image/avif" if kind == "AVIF" else shown.get(kind, "")), kind
    for head in (b"", b"<!doctype html>", b"<svg ", b"%PDF-1.7", b"PK\x03\x04", b"RIFF0000WAVE", b"#!/bin/sh", b"GIF"):
        assert kind_of(head) is None
