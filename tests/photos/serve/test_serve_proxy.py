"""Behind a reverse proxy: under a prefix that the proxy takes away or leaves, and under other names."""

from __future__ import annotations

import argparse
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seps.cli.pictures import serve as command
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve.app import create_app
from seps.photos.serve.guard import LOOPBACK
from serving import Client, served


def proxied(app: Any, prefix: str, *, stripping: bool) -> Any:
    """An application as a proxy serves it under a prefix, for browsers that ask for https://photos.lan/PREFIX/..."""

    async def passed_on(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path != prefix and not path.startswith(f"{prefix}/"):
                await send({"type": "http.response.start", "status": 599, "headers": []})
                await send({"type": "http.response.body", "body": b"not of the service"})
                return
            path = (path[len(prefix) :] or "/") if stripping else path
            more = [(b"x-forwarded-for", b"192.0.2.7"), (b"x-forwarded-proto", b"https")]
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": [*scope["headers"], *more]}
        await app(scope, receive, send)

    return passed_on


@pytest.fixture(params=["taken away", "left"])
def client(searcher: Searcher, request: pytest.FixtureRequest) -> Iterator[Client]:
    app = create_app(Library.over(searcher), token="sesame", hosts=(*LOOPBACK, "photos.lan"), root_path="/photos")
    outside = proxied(app, "/photos", stripping=request.param == "taken away")
    with Client(outside, base_url="https://photos.lan") as client:
        yield client


def test_the_page_and_its_addresses_under_a_prefix(client: Client) -> None:
    assert client.get("/photos/").status_code == 401
    page = client.get("/photos/?token=sesame&q=a+dog")
    assert page.status_code == 200 and str(page.url) == "https://photos.lan/photos/?q=a+dog"
    cookie = page.history[0].headers["set-cookie"]
    assert "Path=/photos;" in cookie and "Secure" in cookie
    for path in ("static/app.js", "static/api.js", "docs", "openapi.json", "health", "api/status", "api/overview"):
        assert client.get(f"/photos/{path}").status_code == 200, path
    hit = client.get("/photos/api/search?q=a+dog").json()["results"][0]
    assert hit["thumbnail"].startswith("/photos/api/thumb/") and client.get(hit["thumbnail"]).status_code == 200
    headers = {"Origin": "https://photos.lan"}
    data = client.get(hit["thumbnail"]).content
    sent = client.post("/photos/api/upload", content=data, headers=headers).json()
    assert client.get(sent["thumbnail"]).status_code == 200
    assert client.get(f"/photos/api/picture/{hit['id']}").json()["full_path"].startswith("g/")
    assert client.post("/photos/api/upload", content=data, headers={"Origin": "https://evil.lan"}).status_code == 403
    assert client.get("/photos/api/search/").status_code == 404  # and no redirect out of the prefix


def test_a_prefix_without_its_slash(searcher: Searcher) -> None:
    """Addresses relative to it would lead out of it."""
    app = proxied(create_app(Library.over(searcher), root_path="/photos"), "/photos", stripping=False)
    with Client(app) as client:
        answer = client.get("/photos?q=a", follow_redirects=False)
        assert answer.status_code == 308 and answer.headers["location"] == "/photos/?q=a"


def test_other_names(searcher: Searcher) -> None:
    with served(searcher, token="t", hosts=(*LOOPBACK, "photos.lan")) as client:
        headers = {"Authorization": "Bearer t"}
        for host, status in (("photos.lan", 200), ("Photos.LAN:8443", 200), ("localhost", 200), ("evil.lan", 400)):
            assert client.get("/api/status", headers={**headers, "Host": host}).status_code == status, host
        refused = client.get("/api/status", headers={**headers, "Host": "evil.lan"})
        assert "--allow-host" in refused.json()["error"]


def test_the_options_are_checked() -> None:
    assert command.host_name("Photos.lan") == "photos.lan" and command.host_name("fe80::1") == "fe80::1"
    assert [command.root_path(text) for text in ("/photos", "photos/", "/a/b/", "/", "")] == [
        "/photos",
        "/photos",
        "/a/b",
        "",
        "",
    ]
    for check, texts in (
        (command.host_name, ("http://photos.lan", "photos.lan:80", "", "a b", "-x", "*")),
        (command.root_path, ("/a b", "/a?b", "/../x", "http://x/y", "//x//y", '/"')),
    ):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                check(text)


class Probe:
    """Stands for a socket of a machine with one network, or with none."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, place: object) -> None:
        if not self.address:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.address, 1


def test_the_address_for_other_machines_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, expected in (("192.168.1.5", ["192.168.1.5", "127.0.0.1"]), ("", ["127.0.0.1"])):
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", lambda *_, own=own: Probe(own))
            assert command.reached_at("0.0.0.0") == expected
    assert command.reached_at("192.168.1.5") == ["192.168.1.5"]
    assert "0.0.0.0" not in command.reached_at("0.0.0.0")


def test_nothing_of_the_page_is_absolute() -> None:
    from seps.photos.serve.app import FILES, STATIC

    for name in FILES:
        text = Path(STATIC, name).read_text().replace('photo.src.includes("/api/image/")', "")
        found = re.findall(
            r"""(?:(?:href|src) ?= ?|ask\(|fetch\(|url\()["'`]/.*|["'`(]/(?:api|static|docs|\?).*""", text
        )
        assert found == [], name


ROOT = Path(__file__).parents[3]


def deployed() -> list[list[str]]:
    """The words of each `seps serve` and `seps index` in the container file and on the page about it."""
    page = (ROOT / "docs/deploy.md").read_text()
    lines = re.findall(r"^ExecStart=/opt/seps/bin/seps (.*)$", page, re.MULTILINE)
    lines += re.findall(r"^docker run .* seps ((?:serve|index) .*)$", page, re.MULTILINE)
    lines += re.findall(r"`(serve --store .*)`", page)
    container = (ROOT / "Dockerfile").read_text()
    command = json.loads(re.findall(r"^CMD (.*)$", container, re.MULTILINE)[0])
    return [*(line.split() for line in lines), command]


def test_the_commands_of_the_deployment_are_understood() -> None:
    from seps.cli.main import parser_of

    found = deployed()
    assert [words[0] for words in found] == ["serve", "index", "serve", "serve"]
    for words in found:
        parser_of(words[0]).parse_args(words[1:])


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    from seps.photos.serve import connections, service, uploads

    section = (ROOT / "docs/deploy.md").read_text().split("## Limits")[1].split("\n## ")[0]
    stated = re.findall(r"^\| [^|]+ \| ([^|]*\d[^|]*) \|", section, re.MULTILINE)
    pixels, seconds = uploads.UPLOAD_PIXELS // 10**6, connections.SECONDS
    assert stated == [
        f"{connections.CONNECTIONS}",
        f"{connections.WAITING}",
        f"{seconds['head']:.0f} s",
        *{f"{seconds[part]:.0f} s" for part in ("body", "answer")},
        f"{uploads.UPLOAD_BYTES // 2**20} MiB, {pixels} megapixels, {uploads.UPLOAD_SECONDS:.0f} s",
        f"{uploads.UPLOADS}",
        f"{service.WAITING}",
    ]
