"""Draw docs/images/leak.svg, what the published pairing does to a figure, from the results of `seps compare`.

python tools/leak_figure.py docs/results/compare-flickr8k.jsonl docs/images/leak.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

WIDTH, LEFT, BAR = 480, 16, 372
ROWS = (
    ("mean", "none", "mean patch against mean word, no description", "plain"),
    ("published", "published", "published code, its own evaluation: the query carries the answer", "leak"),
    ("published", "none", "the same weights, that text taken away", "plain"),
    ("published", "image", "the same weights, that text on the image's side", "plain"),
    ("description", "image", "the image's description alone, no pixels", "plain"),
    ("default", "image", "ours: pixels and the image's own description", "ours"),
)
STYLE = """
  .back { fill: #ffffff; } text { fill: #1f2328; font: 13px system-ui, sans-serif; }
  .small { font-size: 11.5px; } .bold { font-weight: 600; } .box { fill: #eef1f5; stroke: #8c96a3; }
  .plain { fill: #8c96a3; } .leak { fill: #c8392b; } .ours { fill: #2467b3; } .second { opacity: .55; }
  .bad { fill: #f9dcd8; stroke: #c8392b; } .good { fill: #d9e8f8; stroke: #2467b3; } .spread { stroke: #1f2328; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #161b22; } text { fill: #e6edf3; } .box { fill: #262c36; } .spread { stroke: #e6edf3; }
    .bad { fill: #4a1f1b; } .good { fill: #16324f; } .leak { fill: #e5675a; } .ours { fill: #5aa0ea; }
  }
"""


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, lines: Sequence[str], kind: str) -> Iterator[str]:
    yield f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{len(lines) * 16 + 8}" rx="4" class="{kind}"/>'
    for number, line in enumerate(lines):
        yield _text(x + 8, y + 17 + 16 * number, line, "small")


def _pairings(top: float) -> Iterator[str]:
    """Whose the description is: two rows of boxes."""
    for y, title, query, image in (
        (top, "published evaluation", ("caption", "+ description of the target"), ("pixels",)),
        (top + 86, "here", ("caption",), ("pixels", "+ the image's own description")),
    ):
        leaks = len(query) == 2
        yield _text(LEFT, y, f"{title}:", "bold small")
        yield _text(LEFT + 8, y + 19, "query", "small")
        yield from _box(LEFT + 8, y + 25, 186, query, "bad" if leaks else "box")
        yield _text(LEFT + 206, y + 47, "finds")
        yield _text(LEFT + 250, y + 19, "image in the gallery", "small")
        yield from _box(LEFT + 250, y + 25, 196, image, "box" if leaks else "good")


def draw(results: Path) -> str:
    """The figure as SVG."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    parts = list(_pairings(28))
    y = 222.0
    parts.append(_text(LEFT, y, "rSum (of 600), three seeds; upper bar dev, lower dev-llava", "bold small"))
    for name, protocol, title, kind in ROWS:
        y += 26
        parts.append(_text(LEFT, y, title))
        for split, second in (("dev", ""), ("dev-llava", " second")):
            values = [line["rsum"][f"{split}/{protocol}"] for line in lines if line["name"] == name]
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            length, spread = mean / 600 * BAR, deviation / 600 * BAR
            parts.append(f'<rect x="{LEFT}" y="{y + 6:g}" width="{length:.1f}" height="11" class="{kind}{second}"/>')
            ends = f'x1="{LEFT + length - spread:.1f}" x2="{LEFT + length + spread:.1f}"'
            parts.append(f'<line {ends} y1="{y + 11.5:g}" y2="{y + 11.5:g}" class="spread"/>')
            parts.append(_text(LEFT + length + 8, y + 16, f"{mean:.1f} ± {deviation:.1f}", "small"))
            y += 14
    height = y + 20
    title = "<title>What the published pairing does to a figure</title>"
    back = f'<rect width="{WIDTH}" height="{height:g}" rx="8" class="back"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    return "\n".join([head, title, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])), encoding="utf-8")
