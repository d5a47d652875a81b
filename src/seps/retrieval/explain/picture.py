"""An explanation as one picture, drawn with Pillow."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from seps.retrieval.explain.explanation import Explanation, WordPart

PANEL, MARGIN, LABEL = 240, 16, 44
_INK, _PAPER, _GREY = (28, 28, 30), (255, 255, 255), (110, 110, 115)
Cells = np.ndarray[Any, np.dtype[np.float64]]
_WARM, _COLD = (214, 60, 20), (30, 90, 200)


@dataclass(frozen=True)
class Panel:
    """One picture with its label."""

    title: str
    note: str
    image: Image.Image


def draw(explanation: Explanation, photo: Image.Image, *, columns: int = 5) -> Image.Image:
    """One sheet: the kept patches, the merged groups, what every patch adds, a heat map per word, one of the others."""
    panels = make_panels(explanation, photo)
    height = panels[0].image.height
    rows = -(-len(panels) // columns)
    columns = min(columns, len(panels))
    head, foot = 62, 60
    width = columns * (PANEL + MARGIN) + MARGIN
    sheet = Image.new("RGB", (width, head + rows * (height + LABEL + MARGIN) + foot), _PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, 12), _fit(f'"{explanation.caption}"', width - 2 * MARGIN, 20), _INK, font=_font(20))
    pen.text((MARGIN, 38), f"score {explanation.score:.3f}", _GREY, font=_font(15))
    for number, panel in enumerate(panels):
        left = MARGIN + number % columns * (PANEL + MARGIN)
        top = head + number // columns * (height + LABEL + MARGIN)
        sheet.paste(panel.image, (left, top))
        pen.text((left, top + height + 3), _fit(panel.title, PANEL, 16), _INK, font=_font(16))
        pen.text((left, top + height + 23), _fit(panel.note, PANEL, 13), _GREY, font=_font(13))
    pen.text(
        (MARGIN, sheet.height - foot + 4), _fit(_summary(explanation), width - 2 * MARGIN, 14), _INK, font=_font(14)
    )
    best = sorted((part for part in explanation.description if not part.stop), key=lambda part: -part.contribution)
    if best:
        named = ", ".join(f"{part.word} {part.contribution:+.3f}" for part in best[:8])
        text = _fit(f"description words that add most: {named}", width - 2 * MARGIN, 14)
        pen.text((MARGIN, sheet.height - foot + 26), text, _GREY, font=_font(14))
    return sheet


def make_panels(explanation: Explanation, photo: Image.Image) -> list[Panel]:
    """The pictures of an explanation, all of one size."""
    photo = photo.convert("RGB").resize((PANEL, max(60, round(PANEL * photo.height / photo.width))))
    kept = sum(explanation.kept)
    top = sum(part.contribution for part in explanation.words)
    heat = _heat(photo, explanation.patches, explanation)
    whole = Panel("all words", f"patches {sum(explanation.patches):+.3f}", heat)
    chosen = "seen" if explanation.whole_sentence else "kept" if explanation.groups else "chosen"
    panels = [Panel(f"{chosen} patches", f"{kept} of {len(explanation.kept)}", _keep_overlay(explanation, photo))]
    if explanation.whole_sentence:
        return [*panels, replace(whole, title="whole sentence")]
    if explanation.groups:
        panels.append(Panel("merged groups", f"{len(explanation.groups)} groups", _group_overlay(explanation, photo)))
    panels.append(whole)

    def panel(title: str, parts: Sequence[WordPart]) -> Panel:
        adds = sum(part.contribution for part in parts)
        share = f"{adds:+.3f}" + (f" ({100 * adds / top:.0f} %)" if top > 0 else "")
        return Panel(title, share, _heat(photo, np.sum([part.heat for part in parts], axis=0).tolist(), explanation))

    named, others = explanation.shown_words
    panels += [panel(part.word, [part]) for part in named]
    return panels + ([panel(", ".join(part.word for part in others), others)] if others else [])


def _summary(explanation: Explanation) -> str:
    names = {
        "patch_alignment": "patches, word by word",
        "patch_pooled": "patches, mean",
        "description_alignment": "description, word by word",
        "description_pooled": "description, mean",
        "pixels": "pixels",
        "description": "description",
        "lexical": "rare words found in it",
        "background": "for any sentence",
    }
    parts = [f"{names.get(name, name)} {value:+.3f}" for name, value in explanation.terms.items()]
    return "   ".join(parts) + f"   = {explanation.score:.3f}"


def _grid(values: Sequence[float] | Sequence[bool], explanation: Explanation) -> Cells:
    return np.asarray(values, np.float64).reshape(explanation.grid)


def _stretch(cells: Cells, size: tuple[int, int], smooth: bool) -> Image.Image:
    picture = Image.fromarray((cells.clip(0, 1) * 255).astype(np.uint8))
    return picture.resize(size, Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST)


def _keep_overlay(explanation: Explanation, photo: Image.Image) -> Image.Image:
    dim = Image.blend(photo.convert("L").convert("RGB"), Image.new("RGB", photo.size, _PAPER), 0.65)
    shown = Image.composite(photo, dim, _stretch(_grid(explanation.kept, explanation), photo.size, smooth=False))
    _lines(shown, explanation)
    return shown


def _group_overlay(explanation: Explanation, photo: Image.Image) -> Image.Image:
    weights = np.asarray(explanation.groups)
    owner, strength = weights.argmax(axis=0), weights.max(axis=0)
    strength = np.sqrt(strength / max(strength.max(), 1e-12))
    hues = [colorsys.hsv_to_rgb(i / len(weights), 0.85, 0.95) for i in range(len(weights))]
    colour = (np.asarray(hues)[owner] * 255).astype(np.uint8).reshape(*explanation.grid, 3)
    paint = Image.fromarray(colour).resize(photo.size, Image.Resampling.NEAREST)
    shown = Image.composite(paint, photo, _stretch(0.75 * _grid(list(strength), explanation), photo.size, smooth=False))
    _lines(shown, explanation)
    return shown


def _heat(photo: Image.Image, values: Sequence[float], explanation: Explanation) -> Image.Image:
    """Warm where a patch adds to the score, cold where it takes away, each map on its own scale."""
    cells = _grid(values, explanation)
    largest = max(float(np.abs(cells).max()), 1e-12)
    grey = Image.blend(photo.convert("L").convert("RGB"), Image.new("RGB", photo.size, _PAPER), 0.35)
    warm = Image.composite(
        Image.new("RGB", photo.size, _WARM), grey, _stretch(0.85 * cells / largest, photo.size, True)
    )
    return Image.composite(
        Image.new("RGB", photo.size, _COLD), warm, _stretch(-0.85 * cells / largest, photo.size, True)
    )


def _lines(picture: Image.Image, explanation: Explanation) -> None:
    pen = ImageDraw.Draw(picture)
    rows, columns = explanation.grid
    for row in range(1, rows):
        pen.line([(0, row * picture.height // rows), (picture.width, row * picture.height // rows)], (255, 255, 255), 1)
    for column in range(1, columns):
        place = column * picture.width // columns
        pen.line([(place, 0), (place, picture.height)], (255, 255, 255), 1)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fit(text: str, width: int, size: int) -> str:
    """The text, cut so that it is at most `width` pixels wide."""
    font = _font(size)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
