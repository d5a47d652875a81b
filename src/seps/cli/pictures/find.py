"""`seps find`: find pictures in a folder by a sentence. New and changed pictures are indexed first.

A sentence may be a sum: "horse + stripes - grass". --image and --minus-image add and subtract pictures.
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
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import default_device, device, output_file, output_folder, store_place
from seps.cli.shared.indexing import tell_left_out
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.progress import count_progress
from seps.cli.shared.querying import add_query, query_of
from seps.cli.shared.results import print_results
from seps.cli.shared.text import counted, list_problems, print_for_programs, print_json, printable, say

if TYPE_CHECKING:
    from seps.photos.library import Library
    from seps.photos.search.results import Results

_COLUMNS = ("rank", "score", "confidence", "path", "member", "date", "date_source", "width", "height", "described_by")


def add_options(parser: Parser) -> None:
    """The options of `seps find`."""
    parser.intermixed = True
    add_query(parser)
    parser.add_argument(
        "folder", nargs="?", help="search this folder (default: the current folder, or all folders of --store)"
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="skip files and folders like 'screenshots/' or '*.gif'; a file .sepsignore does so in every call",
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
    parser.add_argument("--no-update", action="store_true", help="search the store without indexing changes")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove the pictures of missing files from the store, even if many are missing",
    )
    parser.add_argument(
        "--store", type=store_place, help="use this store (default: one per folder and model, in your data folder)"
    )
    parser.add_argument("--model", help="use this model, as in seps index (default: base, or that of --store)")
    add_plugins(parser)
    parser.add_argument(
        "--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one, for indexing)"
    )


def run(options: argparse.Namespace) -> int:
    """Index what is new, search, and print."""
    text, folder = options.query, options.folder
    if folder is None and text is not None and (options.image or options.minus_image) and os.path.isdir(text):
        text, folder = None, text  # `seps find --image a.jpg FOLDER`
    from seps.cli.shared.outputs import check_page
    from seps.photos.indexing.opening import IndexOptions
    from seps.photos.library import Library
    from seps.photos.store.rows import OtherModelError, StoreError
    from seps.plugins import load_plugins

    query = query_of(options, text)
    folder = _checked_folder(options, folder)
    if options.html:
        check_page(options.html)
    _check_copies(options.copy_to, folder)
    load_plugins(options.plugin)
    with count_progress("indexing", "images") as progress:
        library = Library(
            folder,
            store=options.store,
            model=options.model,
            update=False,
            device=lambda: options.device or default_device(),
            options=IndexOptions(prune=options.prune, exclude=tuple(options.exclude)),
            plugins=options.plugin,
            first=lambda: say(f"Indexing {folder} for the first time, into {library.location}."),
            progress=progress,
        )
        try:
            if not options.no_update:
                _update(library)
            _ = library.searcher
        except OtherModelError as error:
            if options.store is not None:
                raise
            again = f"To rebuild the store of this folder, delete {library.location}."
            raise StoreError(f"{error} {again}") from error
    results = library.search(query)
    for note in results.notes:
        say(note)
    _print(options, results)
    _write(options, results)
    return 0


def _checked_folder(options: argparse.Namespace, folder: str | None) -> str | None:
    """The folder to index; None: all folders of the store. Raises ValueError for one that is not there."""
    if folder is not None and not os.path.isdir(folder):
        words = shlex.quote(f"{options.query} {folder}")
        raise ValueError(
            f"There is no folder {folder}. Name the folder that holds the pictures; a sentence of several words goes "
            f"into quotes: seps find {words}"
        )
    return folder if folder is not None or options.store is not None else "."


def _check_copies(copies: str | None, folder: str | None) -> None:
    if copies and folder is not None and Path(os.path.realpath(copies)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"--copy-to {copies} lies in {folder}, so that the copies would be found the next time. Choose a folder "
            "elsewhere."
        )


def _update(library: Library) -> None:
    """Index what is new. A store that cannot be written to is searched as it is."""
    from seps.locks import FileInUse
    from seps.photos.indexing.opening import settings_at
    from seps.photos.store.rows import StoreError

    try:
        report = library.update()
    except StoreError as error:
        is_there = settings_at(library.location) is not None
        if is_there and isinstance(error.__cause__, OSError):
            raise StoreError(f"{error} To search what is indexed already, add --no-update.") from error
        if not is_there or not isinstance(error.__cause__, FileInUse):
            raise
        say(f"{error} So what is indexed already is searched.")
        return
    read = report.new + report.changed + report.moved
    if read or report.deleted:
        say(f"Indexed {counted(read, 'picture')} in {report.seconds:.1f} s; {report.deleted} gone.")
    again = f"seps index --store {shlex.quote(library.location)}"
    tell_left_out(report, f"{again} --json", again)


def _print(options: argparse.Namespace, results: Results) -> None:
    if options.paths or options.null:
        _print_paths([result.name for result in results], "\0" if options.null else "\n")
    elif options.json:
        print_json([result.as_dict() for result in results])
    elif options.csv:
        page = io.StringIO()
        table = csv.DictWriter(page, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for result in results:
            row = {**result.as_dict(), "described_by": ", ".join(result.described_by)}
            table.writerow({**row, "path": printable(row["path"])} if sys.stdout.isatty() else row)
        print_for_programs(page.getvalue())
    elif results:
        by_score = results.good if options.sort == "score" else None
        print_results(results, [result.name for result in results], by_score, dates=True)
    if not results:
        say("Nothing found: there is no picture, or the dates and the confidence leave nothing.")


def _print_paths(paths: Sequence[str], end: str) -> None:
    """Paths as they are on the disk, for other programs; on a terminal they cannot do harm."""
    if sys.stdout.isatty() or not hasattr(sys.stdout, "buffer"):
        sys.stdout.write("".join(f"{printable(path)}{end}" for path in paths))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(b"".join(os.fsencode(path) + end.encode() for path in paths))
    sys.stdout.buffer.flush()


def _write(options: argparse.Namespace, results: Results) -> None:
    from seps.photos.search.written import copy_to, write_page

    if options.html:
        write_page(Path(options.html), results)
        say(f"Written: {options.html}")
    if options.copy_to:
        copies, problems = copy_to(Path(options.copy_to), results)
        say(f"Copied {counted(len(copies), 'picture')} to {options.copy_to}.")
        list_problems(problems, "could not be copied", "seps index --verify")
