"""The options of a search, the same for `seps find` and `seps search`, and the query that they give."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import date, fraction, input_file, non_negative, place, positive, positive_real
from seps.cli.shared.parser import Parser

if TYPE_CHECKING:
    from seps.photos.search.query import Query


def add_query(parser: Parser) -> None:
    """The sentence and the options of a query."""
    parser.sentence = True
    # Places south of the equator begin with a minus: what looks like such a number is a value, not an option.
    parser._negative_number_matcher = re.compile(r"-\.?\d[\d.,]*(,\s*-?\.?\d[\d.]*)?")
    parser.add_argument(
        "query", nargs="?", help="search for this sentence or sum: 'a dog on the beach', 'horse + stripes - grass'"
    )
    parser.add_argument(
        "--image", type=input_file, action="append", default=[], metavar="FILE", help="add this picture to the query"
    )
    parser.add_argument(
        "--minus-image",
        type=input_file,
        action="append",
        default=[],
        metavar="FILE",
        help="subtract this picture from the query",
    )
    parser.add_argument("-k", type=positive, default=10, help="show at most this many pictures (default: 10)")
    parser.add_argument(
        "--since", type=date, metavar="DATE", help="show only photos of this date, like 2024-05-31, or later"
    )
    parser.add_argument("--until", type=date, metavar="DATE", help="show only photos before this date")
    parser.add_argument(
        "--min-size",
        type=non_negative,
        metavar="PIXELS",
        help="show only pictures whose shorter side has at least this many pixels",
    )
    parser.add_argument(
        "--near",
        type=place,
        metavar="LAT,LON",
        help="show only photos taken near this place, in degrees like 48.86,2.35",
    )
    parser.add_argument(
        "--within", type=positive_real, metavar="KM", help="set the radius around --near, in kilometres (default: 10)"
    )
    parser.add_argument(
        "--min-confidence", type=fraction, metavar="C", help="hide results below this confidence, 0 to 1"
    )
    parser.add_argument(
        "--sort",
        choices=("score", "newest", "oldest"),
        default="score",
        help="order the results; by date, good matches come first (default: score)",
    )
    parser.add_argument("--no-fold", action="store_true", help="list near-duplicates one by one (default: fold them)")
    parser.add_argument(
        "--candidates", type=positive, default=200, help="score this many pictures exactly (default: 200)"
    )
    parser.add_argument("--exact", action="store_true", help="score every picture exactly: slower, misses nothing")


def query_of(options: argparse.Namespace, text: str | None, folder: str | os.PathLike[str] | None = None) -> Query:
    """The query of a command line. Raises ValueError where nothing is looked for."""
    from seps.photos.search.query import Query, terms_of
    from seps.photos.store.filters import Filters

    return Query(
        terms_of(text, options.image, options.minus_image),
        Filters(
            None if folder is None else os.fspath(folder),
            options.since,
            options.until,
            options.min_size,
            options.near,
            options.within,
        ),
        options.k,
        options.candidates,
        options.exact,
        options.sort,
        not options.no_fold,
        options.min_confidence,
        text or "",
    )
