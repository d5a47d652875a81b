"""`seps modules`: write the method as one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from seps.bundle import single_file


def run(arguments: Sequence[str]) -> int:
    """Write `seps_modules.py`, or print it with `-o -`."""
    parser = argparse.ArgumentParser("seps modules", description=__doc__)
    parser.add_argument("-o", "--out", default="seps_modules.py", help="file to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    text = single_file()
    if options.out == "-":
        print(text, end="")
        return 0
    path = Path(options.out)
    path.write_text(text, encoding="utf-8")
    print(f"Wrote {path} ({len(text.splitlines())} lines). It needs torch alone: from {path.stem} import SEPSLoss")
    return 0
