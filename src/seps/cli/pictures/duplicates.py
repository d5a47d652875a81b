"""`seps duplicates`: list pictures of a store that are equal, re-encoded or nearly equal.

The first of each group is the one to keep. Nothing is deleted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from seps.cli.shared.argtypes import fraction, non_negative_real, output_file
from seps.cli.shared.outputs import check_page, check_picture, save_picture
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import counted, print_json, printable
from seps.files import write_text


def add_options(parser: Parser) -> None:
    """The options of `seps duplicates`."""
    parser.add_argument("--store", required=True, help="read this store, made by seps index")
    parser.add_argument(
        "--kind",
        choices=("file", "picture", "near"),
        default="near",
        help="look for equal files; also for re-encoded or resized pictures; also for nearly equal "
        "ones (default: near)",
    )
    parser.add_argument(
        "--threshold",
        type=fraction,
        metavar="T",
        help="require at least this similarity by the model of nearly equal pictures, 0 to 1 (default: by model)",
    )
    parser.add_argument(
        "--within",
        type=non_negative_real,
        metavar="SECONDS",
        help="require at most this time between the files of nearly equal pictures, in seconds (default: any)",
    )
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a page with all groups")
    parser.add_argument("--sheet", type=output_file, metavar="FILE.jpg", help="write the first groups as one picture")
    parser.add_argument("--json", action="store_true", help="print the groups as JSON")


def run(options: argparse.Namespace) -> int:
    """Find the groups, print them, and draw the contact sheets."""
    if options.sheet and Path(options.sheet).suffix.lower() not in (".jpg", ".jpeg", ".png"):
        raise ValueError(f"--sheet is {options.sheet!r}; name a .jpg or .png file.")
    if options.threshold == 0:
        options.parser.error("--threshold must be above 0")
    if options.html:
        check_page(options.html)
    if options.sheet:
        check_picture(options.sheet, "--sheet")
    from seps.cli.shared.progress import count_progress
    from seps.photos.duplicates import contact_sheet
    from seps.photos.library import Library

    library = Library(store=options.store)
    with count_progress("comparing", "images") as progress:
        groups = library.duplicates(
            kind=options.kind, threshold=options.threshold, within=options.within, progress=progress
        )
    if options.html or options.sheet:
        pictures = library.thumbnails([copy.id for group in groups for copy in group.pictures])
        if options.html:
            write_text(Path(options.html), contact_sheet.html_page(groups, pictures))
        if options.sheet:
            save_picture(contact_sheet.sheet(groups, pictures), Path(options.sheet), quality=85)
    if options.json:
        print_json([group.as_dict() for group in groups])
        return 0
    for number, group in enumerate(groups, 1):
        print(f"{number}. {contact_sheet.TITLES[group.kind]}")
        for copy in group.pictures:
            print(f"   {'keep ' if copy.kind is None else '     '} {printable(copy)}  ({contact_sheet.told(copy)})")
    others = sum(len(group.others) for group in groups)
    beside = f"{counted(others, 'picture')} beside {'that' if len(groups) == 1 else 'those'} to keep"
    print(f"{counted(len(groups), 'group')} with {beside}, of {len(library)}. Nothing was deleted.")
    for name in filter(None, (options.html, options.sheet)):
        print(f"Written: {printable(name)}")
    return 0
