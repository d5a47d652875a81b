"""Contact sheets of typed queries: the five best photos of each, to be looked at by eye.

    seps index FOLDER --store STORE
    python -m benchmarks.quality.typed_sheets --store STORE --out sheets

One JPEG per ten queries of `typed_forty.txt`, a row per query. A query with a form that the product reads, such as
"beach without people", is searched in that form. The sheets show photos: they belong to their owners, publish none.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from seps.photos import Searcher
from seps.photos.library import Library

QUERIES = Path(__file__).with_name("typed_forty.txt")
SHOWN = 5
"""Photos per query."""
ROWS = 10
"""Queries per sheet."""
CELL = 150, 118
LABEL = 150


def queries(path: Path = QUERIES) -> list[str]:
    """The queries of the file, without its headings."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line[0] not in "#["]


def thumbnail(data: bytes) -> Image.Image:
    """A photo that fits its cell."""
    with Image.open(io.BytesIO(data)) as photo:
        small = photo.convert("RGB")
    small.thumbnail((CELL[0] - 4, CELL[1] - 4))
    return small


def sheet(searcher: Searcher, texts: Sequence[str]) -> Image.Image:
    """A row per query: its text, and its best photos from left to right."""
    page = Image.new("RGB", (LABEL + SHOWN * CELL[0], len(texts) * CELL[1]), "white")
    draw = ImageDraw.Draw(page)
    for row, text in enumerate(texts):
        draw.text((6, row * CELL[1] + 8), text.replace(" ", "\n", 1), fill="black")
        for place, result in enumerate(Library.over(searcher).search(text, SHOWN)):
            page.paste(thumbnail(result.thumbnail()), (LABEL + place * CELL[0], row * CELL[1] + 2))
    return page


def main() -> None:
    """Write the sheets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.typed_sheets", description=__doc__)
    parser.add_argument("--store", required=True, help="store of the photos")
    parser.add_argument("--out", type=Path, required=True, help="folder of the sheets")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    searcher, texts = Searcher(options.store), queries()
    for start in range(0, len(texts), ROWS):
        place = options.out / f"sheet-{start // ROWS + 1}.jpg"
        sheet(searcher, texts[start : start + ROWS]).save(place, quality=80)
        print(place)


if __name__ == "__main__":
    main()
