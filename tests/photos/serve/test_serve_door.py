"""What pages of other sites cannot do, what caches may keep, and that uploads are bounded before they are read."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stores import always_newest, gallery, index, paint

pytest.importorskip("fastapi")
from fastapi import Request

from seps.images.sources import row_id
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve import uploads
from seps.photos.serve.app import create_app
from seps.photos.serve.guard import from_elsewhere
from serving import QUERY, Client, served

FOREIGN = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},  # another port of this machine
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://localhost:81"},
    {"Origin": "null"},
    {"Referer": "http://evil.example/page"},
    {"Referer": "http://localhost.evil.example/"},
    {"Referer": "http://localhost@evil.example/"},
)
OWN = (
    {},
    {"Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
    {"Origin": "http://localhost"},
    {"Origin": "http://localhost:80"},
    {"Referer": "http://localhost/?q=a"},
)


def asked(kind: str) -> str:
    """The sentence that some addresses of a picture take."""
    return "?q=a+dog" if kind in ("explain", "kept") else ""


def addresses() -> list[str]:
    there, absent = row_id("p00.jpg", None), "0" * 20
    kinds = ("thumb", "image", "picture", "similar", "explain", "original", "kept")
    return [
        *(f"/api/{kind}/{identity}{asked(kind)}" for kind in kinds for identity in (there, absent)),
        QUERY,
        "/api/status",
        "/api/pictures",
        "/api/overview",
        "/openapi.json",
        "/static/app.js",
        "/nowhere",
    ]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_other_sites_learn_nothing(client: Client, headers: dict[str, str]) -> None:
    """Every address answers the same, whether or not the image is there; no search is run."""
    answers = [client.get(address, headers=headers) for address in addresses()]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.text for answer in answers}) == 1
    for path in ("/api/search-image", "/api/upload"):
        assert client.post(path, content=b"x", headers=headers).status_code == 403
    assert client.head(addresses()[0], headers=headers).status_code == 403


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_own_page_and_programs_may_ask(client: Client, headers: dict[str, str]) -> None:
    for address in addresses()[:-1]:
        assert client.get(address, headers=headers).status_code == (404 if "0" * 20 in address else 200), address
    for path in ("/api/search-image", "/api/upload"):
        assert client.post(path, content=picture(), headers=headers).status_code == 200


def test_links_may_open_the_page(client: Client) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get("/?q=a+dog", headers=link).status_code == 200
    assert client.get("/", headers={"Referer": "http://elsewhere.example/"}).status_code == 200
    assert client.get(QUERY, headers=link).status_code == 403
    assert client.post("/", headers=link).status_code == 403


def test_the_header_with_the_token_is_enough(searcher: Searcher) -> None:
    with served(searcher, "http://photos.example", token="sesame") as client:
        headers = {"Origin": "http://behind.a.proxy"}
        assert client.get(QUERY, headers={**headers, "Authorization": "Bearer sesame"}).status_code == 200
        assert client.get(QUERY, headers={**headers, "Cookie": "seps_token=sesame"}).status_code == 403
        assert client.get(QUERY, headers={**headers, "Authorization": "Bearer wrong"}).status_code == 403


def test_every_answer_keeps_browsers_honest(client: Client) -> None:
    for address in (*addresses(), "/", "/docs", "/health", "/api/search", "/api/image/xyz"):
        for method in ("GET", "HEAD", "DELETE"):
            answer = client.request(method, address)
            assert answer.headers["cross-origin-resource-policy"] == "same-origin", (method, address)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store" or answer.status_code < 400
    assert client.get(QUERY).headers["cache-control"] == "no-store"


def test_head_is_get_without_a_body(client: Client) -> None:
    for address in (addresses()[0], "/", QUERY, "/static/app.js"):
        whole, head = client.get(address), client.head(address)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert head.headers["content-type"] == whole.headers["content-type"]


def test_a_method_that_is_not_taken_is_told_which_are(client: Client) -> None:
    for method, address, allowed in (
        ("PUT", "/api/search", "GET"),
        ("DELETE", "/", "GET"),
        ("GET", "/api/upload", "POST"),
    ):
        answer = client.request(method, address)
        assert answer.status_code == 405 and answer.json()["error"]
        assert answer.headers["allow"] == allowed


def picture(size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(out, kind)
    return out.getvalue()


def test_addresses_mean_one_store_and_one_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file replaced under the same name, or another store with the same names, never gets an old thumbnail."""
    always_newest(monkeypatch)
    answers = []
    for name in ("one", "two"):
        folder = gallery(tmp_path / name, 2, described=0)
        index(folder, tmp_path / f"{name}-store")
        with served(tmp_path / f"{name}-store") as client:
            answers.append({hit["path"]: hit for hit in client.get(QUERY).json()["results"]})
            before = answers[-1]["p00.jpg"]
            kept = client.get(before["thumbnail"])
            assert "immutable" in kept.headers["cache-control"]
            assert before["thumbnail"] == f"/api/thumb/{before['id']}"
            plain = client.get(f"/api/thumb/{before['id'][:20]}")
            assert plain.headers["cache-control"] == "private, no-cache" and plain.content == kept.content
            paint(folder / "p00.jpg", 77, (80, 80))
            index(folder, tmp_path / f"{name}-store")
            after = {hit["path"]: hit for hit in client.get(QUERY).json()["results"]}["p00.jpg"]
            assert after["id"] != before["id"] and after["id"][:20] == before["id"][:20]
            for kind in ("thumb", "image", "picture", "similar", "explain", "original", "kept"):
                answer = client.get(f"/api/{kind}/{before['id']}{asked(kind)}")
                assert answer.status_code == 410 and "again" in answer.json()["error"]
            headers = {"If-None-Match": plain.headers["etag"]}
            changed = client.get(f"/api/thumb/{before['id'][:20]}", headers=headers)
            assert changed.status_code == 200 and changed.content != kept.content
            headers = {"If-None-Match": f'"other", {changed.headers["etag"]}'}
            same = client.get(f"/api/thumb/{before['id'][:20]}", headers=headers)
            assert (same.status_code, same.content) == (304, b"")
    assert not {hit["id"] for hit in answers[0].values()} & {hit["id"] for hit in answers[1].values()}


