"""`seps search`: find pictures of a store by a sentence or a picture."""

from __future__ import annotations

import argparse

from seps.cli.shared.argtypes import device
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.querying import add_query, query_of
from seps.cli.shared.results import inline_protocol, print_results
from seps.cli.shared.text import print_json, say
from seps.plugins import load_plugins


def add_options(parser: Parser) -> None:
    """The options of `seps search`."""
    add_query(parser)
    parser.add_argument("--store", required=True, help="read this store, made by seps index")
    parser.add_argument("--folder", help="search only below this folder, or in this shard, of the store")
    parser.add_argument("--model", help="load the model from this folder, if it has moved since indexing")
    add_plugins(parser)
    parser.add_argument("--device", type=device, default="cpu", help="compute on cpu, cuda or cuda:1 (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print a JSON list of path, score and rank")


def run(options: argparse.Namespace) -> int:
    """Search and print a ranked table."""
    from seps.photos.library import Library
    from seps.photos.store.rows import shown_place

    query = query_of(options, options.query, options.folder)
    load_plugins(options.plugin)
    library = Library(store=options.store, model=options.model, device=options.device)
    results = library.search(query)
    for note in (library.searcher.without_bank if query.sentences else "", *results.notes):
        if note:
            say(note)
    if options.json:
        print_json([result.as_dict(absolute=False) for result in results])
    elif results:
        names = [shown_place(result.hit.path, result.member) for result in results]
        by_score = results.good if query.sort == "score" else None
        print_results(results, names, by_score, thumbnails=results.thumbnails() if inline_protocol() else {})
    else:
        fits = f", or nothing fits with confidence {query.min_confidence:g}" if query.min_confidence else ""
        say(f"Nothing found: the store is empty, or the filters leave nothing{fits}.")
    return 0
