"""A running service leaves a small file in its store, by which `seps search` finds it. Imports nothing heavy.

The file holds what is needed to ask: an address of this machine, the process, the release and, where the service has
one, its token; only its user can read it. A file that a killed service left behind leads nowhere and is passed over.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import seps
from seps.files import read_json, unfinished
from seps.parsing import parse_json

FILE = "serving.json"
CONNECT_SECONDS, ANSWER_SECONDS = 0.25, 10.0
MAX_ANSWER_BYTES = 64 * 2**20
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::1": "::1", "::": "::1"}
"""Where a service that listens on an address can be reached from this machine; others are not asked."""


@contextlib.contextmanager
def posted(store: str, host: str, port: int, token: str | None) -> Iterator[None]:
    """While the context lasts, the store says where its service is. A store that cannot be written says nothing."""
    path = Path(store) / FILE
    address = _LOOPBACK.get(host)
    if address is None or "://" in store:
        yield
        return
    told = {"host": address, "port": port, "pid": os.getpid(), "token": token, "version": seps.__version__}
    with contextlib.suppress(OSError):
        _write(path, told)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if read_json(path) == told:  # not that of a service that was started later
                path.unlink()


def _write(path: Path, told: Mapping[str, Any]) -> None:
    part = unfinished(path)
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.replace(part, path)


def ask(store: str, question: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer of the service over this store; None where none runs, or it is of another release, or refuses."""
    told = {} if "://" in store else read_json(Path(store) / FILE)
    host, port, pid, token = (told.get(name) for name in ("host", "port", "pid", "token"))
    if told.get("version") != seps.__version__ or not isinstance(host, str) or host not in _LOOPBACK.values():
        return None
    if not isinstance(port, int) or not isinstance(pid, int) or not _runs(pid):
        return None
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(ANSWER_SECONDS)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        connection.request("POST", "/api/shell", json.dumps(question), headers)
        response = connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES)
        found = parse_json(body) if response.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if not isinstance(found, dict) or found.get("store") != os.path.realpath(store):
        return None
    return found if found.get("version") == seps.__version__ else None


def _runs(pid: int) -> bool:
    """Whether there is such a process of this machine; where that cannot be asked, yes."""
    if pid <= 0 or os.name != "posix":
        return pid > 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
