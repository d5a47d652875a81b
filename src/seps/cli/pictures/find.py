"""`seps find`: the pictures of a folder that fit a sentence; what is new in the folder is indexed first.

A sentence may be a sum: "horse + stripes - grass". Pictures join it with --image and --minus-image.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seps.cli.shared.argtypes import (
    date,
    default_device,
    device,
    fraction,
    input_file,
    output_file,
    output_folder,
    positive,
    store_place,
)
from seps.cli.shared.indexing import tell_left_out
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.results import print_results
from seps.cli.shared.text import counted, list_problems, print_for_programs, print_json, printable, say
from seps.retrieval.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from seps.photos.indexing.build import IndexReport
    from seps.photos.search.folding import Entry
    from seps.photos.search.query import Term
    from seps.photos.search.results import FoundPicture
    from seps.photos.search.searcher import Searcher
    from seps.retrieval.engine.zeroshot import ZeroShotModel
    from seps.retrieval.model import RetrievalModel

_COLUMNS = ("rank", "score", "confidence", "path", "member", "date", "date_source", "width", "height")


def add_options(parser: Parser) -> None:
    """The options of `seps find`."""
    parser.intermixed = parser.sentence = True
    parser.add_argument("query", nargs="?", help="what to look for: 'a dog on the beach', 'horse + stripes - grass'")
    parser.add_argument("folder", nargs="?", help="where (default: the current folder, or all folders of --store)")
    parser.add_argument(
        "--image", type=input_file, action="append", default=[], metavar="FILE", help="add this picture to the query"
    )
    parser.add_argument(
        "--minus-image", type=input_file, action="append", default=[], metavar="FILE", help="subtract this picture"
    )
    parser.add_argument("-k", type=positive, default=10, help="how many to show (default: 10)")
    parser.add_argument("--after", type=date, metavar="DATE", help="only photos of this date or later")
    parser.add_argument("--before", type=date, metavar="DATE", help="only photos before this date")
    parser.add_argument(
        "--sort",
        choices=("score", "date", "newest", "oldest"),
        default="score",
        help="order of the photos that were found; date is newest first (default: score)",
    )
    parser.add_argument("--min-confidence", type=fraction, metavar="C", help="least confidence of a picture, 0 to 1")
    parser.add_argument("--no-fold", action="store_true", help="list near-duplicates one by one (default: fold them)")
    parser.add_argument("--exact", action="store_true", help="score every picture: slower, nothing can be missed")
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files and folders like 'screenshots/' or '*.gif'; a file .sepsignore does it for good",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--paths", action="store_true", help="print one path per line and nothing else")
    shown.add_argument("-0", "--null", action="store_true", help="print paths with a NUL after each, for xargs -0")
    shown.add_argument("--json", action="store_true", help="print a JSON list")
    shown.add_argument("--csv", action="store_true", help="print a table as CSV")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="also write a page with the thumbnails")
    parser.add_argument(
        "--copy-to", type=output_folder, metavar="DIR", help="also copy the pictures there; nothing is overwritten"
    )
    parser.add_argument("--no-update", action="store_true", help="search what is indexed, without looking for changes")
    parser.add_argument("--prune", action="store_true", help="let many pictures go whose files were deleted on purpose")
    parser.add_argument(
        "--store", type=store_place, help="store to use (default: one per folder and model, in your data folder)"
    )
    parser.add_argument("--model", help="as for seps index (default: base, or the one of --store)")
    add_plugins(parser)
    parser.add_argument("--device", type=device, help="cpu, cuda, ...; default: a GPU if there is one, for indexing")


def run(options: argparse.Namespace) -> int:
    """Index what is new, search, and print."""
    query, folder = options.query, options.folder
    if folder is None and query is not None and (options.image or options.minus_image) and os.path.isdir(query):
        query, folder = None, query  # `seps find --image a.jpg FOLDER`
    from seps.cli.shared.outputs import check_page
    from seps.photos.search.folding import best_entries
    from seps.photos.search.query import how_read, search_terms, terms_of
    from seps.photos.search.results import with_sources
    from seps.photos.search.searcher import CANDIDATES, Filters, Searcher
    from seps.photos.store.rows import OtherModelError, StoreError
    from seps.plugins import load_plugins

    terms = terms_of(query, options.image, options.minus_image)
    store, folders = _place(options, folder)
    if options.html:
        check_page(options.html)
    _check_copies(options.copy_to, folders)
    load_plugins(options.plugin)
    try:
        model = None if options.no_update else _update(options, store, folders)
        searcher = Searcher(store, options.model if model is None else model, device=model.device if model else "cpu")
    except OtherModelError as error:
        if options.store is not None:
            raise
        raise StoreError(f"{error} To have seps find make its store of this folder anew, delete {store}.") from error
    hits = search_terms(
        searcher,
        terms,
        options.k if options.no_fold else max(options.k, CANDIDATES),
        exact=options.exact,
        filters=Filters(os.path.realpath(folders[0]) if folders else None, options.after, options.before),
        min_confidence=options.min_confidence,
    )
    if query is not None and (form := how_read(query)):
        say(form)
    for note in {searcher.note(term.text) for term in terms if not term.is_image} - {""}:
        say(note)
    entries = best_entries(searcher.store, hits, options.k, folded=not options.no_fold)
    found = with_sources(searcher, _sorted(entries, options.sort))
    _print(options, found, terms)
    _write(options, searcher, found, terms)
    return 0


def _place(options: argparse.Namespace, folder: str | None) -> tuple[str, list[str]]:
    """The store, and the folders to index; none: all of the store."""
    from seps.photos.store.places import data_folder, default_store

    if folder is not None and not os.path.isdir(folder):
        words = shlex.quote(f"{options.query} {folder}")
        raise ValueError(
            f"There is no folder {folder}. Name the folder that holds the pictures; a sentence of several words goes "
            f"into quotes: seps find {words}"
        )
    if options.store is not None:
        return options.store, [] if folder is None else [folder]
    folder = "." if folder is None else folder
    data = data_folder(os.environ, sys.platform, Path.home())
    return str(default_store(data, folder, options.model or DEFAULT_MODEL)), [folder]


def _check_copies(copies: str | None, folders: Sequence[str]) -> None:
    for folder in folders:
        if copies and Path(os.path.realpath(copies)).is_relative_to(os.path.realpath(folder)):
            raise ValueError(
                f"--copy-to {copies} lies in {folder}, so that the copies would be found the next time. Choose a "
                "folder elsewhere."
            )


def _update(options: argparse.Namespace, store: str, folders: Sequence[str]) -> RetrievalModel | ZeroShotModel | None:
    """Index what is new; the model, where it was needed for that."""
    from seps.cli.shared.progress import count_progress
    from seps.locks import FileInUse
    from seps.photos.indexing.build import IndexOptions
    from seps.photos.indexing.opening import settings_at
    from seps.photos.indexing.updating import update_store
    from seps.photos.store.rows import StoreError

    wanted = IndexOptions(prune=options.prune, exclude=tuple(options.exclude))
    try:
        with count_progress("indexing", "images") as progress:
            done = update_store(
                folders,
                store,
                options.model,
                options=wanted,
                device=lambda: options.device or default_device(),
                plugins=options.plugin,
                first=lambda: say(f"Indexing {', '.join(folders)} for the first time, into {store}."),
                progress=progress,
            )
    except StoreError as error:
        there = settings_at(store) is not None
        if there and isinstance(error.__cause__, OSError):
            raise StoreError(f"{error} To search what is indexed already, add --no-update.") from error
        if not there or not isinstance(error.__cause__, FileInUse):
            raise
        say(f"{error} So what is indexed already is searched.")
        return None
    _tell(done.report, store)
    return done.model


def _tell(report: IndexReport, store: str) -> None:
    """Say on standard error what has changed and what is left out."""
    read = report.new + report.changed + report.moved
    if read or report.deleted:
        say(f"Indexed {counted(read, 'picture')} in {report.seconds:.1f} s; {report.deleted} gone.")
    again = f"seps index --store {shlex.quote(store)}"
    tell_left_out(report, f"{again} --json", again)


def _sorted(entries: Sequence[Entry], order: str) -> list[Entry]:
    """The results by score, or by date; equal dates by score."""
    if order == "score":
        return list(entries)
    sign = 1 if order == "oldest" else -1
    return sorted(entries, key=lambda entry: (sign * entry.hit.when, entry.hit.rank))


def _print(options: argparse.Namespace, found: Sequence[FoundPicture], terms: Sequence[Term]) -> None:
    if options.paths or options.null:
        _print_paths([picture.path for picture in found], "\0" if options.null else "\n")
    elif options.json:
        print_json([_plain(picture, terms) for picture in found])
    elif options.csv:
        page = io.StringIO()
        table = csv.DictWriter(page, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for picture in found:
            row = _plain(picture, terms)
            table.writerow({**row, "path": printable(row["path"])} if sys.stdout.isatty() else row)
        print_for_programs(page.getvalue())
    elif found:
        known = [picture.hit.good for picture in found]
        by_score = options.sort == "score" and None not in known
        hits = [_plain(picture, terms) for picture in found]
        print_results(
            hits, [picture.path for picture in found], sum(map(bool, known)) if by_score else None, dates=True
        )
    if not found:
        say("Nothing found: there is no picture, or the dates and the confidence leave nothing.")


def _print_paths(paths: Sequence[str], end: str) -> None:
    """Paths as they are on the disk, for other programs; on a terminal they cannot do harm."""
    if sys.stdout.isatty() or not hasattr(sys.stdout, "buffer"):
        sys.stdout.write("".join(f"{printable(path)}{end}" for path in paths))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(b"".join(os.fsencode(path) + end.encode() for path in paths))
    sys.stdout.buffer.flush()


def _plain(picture: FoundPicture, terms: Sequence[Term]) -> dict[str, Any]:
    """A result as plain values; its path is absolute."""
    parts = [
        {"part": str(term), "score": round(value, 6)} for term, value in zip(terms, picture.hit.parts, strict=False)
    ]
    copies = {"folded": [_plain(copy, ()) for copy in picture.folded]} if picture.folded else {}
    return {**picture.hit.as_dict(), "path": str(picture.source.path), **({"parts": parts} if parts else {}), **copies}


def _write(
    options: argparse.Namespace, searcher: Searcher, found: Sequence[FoundPicture], terms: Sequence[Term]
) -> None:
    from seps.photos.search.results import copy_to, write_page

    if options.html:
        rows = searcher.store.select([picture.hit.id for picture in found], ["id", "thumbnail"]).rows()
        title = " + ".join(map(str, terms)).replace("+ - ", "- ")
        write_page(Path(options.html), title, found, {row["id"]: row["thumbnail"] for row in rows})
        say(f"Written: {options.html}")
    if options.copy_to:
        copies, problems = copy_to(Path(options.copy_to), found)
        say(f"Copied {counted(len(copies), 'picture')} to {options.copy_to}.")
        list_problems(problems, "could not be copied", "seps index --verify")
