"""A picture as a map of materials: shapes are painted once and then seen by every sensor.

Shapes are in figure coordinates (u to the right, v down) that a `Frame` places in the image. A material has a colour
(RGB sensor), a near-infrared reflectance and a temperature, all in [0, 1] and independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Colour = tuple[float, float, float]
MaskFunction = Callable[[Floats, Floats], Mask]
"""From figure coordinates (u, v) to a mask of where something is painted."""
RGB, NIR, TIR = 0, 1, 2
BACKGROUND, CLUTTER, FIGURE = 0, 1, 2


@dataclass(frozen=True)
class Material:
    """Colour, near-infrared reflectance, temperature (0 = ambient cold, 1 = hottest)."""

    rgb: Colour
    nir: float
    heat: float


@dataclass(frozen=True)
class Shape:
    """A region of figure coordinates: `inside` the box (u0, v0, u1, v1)."""

    box: tuple[float, float, float, float]
    inside: MaskFunction


@dataclass(frozen=True)
class Frame:
    """Where figure coordinates lie: pixel = (x, y) + scale * (u * stretch, v); stretch < 0 mirrors."""

    x: float
    y: float
    scale: float
    stretch: float = 1.0


class Canvas:
    """Material numbers (3, H, W) as the sensors RGB, NIR and TIR see them, and the materials.

    `kinds` (H, W) says what is seen at each pixel: BACKGROUND, CLUTTER or FIGURE, whichever `kind` was set to
    when it was painted last.
    """

    def __init__(self, height: int, width: int, ground: Material) -> None:
        self.height, self.width = height, width
        self.index = np.zeros((3, height, width), dtype=np.uint8)
        self.materials = [ground]
        self.kinds = np.zeros((height, width), dtype=np.uint8)
        self.kind = BACKGROUND

    def add(self, material: Material) -> int:
        """The number of a material, added when new."""
        if material not in self.materials:
            self.materials.append(material)
        return self.materials.index(material)

    def looks(self, rng: np.random.Generator, cast: Colour = (1.0, 1.0, 1.0)) -> tuple[Floats, Floats, Floats]:
        """(3, H, W) colour times `cast`, (H, W) near infrared, (H, W) heat; every shot is a little off."""
        count = len(self.materials)
        colours = np.array([m.rgb for m in self.materials]) + rng.normal(0, 0.015, (count, 3))
        nir = np.array([m.nir for m in self.materials]) + rng.normal(0, 0.02, count)
        heat = np.array([m.heat for m in self.materials]) + rng.normal(0, 0.02, count)
        tables = (table.clip(0, 1).astype(np.float32) for table in (colours.T * np.array(cast)[:, None], nir, heat))
        seen = tuple(table.take(plane, axis=-1) for table, plane in zip(tables, self.index, strict=True))
        return seen[0], seen[1], seen[2]

    def paint(
        self,
        frame: Frame,
        shape: Shape,
        material: Material,
        *,
        where: MaskFunction | None = None,
        sensor: int | None = None,
    ) -> None:
        """Paint the shape (only `where` that pattern holds) for one sensor or for all."""
        box = shape.box
        wide = frame.scale * frame.stretch
        edges = sorted((frame.x + box[0] * wide, frame.x + box[2] * wide))
        left, right = max(0, int(edges[0])), min(self.width, int(edges[1]) + 2)
        top = max(0, int(frame.y + box[1] * frame.scale))
        bottom = min(self.height, int(frame.y + box[3] * frame.scale) + 2)
        if left >= right or top >= bottom:
            return
        u = ((np.arange(left, right, dtype=np.float32) + 0.5 - frame.x) / wide)[None, :]
        v = ((np.arange(top, bottom, dtype=np.float32) + 0.5 - frame.y) / frame.scale)[:, None]
        mask = shape.inside(u, v)
        if where is not None:
            mask = mask & where(u, v)
        planes = slice(None) if sensor is None else slice(sensor, sensor + 1)
        region = self.index[planes, top:bottom, left:right]
        np.copyto(region, np.uint8(self.add(material)), where=mask)
        np.copyto(self.kinds[top:bottom, left:right], np.uint8(self.kind), where=mask)


def ellipse(centre: tuple[float, float], radii: tuple[float, float]) -> Shape:
    """An ellipse with half axes `radii`."""
    (cu, cv), (ru, rv) = centre, radii
    box = (cu - ru, cv - rv, cu + ru, cv + rv)
    return Shape(box, lambda u, v: ((u - cu) / ru) ** 2 + ((v - cv) / rv) ** 2 <= 1)


def trapezoid(upper: tuple[float, float, float], lower: tuple[float, float, float]) -> Shape:
    """Between the horizontal edges `upper` and `lower`, each (v, u from, u to)."""
    (v0, a0, b0), (v1, a1, b1) = upper, lower

    def inside(u: Floats, v: Floats) -> Mask:
        along = (v - v0) / (v1 - v0)
        left, right = a0 + (a1 - a0) * along, b0 + (b1 - b0) * along
        return (u >= left) & (u <= right) & (along >= 0) & (along <= 1)

    return Shape((min(a0, a1), v0, max(b0, b1), v1), inside)


def rectangle(box: tuple[float, float, float, float]) -> Shape:
    """The box (u0, v0, u1, v1)."""
    u0, v0, u1, v1 = box
    return trapezoid((v0, u0, u1), (v1, u0, u1))


def limb(start: tuple[float, float], end: tuple[float, float], radius: float) -> Shape:
    """A thick line with round ends."""
    (u0, v0), (u1, v1) = start, end
    length = max((u1 - u0) ** 2 + (v1 - v0) ** 2, 1e-9)

    def inside(u: Floats, v: Floats) -> Mask:
        along = np.clip(((u - u0) * (u1 - u0) + (v - v0) * (v1 - v0)) / length, 0, 1)
        return (u - u0 - along * (u1 - u0)) ** 2 + (v - v0 - along * (v1 - v0)) ** 2 <= radius**2

    box = (min(u0, u1) - radius, min(v0, v1) - radius, max(u0, u1) + radius, max(v0, v1) + radius)
    return Shape(box, inside)


def stripes(period: float, upright: bool) -> MaskFunction:
    """A mask of stripes, each half a `period` wide with gaps of the same width; vertical where `upright`."""
    return lambda u, v: (u if upright else v) % period < period / 2


def checks(period: float) -> MaskFunction:
    """A mask like a chessboard, with squares half a `period` wide."""
    return lambda u, v: (u % period < period / 2) ^ (v % period < period / 2)


def patch(centre: tuple[float, float], radii: tuple[float, float]) -> MaskFunction:
    """A mask that is one rectangle: its centre, and half its width and height."""
    (cu, cv), (ru, rv) = centre, radii
    return lambda u, v: (abs(u - cu) < ru) & (abs(v - cv) < rv)
