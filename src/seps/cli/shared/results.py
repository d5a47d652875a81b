"""The table of results that `seps search` and `seps find` print, with thumbnails where the terminal shows pictures."""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from seps.cli.shared.text import cells, counted, printable

if TYPE_CHECKING:
    from seps.photos.search.results import Hit, Results


def print_results(
    results: Results,
    names: Sequence[str],
    good: int | None,
    *,
    dates: bool = False,
    thumbnails: Mapping[str, bytes] | None = None,
) -> None:
    """Print results under a header, with a line after the first `good`; None: no line.

    `names` are those of the pictures, `thumbnails` their JPEGs by id. With `dates` there is a column of dates.
    """
    protocol = inline_protocol()
    hits = results.hits
    shown = [f"{printable(name)}{_copies(hit)}" for name, hit in zip(names, hits, strict=True)]
    width = max(map(cells, shown))
    sure = "" if hits[0].confidence is None else "  confidence"
    when = f"  {'date':<15}" if dates else ""
    # Lines of a JSONL file need no name: without other sources there is no column of them.
    named = any(hit.described_by not in ([], ["jsonl"]) for hit in hits)
    source = f"  {'size':<11}  described by" if named else "  size"
    print(f"{'rank':>4}  {'score':>7}{sure}{when}  {'picture':<{width}}{source}")
    for place, (hit, name) in enumerate(zip(hits, shown, strict=True)):
        if place == good:
            print(f"      --- {'the rest: weaker matches' if place else 'no good match; the nearest are'} ---")
        sure = "" if hit.confidence is None else f"  {hit.confidence:>10.2f}"
        when = f"  {hit.date[:10]} {hit.date_source:<4}" if dates else ""
        padded = name + " " * (width - cells(name))
        size = f"{hit.width} x {hit.height}"
        size = f"{size:<11}  {', '.join(hit.described_by)}".rstrip() if named else size
        print(f"{hit.rank:>4}  {hit.score:>7.3f}{sure}{when}  {padded}  {size}")
        if protocol and thumbnails and hit.id in thumbnails:
            print(_inline(thumbnails[hit.id], protocol))


def _copies(hit: Hit) -> str:
    """How many near-duplicates are folded under a result."""
    return f" (and {counted(len(hit.folded), 'copy', 'copies')})" if hit.folded else ""


def inline_protocol() -> str | None:
    """How this terminal shows pictures, if it can."""
    if not sys.stdout.isatty():
        return None
    if "kitty" in os.environ.get("TERM", "") or os.environ.get("TERM_PROGRAM") == "ghostty":
        return "kitty"
    return "iterm" if os.environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm", "vscode") else None


def _inline(jpeg: bytes, protocol: str) -> str:
    """The escape sequence that shows a thumbnail."""
    if protocol == "iterm":
        return f"\033]1337;File=inline=1;height=6:{base64.b64encode(jpeg).decode()}\a"
    from PIL import Image

    png = io.BytesIO()
    Image.open(io.BytesIO(jpeg), formats=("JPEG",)).save(png, "PNG")
    data = base64.b64encode(png.getvalue()).decode()
    parts = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    head = "a=T,f=100,r=6,"
    return "".join(
        f"\033_G{head if i == 0 else ''}m={int(i < len(parts) - 1)};{part}\033\\" for i, part in enumerate(parts)
    )
