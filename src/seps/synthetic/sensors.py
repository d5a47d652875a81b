"""Cameras, backgrounds, clutter, and how each sensor sees and fails: light, noise, and local blindness."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from seps.synthetic.canvas import Canvas, Floats, Frame, Material, checks, ellipse, rectangle, stripes
from seps.synthetic.people import COLOURS, REFLECTANCES

Bytes = NDArray[np.uint8]
CELLS = 6
"""Nodes of smooth noise along either side of the image."""


@dataclass(frozen=True)
class Camera:
    """What is fixed for a camera: surroundings, colour cast, place and size of figures, how they turn."""

    wall: Material
    ground: Material
    accent: Material
    horizon: float
    cast: tuple[float, float, float]
    scale: float
    shift: float
    views: tuple[float, float, float]
    gain: tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """Light of the day (1) or night (0.2) and how warm the surroundings are."""

    light: float
    ambient: float


def draw_camera(rng: np.random.Generator) -> Camera:
    """A camera at random."""
    grey = rng.uniform(0.3, 0.7)

    def surface(spread: float) -> Material:
        tint = np.clip(grey + rng.uniform(-spread, spread, 3), 0.1, 0.9)
        rgb = (float(tint[0]), float(tint[1]), float(tint[2]))
        return Material(rgb, float(rng.uniform(0.2, 0.7)), float(rng.uniform(0.08, 0.24)))

    cast = np.exp(rng.normal(0, 0.13, 3))
    favourite = rng.dirichlet((1.2, 1.2, 1.2))
    return Camera(
        wall=surface(0.15),
        ground=surface(0.12),
        accent=surface(0.3),
        horizon=float(rng.uniform(0.5, 0.85)),
        cast=(float(cast[0]), float(cast[1]), float(cast[2])),
        scale=float(rng.uniform(0.72, 0.92)),
        shift=float(rng.uniform(-0.06, 0.06)),
        views=(float(favourite[0]), float(favourite[1]), float(favourite[2])),
        gain=(float(rng.uniform(0.75, 1.2)), float(rng.uniform(0.85, 1.15))),
    )


def draw_scene(rng: np.random.Generator, night: bool) -> Scene:
    """Day with warm surroundings, or night with cold ones."""
    if night:
        return Scene(float(rng.uniform(0.2, 0.36)), float(rng.uniform(0.0, 0.08)))
    return Scene(float(rng.uniform(0.75, 1.05)), float(rng.uniform(0.05, 0.18)))


def paint_background(canvas: Canvas, camera: Camera, rng: np.random.Generator) -> None:
    """Wall, ground, and a few posts or panels of the camera's accent material, moving a little."""
    whole = Frame(0.0, 0.0, float(canvas.height), canvas.width / canvas.height)
    line = camera.horizon + float(rng.normal(0, 0.015))
    canvas.paint(whole, rectangle((0.0, line, 1.0, 1.0)), camera.ground)
    offset = float(rng.uniform(0, 1))
    for number in range(3):
        at = (offset + number * 0.37) % 1.0
        canvas.paint(whole, rectangle((at, 0.0, at + 0.05, line)), camera.accent)


def paint_clutter(canvas: Canvas, rng: np.random.Generator, count: int, largest: float = 0.2) -> None:
    """Things unrelated to the identity, in the colours, reflectances and heats that tell identities."""
    patterns = (None, stripes(0.08, upright=True), stripes(0.1, upright=False), checks(0.09))
    whole = Frame(0.0, 0.0, float(canvas.height), canvas.width / canvas.height)
    for _ in range(count):
        material, other = _any_material(rng), _any_material(rng)
        u, v = rng.uniform(-0.05, 1.0), rng.uniform(0.0, 1.0)
        wide, tall = rng.uniform(0.1, 1.6 * largest), rng.uniform(0.05, largest)
        box = (float(u), float(v), float(u + wide), float(v + tall))
        pattern = patterns[int(rng.integers(len(patterns)))]
        if rng.random() < 0.5:
            canvas.paint(whole, rectangle(box), material)
            if pattern is not None:
                canvas.paint(whole, rectangle(box), other, where=pattern, sensor=int(rng.integers(3)))
        else:
            centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            canvas.paint(whole, ellipse(centre, (float(wide) / 2, float(tall) / 2)), material)


def _any_material(rng: np.random.Generator) -> Material:
    heat = float(rng.choice((0.1, 0.2, 0.5, 0.66, 0.95)))
    return Material(COLOURS[int(rng.integers(len(COLOURS)))], float(rng.choice(REFLECTANCES)), heat)


