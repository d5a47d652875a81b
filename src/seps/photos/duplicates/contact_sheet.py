"""Groups of duplicates to look at: one HTML page that needs nothing else, or one JPEG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

from PIL import Image, ImageDraw

from seps.photos.duplicates.duplicates import Copy, Group

CELL, LINE = 160, 14
"""Pixels of a thumbnail's longer side, and of a line of text."""
SHEET_GROUPS, SHEET_PICTURES = 60, 8
"""What fits on a JPEG: groups, and pictures of each."""
TITLES = {"file": "the same file", "picture": "the same picture", "near": "nearly the same picture"}
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:1.5em;background:#fff;color:#222}"
    "section{border-top:1px solid #bbb;padding:.6em 0}"
    "ul{display:flex;flex-wrap:wrap;gap:12px;list-style:none;padding:0}"
    "li{width:180px;overflow-wrap:anywhere}img{max-width:160px;max-height:160px;display:block}"
    "li.keep img{outline:4px solid #2a7}h2{font-size:1em}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}}"
)


def told(copy: Copy) -> str:
    """What a picture is to the first of its group, its size and its bytes."""
    why = "keep" if copy.kind is None else TITLES[copy.kind]
    sure = f" ({copy.likeness:.3f})" if copy.kind in ("picture", "near") else ""
    size = f", {_bytes(copy.size)}" if copy.member is None else ""
    return f"{why}{sure}, {copy.width} x {copy.height}{size}"


def html_page(groups: Sequence[Group], pictures: Mapping[str, bytes]) -> str:
    """The groups as a page; thumbnails are in it."""
    parts = []
    for number, group in enumerate(groups, 1):
        cells = "".join(_cell(copy, pictures.get(copy.id, b"")) for copy in group.pictures)
        parts.append(f"<section><h2>{number}. {escape(TITLES[group.kind])}</h2><ul>{cells}</ul></section>")
    head = f"{len(groups)} group{'s' * (len(groups) != 1)}; nothing was deleted. The first of each has the most pixels."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Duplicates</title>'
        '<meta name="generator" content="seps duplicates">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Duplicates</h1><p>{head}</p>{''.join(parts)}</body></html>"
    )


def _cell(copy: Copy, thumbnail: bytes) -> str:
    name = escape(str(copy).encode("utf-8", "backslashreplace").decode("utf-8"))
    picture = base64.b64encode(thumbnail).decode("ascii")
    kept = ' class="keep"' if copy.kind is None else ""
    return f'<li{kept}><img alt="" src="data:image/jpeg;base64,{picture}"><b>{name}</b><br>{escape(told(copy))}</li>'


def sheet(groups: Sequence[Group], pictures: Mapping[str, bytes]) -> Image.Image:
    """The first `SHEET_GROUPS` groups as one picture, a row for each; the frame of the one to keep is green."""
    shown = groups[:SHEET_GROUPS]
    columns = max((min(SHEET_PICTURES, len(group.pictures)) for group in shown), default=1)
    height, width = CELL + 2 * LINE + 12, CELL + 12
    page = Image.new("RGB", (width * columns + 8, height * max(1, len(shown)) + 8), "white")
    draw = ImageDraw.Draw(page)
    for row, group in enumerate(shown):
        for column, copy in enumerate(group.pictures[:SHEET_PICTURES]):
            left, top = 8 + column * width, 8 + row * height
            try:
                thumbnail = Image.open(io.BytesIO(pictures.get(copy.id, b"")), formats=("JPEG",)).convert("RGB")
                thumbnail.thumbnail((CELL, CELL))
                page.paste(thumbnail, (left, top))
            except OSError:
                draw.rectangle((left, top, left + CELL, top + CELL), fill="lightgrey")
            if copy.kind is None:
                draw.rectangle((left - 3, top - 3, left + CELL + 2, top + CELL + 2), outline=(40, 170, 110), width=3)
            more = len(group.pictures) - SHEET_PICTURES
            last = f" and {more} more" if more > 0 and column == SHEET_PICTURES - 1 else ""
            for line, text in enumerate((str(copy), told(copy) + last)):
                short = text if len(text) <= 27 else f"...{text[-24:]}" if not line else text[:27]
                drawn = short.encode("ascii", "replace").decode("ascii")
                draw.text((left, top + CELL + 2 + line * LINE), drawn, fill="black")
    return page


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
