"""The parameters of a synthetic set, the plan of its shots, and the world they are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seps.synthetic.canvas import CLUTTER, FIGURE, Canvas, Floats, Frame
from seps.synthetic.people import Code, draw_codes, paint_person
from seps.synthetic.sensors import (
    Bytes,
    Camera,
    Scene,
    draw_camera,
    draw_scene,
    paint_background,
    paint_clutter,
    render,
)

_CODES, _CAMERAS, _SCENES, _PLAN, _SHOTS, _STRANGERS = range(6)


@dataclass(frozen=True)
class SyntheticConfig:
    """Parameters of a set; see `make_synthetic`."""

    identities: int
    images_per_identity: int
    cameras: int
    seed: int
    size: tuple[int, int]
    test_fraction: float
    scenes: int
    blindness: float
    clutter: float
    quality: int

    def __post_init__(self) -> None:
        for name, least in (("identities", 4), ("images_per_identity", 3), ("cameras", 2), ("scenes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, not {getattr(self, name)}")
        if min(self.size) < 16:
            raise ValueError(f"size must be at least 16 x 16 pixels, not {self.size}")
        if self.seed < 0 or not 0 <= self.blindness <= 1 or self.clutter < 0:
            raise ValueError(
                "seed must be >= 0, blindness in [0, 1] and clutter >= 0, not "
                f"{self.seed}, {self.blindness}, {self.clutter}"
            )
        if not 0 < self.test_fraction < 1 or not 2 <= self.test_identities <= self.identities - 2:
            raise ValueError(
                f"test_fraction {self.test_fraction} of {self.identities} identities must leave two or more to train "
                "with and two or more to test"
            )

    @property
    def test_identities(self) -> int:
        """How many identities make query and gallery."""
        return round(self.test_fraction * self.identities)

    def generator(self, *stream: int) -> np.random.Generator:
        """Random numbers of one stream of this set."""
        return np.random.default_rng([self.seed, *stream])


@dataclass(frozen=True)
class Look:
    """One drawn shot: (H, W, 3) RGB, (H, W) near infrared, (H, W) thermal bytes, and what is known about them.

    kinds (H, W): BACKGROUND, CLUTTER (passers-by too) or FIGURE. blind (3, H, W) in [0, 1]: how blind each sensor is.
    """

    images: tuple[Bytes, Bytes, Bytes]
    kinds: Bytes
    blind: Floats


@dataclass(frozen=True)
class Shot:
    """One triplet to draw: numbers from 0, `name` from 1."""

    split: str
    identity: int
    camera: int
    scene: int
    number: int

    @property
    def name(self) -> str:
        """PPPP_cC_sS_NNN."""
        return f"{self.identity + 1:04d}_c{self.camera + 1}_s{self.scene + 1}_{self.number + 1:03d}"


def plan_shots(config: SyntheticConfig) -> list[Shot]:
    """Every shot: cameras in turn, scenes at random; first shots of test identities are queries."""
    train = config.identities - config.test_identities
    queries = min(config.cameras - 1, max(1, config.images_per_identity // 4))
    shots = []
    for identity in range(config.identities):
        rng = config.generator(_PLAN, identity)
        for number in range(config.images_per_identity):
            camera = (identity + number) % config.cameras
            split = "train" if identity < train else ("query" if number < queries else "gallery")
            shots.append(Shot(split, identity, camera, int(rng.integers(config.scenes)), number))
    return shots


class World:
    """The identities, cameras and scenes of a set; draws single shots, each from random numbers of its own."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.codes: list[Code] = draw_codes(config.identities, config.generator(_CODES))
        self.strangers: list[Code] = draw_codes(64, config.generator(_STRANGERS))
        self.cameras: list[Camera] = [draw_camera(config.generator(_CAMERAS, c)) for c in range(config.cameras)]
        self.scenes: list[Scene] = [
            draw_scene(config.generator(_SCENES, s), night=s % 2 == 1) for s in range(config.scenes)
        ]

    def look(self, shot: Shot) -> Look:
        """Draw one shot."""
        rng = self.config.generator(_SHOTS, shot.identity, shot.number)
        camera = self.cameras[shot.camera]
        height, width = self.config.size
        canvas = Canvas(height, width, camera.wall)
        paint_background(canvas, camera, rng)
        canvas.kind = CLUTTER
        paint_clutter(canvas, rng, int(rng.poisson(self.config.clutter)))
        code = self.codes[shot.identity]
        self._people(canvas, camera, code, rng)
        canvas.kind = CLUTTER
        paint_clutter(canvas, rng, int(rng.poisson(0.3 * self.config.clutter)), largest=0.14)
        images, blind = render(canvas, camera, self.scenes[shot.scene], self.config.blindness, rng)
        return Look(images, canvas.kinds, blind)

    def _people(self, canvas: Canvas, camera: Camera, code: Code, rng: np.random.Generator) -> None:
        """A stranger at the border in some shots, then the person."""
        height, width = float(canvas.height), float(canvas.width)
        # Figures are as wide as 0.45 of their height: narrow pictures shrink them.
        tall = min(height, width / 0.47) * camera.scale * float(rng.uniform(0.9, 1.08))
        if self.config.clutter and rng.random() < 0.3:
            other = self.strangers[int(rng.integers(len(self.strangers)))]
            at = float(rng.choice((-0.02, 1.02))) * width
            frame = Frame(at, (height - tall) * float(rng.uniform(0.2, 1.0)), tall)
            paint_person(canvas, frame, other, int(rng.integers(3)), rng)
        x = width * (0.5 + camera.shift + float(rng.uniform(-0.06, 0.06)))
        y = (height - tall) * float(rng.uniform(0.3, 0.9))
        mirror = 1.0 if rng.random() < 0.5 else -1.0
        view = int(rng.choice(3, p=np.array(camera.views) / sum(camera.views)))
        canvas.kind = FIGURE
        paint_person(canvas, Frame(x, y, tall, mirror if view == 2 else 1.0), code, view, rng)
