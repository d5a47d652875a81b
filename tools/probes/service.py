"""`seps serve` over a small store: every address of the API, as a browser asks for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from probes.bench import Bench, without_times
from probes.fixtures import QUERIES, dual, photos, store
from probes.registry import Gone, probe
from probes.values import Prose

START = 120
"""Seconds that the service may take to start on a busy machine."""
ENTRY = "import sys; from probes.bench import entry_point; from pathlib import Path; "
ENTRY += "sys.exit(entry_point(Path(sys.argv[1]))(sys.argv[2:]))"


class Client:
    """Asks a running service."""

    def __init__(self, bench: Bench, address: str) -> None:
        self.bench, self.address = bench, address

    def ask(self, path: str, body: bytes | None = None, **query: object) -> Any:
        """The answer: JSON as values, pictures as digests, pages as text. An error is its status and text."""
        address = f"{self.address}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as answer:
                kind, data = answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError as error:
            return {"status": error.code, "text": Prose(self.bench.clean(error.read().decode()))}
        if kind == "application/json":
            return without_times(json.loads(self.bench.clean(data.decode())))
        return data if kind.startswith("image/") else Prose(data.decode())


@contextlib.contextmanager
def served(bench: Bench, place: os.PathLike[str]) -> Iterator[Client]:
    """A running service over a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-c", ENTRY, str(bench.tree), "serve", "--store", str(place), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    log = (bench.scratch / "serve.log").open("w+")
    process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    client = Client(bench, f"http://127.0.0.1:{port}")
    try:
        end = time.monotonic() + START
        while True:
            with contextlib.suppress(OSError):
                client.ask("/health")
                break
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                raise Gone(f"seps serve did not start: {log.read().strip()[-300:]}")
            time.sleep(0.2)
        yield client
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def answers(bench: Bench) -> dict[str, Any]:
    """Every answer, asked once."""
    return bench.once("answers", lambda: _answers(bench, store(bench, "served")))


def _answers(bench: Bench, place: Any) -> dict[str, Any]:
    data = (photos(bench) / "p003.png").read_bytes()
    with served(bench, place) as client:
        search = {query: client.ask("/api/search", q=query, k=20) for query in QUERIES}
        first = search[QUERIES[0]]["results"][0]["id"]
        listed = {
            "exact": {"exact": "true"},
            "folder": {"folder": "sub"},
            "after": {"since": "2020-09-15"},
            "before": {"until": "2020-09-20"},
            "min_size": {"min_size": 40},
            "confidence": {"min_confidence": 0.2},
            "offset": {"offset": 2, "k": 3},
            "date": {"sort": "newest"},
            "unfolded": {"fold": "false"},
        }
        found: dict[str, Any] = {
            "search": search,
            "options": {name: client.ask("/api/search", q=QUERIES[0], **given) for name, given in listed.items()},
            "similar": client.ask(f"/api/similar/{first}"),
            "picture sent": client.ask("/api/search-image", data),
            "pictures": client.ask("/api/pictures"),
            "oldest": client.ask("/api/pictures", sort="oldest"),
            "overview": client.ask("/api/overview"),
            "status": client.ask("/api/status"),
            "health": client.ask("/health"),
            "picture": client.ask(f"/api/picture/{first}"),
            "thumb": client.ask(f"/api/thumb/{first}"),
            "image": client.ask(f"/api/image/{first}"),
            "original": client.ask(f"/api/original/{first}"),
            "explain": client.ask(f"/api/explain/{first}", q=QUERIES[0]),
            "kept": client.ask(f"/api/kept/{first}", q=QUERIES[0]),
            "page": client.ask("/"),
            "schema": client.ask("/openapi.json"),
            "no such picture": client.ask("/api/picture/none"),
            "no query": client.ask("/api/search"),
        }
        sent = client.ask("/api/upload", data)["upload"]
        found["with a picture"] = client.ask("/api/search", q=QUERIES[0], upload=sent)
        found["with one of the store"] = client.ask("/api/search", q=QUERIES[0], like=first, weight=0.3)
        found["upload"] = client.ask(f"/api/upload/{sent}")
        return found


ADDRESSES = (
    *("search", "options", "similar", "picture sent", "pictures", "oldest", "overview", "status", "health", "picture"),
    *("thumb", "image", "original", "explain", "kept", "page", "schema", "no such picture", "no query"),
    *("with a picture", "with one of the store", "upload"),
)


@probe("service", each=ADDRESSES)
def answer(bench: Bench, name: str) -> Any:
    """One answer."""
    found = answers(bench)
    if name not in found:
        raise Gone(f"The service gives no answer {name}.")
    return found[name]


@probe("service")
def dual_encoder(bench: Bench) -> dict[str, Any]:
    """The same over a dual encoder: a search, an explanation."""
    place = store(bench, "dual", model=dual("clip"))
    with served(bench, place) as client:
        found = client.ask("/api/search", q="a red square")
        first = found["results"][0]["id"]
        return {"search": found, "explain": client.ask(f"/api/explain/{first}", q="a red square")}
