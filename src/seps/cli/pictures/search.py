"""`seps search`: the pictures of a store that fit a sentence, or that are like a picture."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seps.cli.shared.argtypes import date, device, fraction, non_negative, positive
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.results import inline_protocol, print_results
from seps.cli.shared.text import print_json, printable
from seps.plugins import load_plugins

if TYPE_CHECKING:
    from seps.photos.search.searcher import Hit, Searcher

SIGNS = '+, - and "without" were read as part of the sentence; seps find and the page of seps serve add and subtract.'


def add_options(parser: Parser) -> None:
    """The options of `seps search`."""
    parser.sentence = True
    parser.add_argument("query", nargs="?", help='what to look for, like "a dog running on the beach"')
    parser.add_argument("--store", required=True, help="a store made by seps index")
    parser.add_argument("--image", metavar="FILE", help="look for pictures like this one instead")
    parser.add_argument("-k", type=positive, default=10, help="how many to show (default: 10)")
    parser.add_argument("--candidates", type=positive, default=200, help="how many to score exactly (default: 200)")
    parser.add_argument("--exact", action="store_true", help="score every picture: slower, nothing can be missed")
    parser.add_argument("--folder", help="only below this folder (or in this shard) of the gallery")
    parser.add_argument("--after", type=date, metavar="DATE", help="only photos of this date or later")
    parser.add_argument("--before", type=date, metavar="DATE", help="only photos before this date")
    parser.add_argument(
        "--min-size", type=non_negative, metavar="PIXELS", help="only pictures whose shorter side is at least this long"
    )
    parser.add_argument(
        "--min-confidence",
        type=fraction,
        metavar="C",
        help="only pictures of at least this confidence, 0 to 1; none at all where nothing fits",
    )
    parser.add_argument("--no-fold", action="store_true", help="list near-duplicates one by one (default: fold them)")
    parser.add_argument("--model", help="model folder, if it is not where it was when indexing")
    add_plugins(parser)
    parser.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda, ...")
    parser.add_argument("--json", action="store_true", help="print a JSON list of path, score and rank")


def run(options: argparse.Namespace) -> int:
    """Search and print a ranked table."""
    if (options.query is None) == (options.image is None):
        options.parser.error("give either a sentence or --image FILE")
    if options.image is not None and options.min_confidence is not None:
        options.parser.error("--min-confidence is for sentences; leave it out with --image")
    from seps.photos.search.folding import best_entries
    from seps.photos.search.query import has_signs, how_read
    from seps.photos.search.searcher import Filters, Searcher
    from seps.photos.store.places import check_folder

    load_plugins(options.plugin)
    searcher = Searcher(options.store, options.model, device=options.device)
    filters = Filters(options.folder, options.after, options.before, options.min_size)
    among: dict[str, Any] = {"candidates": options.candidates, "exact": options.exact, "filters": filters}
    deep = options.k if options.no_fold else max(options.k, options.candidates)
    notes: list[str] = []
    if options.image is None:
        hits = searcher.search(options.query, deep, min_confidence=options.min_confidence, **among)
        has_form = has_signs(options.query) or bool(how_read(options.query))
        notes = [
            searcher.without_bank,
            " ".join(filter(None, (searcher.note(options.query), SIGNS * has_form))),
        ]
    else:
        hits = searcher.search_image(options.image, deep, **among)
    if not hits and options.folder:
        check_folder(searcher.store, options.folder)
    entries = best_entries(searcher.store, hits, options.k, folded=not options.no_fold)
    hits = [entry.hit for entry in entries]
    found = {
        "hits": [entry.as_dict() for entry in entries],
        "good": None if any(hit.good is None for hit in hits) else sum(bool(hit.good) for hit in hits),
        "notes": notes,
        "thumbnails": _thumbnails(searcher, hits) if inline_protocol() else [],
    }
    _tell(options, found)
    return 0


def _thumbnails(searcher: Searcher, hits: Sequence[Hit]) -> list[str]:
    """The thumbnail of each hit, JPEG in base64; empty for one that was taken out meanwhile."""
    rows = [searcher.store.get(hit.id, ["thumbnail"]) for hit in hits]
    return [base64.b64encode(row["thumbnail"]).decode() if row else "" for row in rows]


def _tell(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Print what was found, as JSON or as a table."""
    for sentence in found["notes"]:
        if sentence:
            print(printable(sentence), file=sys.stderr)
    if options.json:
        print_json(found["hits"])
    elif not found["hits"]:
        fits = f", or nothing fits with confidence {options.min_confidence:g}" if options.min_confidence else ""
        print(f"Nothing found: the store is empty, or the filters leave nothing{fits}.", file=sys.stderr)
    else:
        names = [_name(hit) for hit in found["hits"]]
        print_results(found["hits"], names, found["good"], thumbnails=found["thumbnails"])


def _name(hit: Mapping[str, Any]) -> str:
    if hit.get("member") is None:
        return str(hit["path"])
    from seps.images.shards import shown_place

    return shown_place(hit["path"], hit.get("member"))
