"""`seps modules`: write the method as one file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from seps.cli.shared.argtypes import output_file_or_stdout
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import printable
from seps.files import write_text
from seps.modules import GENERATED, LANGUAGES, PARTS, STYLES, public_names, single_file


def add_options(parser: Parser) -> None:
    """The options of `seps modules`."""
    parser.add_argument(
        "-o",
        "--out",
        type=output_file_or_stdout,
        default="seps_modules.py",
        help="write this file; - is standard output (default: %(default)s)",
    )
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="write full docstrings and checks of arguments (annotated), or only both modes with one-"
        "line docstrings (slim) (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="write one part: sdtps (selection and aggregation), sensors (MultiModalSDTPS with its parts) or losses "
        "(default: all)",
    )
    parser.add_argument(
        "--language",
        choices=LANGUAGES,
        default=LANGUAGES[0],
        help="write docstrings and notes in this language; code and messages are the same (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that seps modules did not write")


def run(options: argparse.Namespace) -> int:
    """Write `seps_modules.py`, or print it with `-o -`; a file of somebody else stays as it is."""
    text = single_file(options.style, options.language, options.only)
    if options.out == "-":
        if hasattr(sys.stdout, "reconfigure"):
            # Python reads its files as UTF-8, whatever the terminal's encoding is.
            sys.stdout.reconfigure(encoding="utf-8")
        print(text, end="")
        return 0
    path = Path(options.out)
    if not options.force and path.exists() and not _is_ours(path):
        raise ValueError(f"{path} is there and was not written by seps modules. Name another file, or give --force.")
    write_text(Path(os.path.realpath(path)), text)  # a link stays one
    print(
        f"Wrote {printable(str(path))} ({len(text.splitlines())} lines). "
        f"It needs torch alone: from {printable(path.stem)} import {public_names(options.style, options.only)[0]}. "
        "Run as a program, it tests itself."
    )
    return 0


def _is_ours(path: Path) -> bool:
    """Whether an earlier `seps modules` wrote this file, or nobody put anything in it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(2000)
    return not start or any(mark.encode() in start for mark in GENERATED.values())
