"""Connections of slow clients are bounded in time and number, and clients that leave are no failure."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from stores import gallery, index, model

pytest.importorskip("fastapi")
import uvicorn

from seps.cli.pictures.serve import bind
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve import connections
from seps.photos.serve.app import create_app
from seps.photos.serve.guard import LOOPBACK

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = b"POST /api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"


@contextmanager
def served(app: Any) -> Iterator[int]:
    """The port of a server with the settings of `seps serve`."""
    listening = bind("127.0.0.1", 0)
    listening.listen(200)
    server = uvicorn.Server(connections.server_config(app))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("connections")
    index(gallery(folder / "g", 2, described=0), folder / "s")
    with served(create_app(Library.over(Searcher(folder / "s", model())), hosts=LOOPBACK, local=True)) as port:
        yield port


def opened(port: int, data: bytes = b"") -> socket.socket:
    """A connection that sent this."""
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(data)
    return connection


def answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON of an answer after which the server closes."""
    head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def asked(port: int, path: str = "/health", body: bytes | None = None) -> tuple[int, Any]:
    """The answer to a whole request."""
    method = "GET" if body is None else "POST"
    body = body or b""
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
    with opened(port, "\r\n".join([*head, "", ""]).encode() + body) as connection:
        return answer(connection)


def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Whether the server closes the connection within a time."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("data", [b"", HALF, BODY])
def test_many_slow_clients_lock_nobody_out(port: int, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the server takes at all: those that wait longest go, and a whole request is answered."""
    monkeypatch.setattr(connections, "WAITING", 20)
    with ExitStack() as stack:
        slow = [stack.enter_context(opened(port, data)) for _ in range(60)]
        for _ in range(3):
            assert asked(port) == (200, {"status": "ok"})
        assert is_closed(slow[0], 5) and not is_closed(slow[-1], 0.2)


@pytest.mark.parametrize(("data", "phase"), [(b"", "head"), (HALF, "head"), (BODY, "body")])
def test_a_slow_client_is_given_a_limited_time(
    port: int, data: bytes, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for all of it: single bytes in between do not prolong it."""
    monkeypatch.setitem(connections.SECONDS, phase, 0.5)
    with opened(port, data) as connection:
        start = time.monotonic()
        while not is_closed(connection, 0.1):
            assert time.monotonic() - start < 5
            try:
                connection.sendall(b"x" if data else b"")
            except OSError:
                break
        assert 0.3 < time.monotonic() - start < 3


def test_a_client_that_does_not_read_is_given_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.SECONDS, "answer", 0.5)
    left = threading.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
        await receive()
        await receive()
        left.set()

    with served(large) as port, opened(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        assert left.wait(5)


def test_a_connection_that_is_kept_is_answered_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.SECONDS, "head", 1.0)
    with opened(port) as connection:
        for _ in range(4):
            time.sleep(0.4)  # together more than the time for one head
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            found = b""
            while not found.endswith(b"}"):
                found += connection.recv(65536)
            assert b"200 OK" in found


def test_a_client_that_leaves_while_it_sends_is_no_failure(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for path in (b"/api/upload", b"/api/search-image"):
            for reset in (False, True):
                connection = opened(port, BODY.replace(b"/api/upload", path) + b"x" * 5000)
                time.sleep(0.1)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
        time.sleep(0.3)
        assert asked(port)[0] == 200
    assert caplog.records == []
