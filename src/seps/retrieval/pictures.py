"""Pictures of results: ranked photos with the patches each query kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TILE = 192
MARGIN = 10
TITLE = 34
INK, PAPER, GOOD = (24, 24, 27), (250, 250, 249), (22, 130, 70)


@dataclass(frozen=True)
class RankedPhoto:
    """One ranked photo: its pixels (3, H, W) uint8, the decision (N,) on a grid, and what to write under it."""

    pixels: Tensor
    keep: Tensor
    grid: tuple[int, int]
    label: str
    right: bool = False


def overlay(pixels: Tensor, keep: Tensor, grid: tuple[int, int], size: int = TILE) -> Image.Image:
    """The photo with its dropped patches darkened and grey, each patch a cell of `grid` (rows, columns)."""
    photo = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BICUBIC)
    cells = (keep.reshape(grid).numpy() > 0.5).astype(np.uint8) * 255
    mask = Image.fromarray(cells).resize((size, size), Image.Resampling.NEAREST)
    dimmed = Image.blend(photo.convert("L").convert("RGB"), Image.new("RGB", photo.size, INK), 0.55)
    return Image.composite(photo, dimmed, mask)


def result_sheet(rows: Sequence[tuple[str, Sequence[RankedPhoto]]], title: str) -> Image.Image:
    """One row a query: its words, then its best photos with kept patches bright and dropped ones dark."""
    columns = max(len(photos) for _, photos in rows)
    height = MARGIN + TITLE + len(rows) * (TITLE + TILE + 22 + MARGIN)
    sheet = Image.new("RGB", (MARGIN + columns * (TILE + MARGIN), height), PAPER)
    pen = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(17), ImageFont.load_default(12)
    pen.text((MARGIN, MARGIN), title, INK, font=large)
    top = MARGIN + TITLE
    for query, photos in rows:
        pen.text((MARGIN, top + 6), f"“{query}”", INK, font=large)
        for column, photo in enumerate(photos):
            left = MARGIN + column * (TILE + MARGIN)
            sheet.paste(overlay(photo.pixels, photo.keep, photo.grid), (left, top + TITLE))
            if photo.right:
                pen.rectangle(
                    (left - 2, top + TITLE - 2, left + TILE + 1, top + TITLE + TILE + 1), outline=GOOD, width=4
                )
            pen.text((left, top + TITLE + TILE + 4), photo.label, GOOD if photo.right else INK, font=small)
        top += TITLE + TILE + 22 + MARGIN
    return sheet