def render(
    canvas: Canvas, camera: Camera, scene: Scene, blindness: float, rng: np.random.Generator
) -> tuple[tuple[Bytes, Bytes, Bytes], Floats]:
    """(H, W, 3) RGB, (H, W) near infrared, (H, W) thermal bytes of one shot; (3, H, W) how blind each was.

    Each sensor is blind in some regions with probability `blindness`, on its own: RGB in deep shadow or in
    glare, near infrared outside its lamp's beam or in a reflection, thermal where the surroundings are as
    warm as the figure or its detector is noisy.
    """
    colour, infrared, heat = canvas.looks(rng, camera.cast)
    size = canvas.height, canvas.width
    blind = []
    dark, dazzled = _blind(size, blindness, rng)
    blind.append(dark + dazzled)
    colour *= (1 + 0.15 * smooth_noise(size, rng)) * (scene.light * (1 - 0.96 * dark))
    colour = soften(colour)
    colour += dazzled * np.array((1.1, 1.05, 0.9), dtype=np.float32)[:, None, None]
    colour += _noise(colour.shape, 0.02 + 0.02 * (scene.light < 0.5), rng)

    dark, dazzled = _blind(size, blindness, rng)
    blind.append(dark + dazzled)
    infrared *= (0.95 + 0.15 * smooth_noise(size, rng)) * (camera.gain[0] * (1 - 0.96 * dark))
    infrared = soften(infrared)
    infrared += 1.1 * dazzled + _noise(size, 0.03, rng)

    washed, noisy = _blind(size, blindness, rng)
    blind.append(washed + noisy)
    heat = soften(soften(heat))
    heat += (1 - heat) * np.float32(scene.ambient)
    heat += washed * (0.72 + 0.1 * smooth_noise(size, rng) - heat)
    heat = camera.gain[1] * heat + 0.05 * smooth_noise(size, rng) + _noise((1, size[1]), 0.012, rng)
    heat += _noise(size, 0.02, rng) * (1 + 9 * noisy) + noisy * _noise((size[0], 1), 0.3, rng)
    seen = np.ascontiguousarray(_bytes(colour).transpose(1, 2, 0)), _bytes(infrared), _bytes(heat)
    return seen, np.stack(blind)


def _blind(size: tuple[int, int], blindness: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Two maps (H, W) of blind regions, one for either way a sensor fails; at most one is not zero."""
    regions, nothing = _regions(size, blindness, rng), np.zeros(size, dtype=np.float32)
    return (regions, nothing) if rng.random() < 0.6 else (nothing, regions)


def _regions(size: tuple[int, int], probability: float, rng: np.random.Generator) -> Floats:
    """(H, W) in [0, 1]: with `probability` one or two soft blobs or bands from a border, else zero."""
    mask = np.zeros(size, dtype=np.float32)
    if rng.random() >= probability:
        return mask
    y = (np.arange(size[0], dtype=np.float32) / size[0])[:, None]
    x = (np.arange(size[1], dtype=np.float32) / size[1])[None, :]
    for _ in range(int(rng.integers(1, 3))):
        if rng.random() < 0.4:
            depth = rng.uniform(0.2, 0.45)
            distance = ((y, 1 - y, x, 1 - x)[int(rng.integers(4))] / np.float32(depth)) + np.zeros_like(mask)
        else:
            centre, radii = rng.uniform(0.15, 0.85, 2), rng.uniform((0.1, 0.2), (0.24, 0.42))
            distance = np.sqrt(
                ((y - np.float32(centre[0])) / np.float32(radii[0])) ** 2
                + ((x - np.float32(centre[1])) / np.float32(radii[1])) ** 2
            )
        ragged = distance + np.float32(0.22) * smooth_noise(size, rng)
        mask = np.maximum(mask, np.clip((1.3 - ragged) / 0.6, 0, 1))
    return mask


def smooth_noise(size: tuple[int, int], rng: np.random.Generator) -> Floats:
    """(H, W) noise of about unit spread, smooth over a sixth of the image."""
    coarse = rng.standard_normal((CELLS, CELLS), dtype=np.float32)
    noise: Floats = _interpolation(size[0]) @ coarse @ _interpolation(size[1]).T
    return noise


@cache
def _interpolation(length: int) -> Floats:
    """(length, CELLS) weights of linear interpolation."""
    at = np.linspace(0, CELLS - 1, length, dtype=np.float32)[:, None]
    return np.clip(1 - abs(at - np.arange(CELLS, dtype=np.float32)), 0, 1).astype(np.float32)


def soften(image: Floats) -> Floats:
    """A 1-2-1 blur over the last two axes, borders kept."""
    result = image.copy()
    result[..., 1:-1, :] += 0.25 * (image[..., :-2, :] + image[..., 2:, :] - 2 * image[..., 1:-1, :])
    across: Floats = result.copy()
    across[..., 1:-1] += 0.25 * (result[..., :-2] + result[..., 2:] - 2 * result[..., 1:-1])
    return across


def _noise(shape: tuple[int, ...], spread: float, rng: np.random.Generator) -> Floats:
    """Uniform noise (a third of the time of normal noise) of the given standard deviation."""
    noise = rng.random(shape, dtype=np.float32)
    noise -= 0.5
    noise *= np.float32(spread * 12**0.5)
    return noise


def _bytes(image: Floats) -> Bytes:
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
