"""Files, folders and stores that go away while they are served, and addresses that cannot be listened on."""

from __future__ import annotations

import io
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from messages import mentions
from stores import always_newest, gallery, index, paint

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from seps.cli.main import main
from seps.cli.pictures import serve as serve_command
from seps.images.sources import row_id
from serving import Client, served

IDENTITY = row_id("p00.jpg", None)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    index(gallery(tmp_path / "g", 2), tmp_path / "s")
    with served(tmp_path / "s") as client:
        yield client


def check_thumbnail(client: Client, why: str) -> None:
    answer = client.get(f"/api/image/{IDENTITY}")
    assert answer.status_code == 404 and why in answer.json()["error"]
    thumbnail = client.get(answer.json()["thumbnail"])
    assert thumbnail.status_code == 200 and Image.open(io.BytesIO(thumbnail.content)).size == (60, 44)
    assert client.get(f"/api/explain/{IDENTITY}?q=a+dog").status_code == 200
    assert client.get(f"/api/similar/{IDENTITY}").json()["error"].endswith(".")


def test_a_folder_that_is_away(client: Client, tmp_path: Path) -> None:
    assert client.get(f"/api/picture/{IDENTITY}").json()["original"] == "present"
    (tmp_path / "g").rename(tmp_path / "unmounted")
    facts = client.get(f"/api/picture/{IDENTITY}").json()
    assert facts["original"] == "missing" and "away" in facts["note"]
    assert (facts["width"], facts["height"], facts["path"]) == (60, 44, "p00.jpg")
    check_thumbnail(client, "The folder g is away")
    (tmp_path / "unmounted").rename(tmp_path / "g")
    assert client.get(f"/api/image/{IDENTITY}").status_code == 200


def test_a_file_that_is_gone_or_no_picture_any_more(client: Client, tmp_path: Path) -> None:
    (tmp_path / "g" / "p00.jpg").write_text("no picture")
    check_thumbnail(client, "not an image any more")
    assert client.get(f"/api/picture/{IDENTITY}").json()["original"] == "changed"
    (tmp_path / "g" / "p00.jpg").unlink()
    check_thumbnail(client, "gone or cannot be read")


def test_a_picture_under_an_explanation_is_the_one_that_was_indexed(client: Client, tmp_path: Path) -> None:
    """A file written again is not shown under an address of what was indexed; the same bytes at another time are."""
    path = tmp_path / "g" / "p00.jpg"
    found = {hit["path"]: hit["id"] for hit in client.get("/api/search?q=a+dog").json()["results"]}["p00.jpg"]
    before = path.read_bytes()
    os.utime(path, (1.7e9, 1.7e9))
    assert client.get(f"/api/picture/{found}").json()["original"] == "present"
    assert client.get(f"/api/image/{found}").status_code == 200
    paint(path, 77, (90, 50))
    assert client.get(f"/api/picture/{found}").json()["original"] == "changed"
    for address in (f"/api/image/{found}", f"/api/similar/{found}", f"/api/search?like={found}"):
        answer = client.get(address)
        assert answer.status_code == 404 and "indexed" in answer.json()["error"], address
        thumbnail = client.get(answer.json()["thumbnail"])
        assert Image.open(io.BytesIO(thumbnail.content)).size == (60, 44)
    assert client.get(f"/api/original/{found}").content == path.read_bytes()
    path.write_bytes(before)
    assert client.get(f"/api/image/{found}").status_code == 200


def test_a_store_that_was_deleted(client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every address says so, the status first of all; nothing is logged as a failure; a store put back works."""
    paths = ["/api/status", "/api/search?q=a+dog", "/api/search?q=a+dog&exact=true"]
    paths += [
        f"/api/{kind}/{IDENTITY}{'?q=a' if kind in ('explain', 'kept') else ''}"
        for kind in ("thumb", "image", "picture", "similar", "explain", "original", "kept")
    ]
    paths += ["/api/pictures", "/api/overview", "/health"]
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    shutil.rmtree(tmp_path / "s")
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 503 and "gone" in answer.json()["error"], path
        assert answer.headers["retry-after"]
    data = (tmp_path / "g" / "p00.jpg").read_bytes()
    assert client.post("/api/search-image", content=data).status_code == 503
    assert not caplog.records
    (tmp_path / "copy").rename(tmp_path / "s")
    assert {client.get(path).status_code for path in paths} == {200}


def test_a_store_whose_files_are_damaged(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there and its content is not: a sentence as well."""
    shutil.rmtree(tmp_path / "s" / "images.lance" / "data")
    shutil.rmtree(tmp_path / "s" / "images.lance" / "_versions")
    always_newest(monkeypatch)
    answer = client.get("/api/search?q=another+dog&exact=true")
    assert answer.status_code == 503
    assert mentions(answer.json()["error"], "store s", "damaged")


def test_a_store_made_anew(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted and indexed again at the same place: the service goes on with the new one."""
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "g" / "p00.jpg").unlink()
    index(tmp_path / "g", tmp_path / "s")
    always_newest(monkeypatch)
    assert [hit["path"] for hit in client.get("/api/search?q=a+dog").json()["results"]] == ["sub/p01.jpg"]
    assert client.get("/api/status").json()["images"] == 1


def test_a_busy_port_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--store", str(tmp_path / "none"), "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"{port}" in said and "--port" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--port", "70000"], "port"),
        (["--port", "-1"], "port"),
        (["--host", "192.0.2.1", "--port", "0"], "address"),
        (["--host", "no such host", "--port", "0"], "no such host"),
        (["--port", "0"], "store"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["serve", "--store", str(tmp_path / "none"), "--token", "t", *words]) == 2
    assert why in capsys.readouterr().err


def test_a_store_that_cannot_be_written_is_served(tmp_path: Path) -> None:
    """Reading takes no lock and writes nothing."""
    index(gallery(tmp_path / "g", 2), tmp_path / "s")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "s").rglob("*"))
    for path, _ in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with served(tmp_path / "s") as client:
        assert client.get("/api/search?q=a+dog").status_code == 200
        assert client.get(f"/api/image/{IDENTITY}").status_code == 200
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "s").rglob("*")) == before


def test_ipv6(tmp_path: Path) -> None:
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    with serve_command.bind("::1", 0) as listening:
        assert listening.getsockname()[0] == "::1"
