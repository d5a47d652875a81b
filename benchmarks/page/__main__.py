"""Write the tables of docs/performance.md from the raw files in docs/results.

    python -m benchmarks.page [--check]

The page has a pair of markers per table, `<!-- page:NAME -->` and `<!-- /page:NAME -->`; what stands between them is
made by the functions of this folder. `--check` writes nothing and exits with status 1 where page and files disagree.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.page import jobs, scoring
from benchmarks.page.raw import Results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "docs/results"
_PART = re.compile(r"(<!-- page:([\w-]+) -->\n).*?(<!-- /page:\2 -->)", re.DOTALL)

TABLES: dict[str, Callable[[Results], str]] = {
    "coco": scoring.coco,
    "kernels": scoring.kernels,
    "flickr": scoring.flickr,
    "cores": scoring.cores,
    "real": scoring.real,
    "training": jobs.training,
    "gradients": jobs.gradients,
    "indexing": jobs.indexing,
    "indexing-steps": jobs.indexing_steps,
    "searching": jobs.searching,
    "cold-start": jobs.cold_start,
    "kernel-tests": jobs.kernel_tests,
}


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Every table of the page by its name."""
    files = Results(results)
    return {name: make(files) for name, make in TABLES.items()}


def rewritten(text: str, made: Mapping[str, str]) -> str:
    """The page with these tables. Raises ValueError where the page has not exactly one place for each."""
    places = [found[2] for found in _PART.finditer(text)]
    if sorted(places) != sorted(made):
        raise ValueError(f"docs/performance.md has places for {sorted(places)}, but the tables are {sorted(made)}.")
    return _PART.sub(lambda found: f"{found[1]}{made[found[2]].strip()}\n{found[3]}", text)


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the page is another")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = rewritten(text, tables())
    if options.check and made != text:
        parser.exit(1, "docs/performance.md is not what its raw files make: run python -m benchmarks.page\n")
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