def test_originals_are_asked_for_again(client: Client, searcher: Searcher, tmp_path: Path) -> None:
    """The ETag is of the file as it is now, not as it was indexed: a bare row id means whatever is at that path."""
    identity = client.get(QUERY).json()["results"][0]["id"][:20]
    first = client.get(f"/api/image/{identity}")
    assert first.headers["cache-control"] == "private, no-cache"
    headers = {"If-None-Match": first.headers["etag"]}
    assert client.get(f"/api/image/{identity}", headers=headers).status_code == 304
    path = Path(searcher.store.settings.root) / client.get(f"/api/picture/{identity}").json()["path"]
    before = path.read_bytes()
    try:
        paint(path, 5, (90, 50))
        again = client.get(f"/api/image/{identity}", headers=headers)
        assert again.status_code == 200 and Image.open(io.BytesIO(again.content)).size == (90, 50)
        facts = client.get(f"/api/picture/{identity}").json()
        assert facts["original"] == "changed" and "again" in facts["note"]
    finally:
        path.write_bytes(before)


async def call(app: Any, receive: Any, length: int = 18 * 2**20) -> int:
    """The status of one upload whose body comes from `receive`."""
    headers = [(b"host", b"localhost"), (b"content-length", str(length).encode())]
    scope = {
        "type": "http", "method": "POST", "path": "/api/search-image", "raw_path": b"/api/search-image",
        "query_string": b"", "headers": headers, "scheme": "http", "server": ("localhost", 80),
        "client": ("127.0.0.1", 1), "http_version": "1.1", "asgi": {"version": "3.0"}, "root_path": "",
    }  # fmt: skip
    statuses = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return int(statuses[0])


def test_uploads_beyond_the_limit_are_refused_unread(searcher: Searcher) -> None:
    """Of 60 uploads at once, eight are read; the bodies of the others are never asked for."""

    async def flood() -> tuple[list[int], int]:
        app = create_app(Library.over(searcher))
        asked: set[int] = set()
        release = asyncio.Event()

        def body(number: int) -> Any:
            async def receive() -> Any:
                asked.add(number)
                await release.wait()
                return {"type": "http.request", "body": b"no picture", "more_body": False}

            return receive

        calls = [asyncio.create_task(call(app, body(number))) for number in range(60)]
        await asyncio.wait(calls, timeout=2)
        count = len(asked)
        release.set()
        statuses = [await one for one in calls]
        # The places are free again afterwards.
        assert await call(app, body(99)) == 422
        return statuses, count

    statuses, asked = asyncio.run(flood())
    assert asked == uploads.UPLOADS == 8
    assert sorted(statuses) == [422] * 8 + [503] * 52


def test_an_upload_that_never_ends_gives_its_place_back(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_SECONDS", 0.1)
    monkeypatch.setattr(uploads, "UPLOADS", 1)

    async def slow() -> Any:
        await asyncio.sleep(60)

    async def twice() -> list[int]:
        app = create_app(Library.over(searcher))
        return [await call(app, slow), await call(app, slow)]

    assert asyncio.run(twice()) == [408, 408]


def test_a_picture_of_too_many_pixels_is_called_too_large(client: Client) -> None:
    """196 megapixels in a few kilobytes: above what Pillow opens at all."""
    out = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(out, "PNG")
    for data in (out.getvalue(), picture((9000, 6000), "JPEG")):
        answer = client.post("/api/search-image", content=data)
        assert answer.status_code == 422
        assert "50,000,000" in answer.json()["error"] and "known format" not in answer.json()["error"]


def test_names_of_hosts_are_compared_whole() -> None:
    def request(**headers: str) -> Request:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": "/api/status", "scheme": "http", "query_string": b"",
                 "server": ("x", 80), "headers": raw}  # fmt: skip
        return Request(scope)

    assert not from_elsewhere(request(host="[::1]:8000", origin="http://[::1]:8000"))
    assert not from_elsewhere(request(host="LocalHost:8000", origin="http://localhost:8000"))
    assert from_elsewhere(request(host="localhost:8000", origin="http://localhost"))
    assert from_elsewhere(request(host="localhost:8000", origin=""))
    assert from_elsewhere(request(host="localhost:8000", origin="http://[bad"))
