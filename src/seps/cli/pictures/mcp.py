"""`seps mcp`: let an assistant search a store, by the Model Context Protocol over standard input and output.

The assistant starts the command; docs/mcp.md has the lines for its settings. The command reads only pictures of the
indexed folders, and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from seps.cli.shared.argtypes import device
from seps.cli.shared.parser import Parser, add_plugins
from seps.plugins import load_plugins


def add_options(parser: Parser) -> None:
    """The options of `seps mcp`."""
    parser.add_argument("--store", required=True, help="read this store, made by seps index")
    parser.add_argument("--model", help="load the model from this folder, if it has moved since indexing")
    add_plugins(parser)
    parser.add_argument("--device", type=device, default="cpu", help="compute on cpu, cuda or cuda:1 (default: cpu)")


def run(options: argparse.Namespace) -> int:
    """Answer until the client closes standard input."""
    # Standard output belongs to the protocol.
    with contextlib.redirect_stdout(sys.stderr):
        load_plugins(options.plugin)
        from seps.photos.library import Library
        from seps.photos.mcp_server import create_server

        library = Library(store=options.store, model=options.model, device=options.device)
        _ = library.searcher  # a store or model that cannot be used ends the command here, not the first search
        server = create_server(library)
    with contextlib.suppress(KeyboardInterrupt), library:
        server.run("stdio")
    return 0
