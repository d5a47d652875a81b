"""`seps serve`: serve a store as a web page and as an API."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import secrets
import socket
import sys

from seps.cli.shared.argtypes import device, port
from seps.cli.shared.parser import Parser, add_plugins
from seps.memory import hold_little_memory
from seps.plugins import load_plugins


def add_options(parser: Parser) -> None:
    """The options of `seps serve`."""
    parser.add_argument("--store", required=True, help="read this store, made by seps index")
    parser.add_argument(
        "--host", default="127.0.0.1", help="listen on this address (default: 127.0.0.1, only this machine)"
    )
    parser.add_argument(
        "--port", type=port, default=8000, help="listen on this port; 0 selects a free one (default: 8000)"
    )
    parser.add_argument("--token", help="require this secret in every request (default: that of SEPS_TOKEN)")
    parser.add_argument(
        "--allow-host",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests to this host name, too, such as that of a reverse proxy; repeat the "
        "option for more names",
    )
    parser.add_argument(
        "--root-path",
        type=root_path,
        default="",
        metavar="PATH",
        help="begin all addresses behind a reverse proxy with this prefix, such as /photos (default: none)",
    )
    parser.add_argument("--model", help="load the model from this folder, if it has moved since indexing")
    add_plugins(parser)
    parser.add_argument("--device", type=device, default="cpu", help="compute on cpu, cuda or cuda:1 (default: cpu)")


def host_name(text: str) -> str:
    """A name for `--allow-host`."""
    name = text.lower()
    if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f:.]+", name):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a host. Give it without http:// and without a port.")
    return name


def root_path(text: str) -> str:
    """A prefix for `--root-path`."""
    path = "/" + text.strip("/")
    if not re.fullmatch(r"(/[\w.~-]+)*/?", path, re.ASCII) or {".", ".."} & set(path.split("/")):
        raise argparse.ArgumentTypeError(f"{text!r} is no path of an address. Write it like /photos.")
    return path.rstrip("/")


def reached_at(host: str) -> list[str]:
    """The addresses of this machine by which a service that listens on `host` is reached, the best for others first.

    Nothing is sent: the system only chooses the address from which it would.
    """
    every = {"0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"), "::": (socket.AF_INET6, "2001:db8::1", "::1")}
    if host not in every:
        return [host]
    family, elsewhere, here = every[host]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))
        own = probe.getsockname()[0]
        return [own, here] if own != here else [here]
    return [here]


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


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    hold_little_memory()
    load_plugins(options.plugin)
    try:
        import uvicorn

        from seps.photos.serve.app import create_app
        from seps.photos.serve.connections import server_config
    except ImportError as error:
        raise ValueError(f"The service needs FastAPI and uvicorn ({error}): pip install fastapi uvicorn") from error
    from seps.photos.library import Library
    from seps.photos.serve.guard import LOOPBACK

    on_loopback = options.host in LOOPBACK
    token = options.token or os.environ.get("SEPS_TOKEN")
    if not on_loopback and not token:
        token = secrets.token_urlsafe(24)
        print(f"Listening beyond this machine, so a token is needed. This run's: {token}", file=sys.stderr)
    if on_loopback and options.allow_host and not token:
        print("There is no --token: whoever reaches the proxy can search.", file=sys.stderr)
    # The address first: it fails at once, the model takes seconds to load.
    listening = bind(options.host, options.port)
    port = listening.getsockname()[1]
    library = Library(store=options.store, model=options.model, device=options.device)
    _ = library.engine  # read now, not by the first request; its vision encoder is read by the first picture
    places = reached_at(options.host)
    hosts = tuple(dict.fromkeys([*LOOPBACK, *(places if not on_loopback else ()), *options.allow_host]))
    app = create_app(
        library,
        token=token,
        # Beyond this machine the token protects, by whatever name the service is reached.
        hosts=hosts if on_loopback or options.allow_host else None,
        root_path=options.root_path,
        local=on_loopback and not options.allow_host and not options.root_path,
    )
    server = uvicorn.Server(server_config(app))
    listening.listen(2048)  # from here on a client waits and is not refused
    addresses = [f"http://{f'[{place}]' if ':' in place else place}:{port}/" for place in places]
    secret = f"?token={token}" if token else ""
    print(f"{len(library)} images. Open {addresses[0]}{secret}  (Ctrl-C stops)", flush=True)
    for address in addresses[1:]:
        print(f"On this machine also {address}{secret}", flush=True)
    print(f"The API is documented at {addresses[0]}docs", flush=True)
    # Ctrl-C is how it is meant to end; the server has stopped by then.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    return 0
