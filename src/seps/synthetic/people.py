"""People whose identity lies in materials and shape; some attributes are seen by one sensor only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from seps.synthetic.canvas import (
    NIR,
    RGB,
    TIR,
    Canvas,
    Frame,
    Material,
    checks,
    ellipse,
    limb,
    patch,
    rectangle,
    stripes,
    trapezoid,
)

Code = Mapping[str, int]
"""Attribute -> choice: the identity."""

COLOURS = (
    (0.75, 0.12, 0.12),
    (0.80, 0.45, 0.10),
    (0.75, 0.70, 0.20),
    (0.15, 0.50, 0.20),
    (0.12, 0.45, 0.60),
    (0.15, 0.20, 0.62),
    (0.48, 0.20, 0.55),
    (0.85, 0.85, 0.85),
    (0.45, 0.45, 0.45),
    (0.10, 0.10, 0.12),
)
REFLECTANCES = (0.12, 0.36, 0.60, 0.86)
WARMTHS = (0.28, 0.48, 0.70)

ATTRIBUTES: Mapping[str, int] = {
    # RGB: dyes. Neighbouring colours get mixed up under a camera's cast and in low light.
    "upper_colour": 10, "lower_colour": 6, "print": 4, "print_colour": 5,
    # NIR: the fabric's reflectance does not follow the dye; a trim of absorbing yarn shows there alone.
    "upper_reflectance": 4, "lower_reflectance": 4, "trim": 5,
    # TIR: insulation, bare skin, carried things (cold) and warm spots under the clothes.
    "upper_warmth": 3, "lower_warmth": 3, "warm_spot": 5,
    # Shape: every sensor, where it is not blind.
    "build": 3, "legwear": 3, "sleeves": 2, "bag": 4, "hat": 3, "hair": 3,
}  # fmt: skip


def draw_codes(count: int, rng: np.random.Generator) -> list[Code]:
    """`count` different identities, each attribute uniform over its choices."""
    seen: dict[tuple[int, ...], Code] = {}
    while len(seen) < count:
        choices = tuple(int(rng.integers(options)) for options in ATTRIBUTES.values())
        seen[choices] = dict(zip(ATTRIBUTES, choices, strict=True))
    return list(itertools.islice(seen.values(), count))


def paint_person(canvas: Canvas, frame: Frame, code: Code, view: int, rng: np.random.Generator) -> None:
    """A person of height 1 from v = 0 (crown) to v = 1 (soles), u = 0 in the middle.

    `view`: 0 front, 1 back, 2 side. The print is seen from the front, a backpack best from the back.
    """
    girth = (0.84, 1.0, 1.2)[code["build"]] * (0.72 if view == 2 else 1.0)
    skin = Material((0.78, 0.58, 0.47), 0.72, 0.92)
    hair = Material(((0.08, 0.06, 0.05), (0.35, 0.20, 0.10), (0.70, 0.58, 0.32))[code["hair"]], 0.42, 0.58)
    upper = Material(
        COLOURS[code["upper_colour"]], REFLECTANCES[code["upper_reflectance"]], WARMTHS[code["upper_warmth"]]
    )
    swing = float(rng.uniform(-0.05, 0.05))
    _legs(canvas, frame, code, girth, swing, skin)
    _trunk(canvas, frame, code, girth, view, upper)
    _arms(canvas, frame, code, girth, swing, upper, skin)
    _bag(canvas, frame, code["bag"], girth, view)
    _head(canvas, frame, code, view, skin, hair)


def _legs(canvas: Canvas, frame: Frame, code: Code, girth: float, swing: float, skin: Material) -> None:
    lower = Material(
        COLOURS[(9, 5, 8, 1, 3, 7)[code["lower_colour"]]],
        REFLECTANCES[code["lower_reflectance"]],
        WARMTHS[code["lower_warmth"]] - 0.04,
    )
    shoe = Material((0.16, 0.12, 0.10), 0.3, 0.34)
    for side in (-1, 1):
        hip, foot = (side * 0.052 * girth, 0.50), (side * (0.055 + swing) * girth, 0.94)
        knee = ((hip[0] + foot[0]) / 2, 0.70)
        canvas.paint(frame, limb(hip, foot, 0.036 * girth), lower if code["legwear"] == 0 else skin)
        if code["legwear"] == 1:
            canvas.paint(frame, limb(hip, knee, 0.05 * girth), lower)
        canvas.paint(frame, ellipse((foot[0] + 0.012, 0.972), (0.046, 0.026)), shoe)
    if code["legwear"] == 2:
        canvas.paint(frame, trapezoid((0.46, -0.09 * girth, 0.09 * girth), (0.74, -0.14 * girth, 0.14 * girth)), lower)
    canvas.paint(frame, trapezoid((0.44, -0.09 * girth, 0.09 * girth), (0.54, -0.1 * girth, 0.1 * girth)), lower)


def _trunk(canvas: Canvas, frame: Frame, code: Code, girth: float, view: int, upper: Material) -> None:
    """The upper garment: print (RGB, from the front), trim (NIR), a warm or cool spot (TIR)."""
    top, bottom = (0.155, -0.105 * girth, 0.105 * girth), (0.49, -0.088 * girth, 0.088 * girth)
    canvas.paint(frame, trapezoid(top, bottom), upper)
    trims = (
        None,
        stripes(0.09, upright=False),
        stripes(0.055, upright=True),
        patch((0.0, 0.40), (0.2, 0.035)),
        patch((0.0, 0.22), (0.2, 0.03)),
    )
    trim = trims[code["trim"]]
    if trim is not None:
        canvas.paint(frame, trapezoid(top, bottom), contrast(upper), where=trim, sensor=NIR)
    prints = (None, patch((0.0, 0.27), (0.045, 0.045)), checks(0.07), stripes(0.07, upright=True))
    shown = prints[code["print"]]
    if view == 0 and shown is not None:
        dye = Material(COLOURS[(7, 2, 4, 0, 9)[code["print_colour"]]], upper.nir, upper.heat)
        canvas.paint(
            frame,
            trapezoid((0.18, -0.08 * girth, 0.08 * girth), (0.38, -0.07 * girth, 0.07 * girth)),
            dye,
            where=shown,
            sensor=RGB,
        )
    spot = (None, (-0.05, 0.24), (0.05, 0.24), (-0.05, 0.42), (0.05, 0.42))[code["warm_spot"]]
    if spot is not None:
        warm = Material(upper.rgb, upper.nir, 0.08 if upper.heat > 0.6 else 0.95)
        canvas.paint(frame, ellipse((spot[0] * girth, spot[1]), (0.034, 0.036)), warm, sensor=TIR)


def contrast(material: Material) -> Material:
    """The same material with a reflectance that stands out from it in near infrared."""
    return Material(material.rgb, 0.04 if material.nir > 0.3 else 0.75, material.heat)


def _arms(
    canvas: Canvas, frame: Frame, code: Code, girth: float, swing: float, upper: Material, skin: Material
) -> None:
    for side in (-1, 1):
        shoulder, hand = (side * 0.108 * girth, 0.19), (side * (0.135 * girth + abs(swing)), 0.50)
        elbow = ((shoulder[0] + hand[0]) / 2 + side * 0.01, 0.33)
        bare = code["sleeves"] == 1
        canvas.paint(frame, limb(elbow, hand, 0.022 * girth), skin if bare else upper)
        canvas.paint(frame, limb(shoulder, elbow, 0.028 * girth), upper)
        canvas.paint(frame, ellipse(hand, (0.022, 0.024)), skin)


def _bag(canvas: Canvas, frame: Frame, bag: int, girth: float, view: int) -> None:
    """Cold things: backpack, satchel with strap, hand bag."""
    cloth = Material((0.28, 0.24, 0.20), 0.55, 0.12)
    if bag == 1 and view == 1:
        canvas.paint(frame, ellipse((0.0, 0.29), (0.085 * girth, 0.115)), cloth)
    elif bag == 1 and view == 2:
        canvas.paint(frame, ellipse((-0.11 * girth, 0.29), (0.05, 0.11)), cloth)
    elif bag == 1:
        for side in (-1, 1):
            canvas.paint(frame, limb((side * 0.065 * girth, 0.16), (side * 0.08 * girth, 0.38), 0.012), cloth)
    elif bag == 2:
        canvas.paint(frame, limb((-0.07 * girth, 0.16), (0.09 * girth, 0.44), 0.011), cloth)
        canvas.paint(frame, rectangle((0.05 * girth, 0.42, 0.16 * girth, 0.55)), cloth)
    elif bag == 3:
        canvas.paint(frame, rectangle((-0.20 * girth, 0.53, -0.09 * girth, 0.68)), cloth)
        canvas.paint(frame, limb((-0.145 * girth, 0.50), (-0.145 * girth, 0.54), 0.014), cloth)


def _head(canvas: Canvas, frame: Frame, code: Code, view: int, skin: Material, hair: Material) -> None:
    canvas.paint(frame, limb((0.0, 0.12), (0.0, 0.165), 0.028), skin)
    canvas.paint(frame, ellipse((0.0, 0.078), (0.05, 0.068)), hair if view == 1 else skin)
    if code["hair"] == 2 and view != 0:
        canvas.paint(frame, ellipse((0.0, 0.12), (0.05, 0.07)), hair)
    canvas.paint(frame, ellipse((0.0, 0.045), (0.054, 0.042)), hair)
    if code["hat"]:
        felt = Material(((0.2, 0.22, 0.3), (0.55, 0.18, 0.15))[code["hat"] - 1], 0.2, 0.2)
        canvas.paint(frame, ellipse((0.0, 0.035), (0.058, 0.045)), felt)
        if code["hat"] == 2:
            canvas.paint(frame, rectangle((-0.09, 0.048, 0.09, 0.068)), felt)
