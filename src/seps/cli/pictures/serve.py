"""`seps serve`: the page and the API over a store, for browsers and programs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from seps.cli.shared.argtypes import device, port
from seps.cli.shared.parser import Parser, add_plugins
from seps.plugins import load_plugins

CONNECTIONS = 512
"""Open at once; more are answered 503."""


def add_options(parser: Parser) -> None:
    """The options of `seps serve`."""
    parser.add_argument("--store", required=True, help="a store made by seps index")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=port, default=8000, help="default: 8000; 0 takes a free one")
    parser.add_argument("--token", help="secret that every request must carry (or SEPS_TOKEN)")
    parser.add_argument("--model", help="model folder, if it is not where it was when indexing")
    add_plugins(parser)
    parser.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda, ...")


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, not yet listening. Raises ValueError where there can be none."""
    listening = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        why = {
            errno.EADDRINUSE: f"port {port} is taken by another program. Name another with --port, or 0 for a free one",
            errno.EACCES: f"port {port} needs more rights. Name one above 1023 with --port",
            errno.EADDRNOTAVAIL: "it is no address of this machine. 127.0.0.1 is this machine alone, 0.0.0.0 all of it",
        }.get(getattr(error, "errno", None) or 0, str(getattr(error, "strerror", None) or error))
        raise ValueError(f"Cannot listen on {host!r}: {why}.") from error
    return listening


class _Terminated(BaseException):
    """SIGTERM came."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


@contextlib.contextmanager
def _whole_ending() -> Iterator[None]:
    """Let SIGTERM, which ends a process on the spot, leave the contexts inside first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def _protocol() -> type[asyncio.Protocol]:
    """uvicorn's reader of requests, with a sentence for what never becomes one: the application does not see it."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Reader(H11Protocol):
        def send_400_response(self, msg: str) -> None:
            text = "The request cannot be read: it is not HTTP, or its address and headers are longer than 64 KiB."
            body = json.dumps({"error": text}).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
            self.transport.close()

    return Reader


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    load_plugins(options.plugin)
    try:
        import uvicorn

        from seps.serve.app import create_app
    except ImportError as error:
        raise ValueError(f"The service needs FastAPI and uvicorn ({error}): pip install 'seps[serve]'") from error
    from seps.retrieval.index.search import Searcher
    from seps.serve.guard import LOOPBACK
    from seps.serve.notice import posted

    local = options.host in LOOPBACK
    token = options.token or os.environ.get("SEPS_TOKEN")
    if not local and not token:
        token = secrets.token_urlsafe(24)
        print(f"Listening beyond this machine, so a token is needed. This run's: {token}", file=sys.stderr)
    # The address first: it fails at once, the model takes seconds to load.
    listening = bind(options.host, options.port)
    searcher = Searcher(options.store, options.model, device=options.device)
    searcher.model  # noqa: B018  all of it is read now, not by the first request
    app = create_app(searcher, token=token, hosts=LOOPBACK if local else None)
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=5,
        # The other parser of uvicorn takes in headers and addresses of any length.
        http=_protocol(),
        h11_max_incomplete_event_size=64 * 1024,
        limit_concurrency=CONNECTIONS,
    )
    server = uvicorn.Server(config)
    listening.listen(2048)  # from here on a client waits and is not refused
    name = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    print(
        f"{len(searcher.store)} images. Open {address}{f'?token={token}' if token else ''}  (Ctrl-C stops)", flush=True
    )
    print(f"The API is documented at {address}api", flush=True)
    # Ctrl-C is how it is meant to end; the server has stopped by then.
    notice = posted(options.store, options.host, listening.getsockname()[1], token)
    with contextlib.suppress(KeyboardInterrupt), _whole_ending(), notice:
        server.run(sockets=[listening])
    return 0
