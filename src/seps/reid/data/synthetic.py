"""A synthetic RGB / NIR / TIR re-identification set, drawn by one function.

What is drawn. An identity is a code of independent attributes (`PEOPLE_ATTRIBUTES`, `VEHICLE_ATTRIBUTES`).
Some are seen by one sensor alone: dyes and prints by RGB; the fabric's or paint's reflectance and a trim of
absorbing yarn by NIR, where clothes of different colour look alike; insulation, warm spots, engine, brakes,
cabin and cargo by TIR, where carried things are cold. Others (build, legwear, bag, hat, body shape, rack)
are seen by all. No sensor alone tells all identities apart.

A camera fixes background, colour cast, gains, size and place of the figure and how often it is seen from
the front, back or side (vehicles: which flank). A scene fixes light (every second one is night) and ambient
warmth. Every shot adds pose, shading, noise, clutter behind and occluders before the figure in the same
colours, reflectances and heats that tell identities, at times a passer-by at the border who is nobody in
the set, and regions in which one sensor is blind (deep shadow, glare; no lamp, reflection; surroundings as
warm as the figure, detector noise) while the others see: what to trust differs from patch to patch.

What is written. `{train,query,gallery}/{RGB,NI,TI}/PPPP_cC_sS_NNN.jpg` (the generic layout) and
`manifest.json` with version, parameters and a digest of all files. The identities of train and test are
disjoint; every query identity has gallery shots from another camera. Files are the same byte for byte for
the same parameters (and releases of numpy and Pillow), whatever the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from seps.reid.data.records import ReidDataError
from seps.reid.data.synthetic_canvas import CLUTTER, FIGURE, Canvas, Floats, Frame
from seps.reid.data.synthetic_figures import Code, Kind, draw_codes, paint_person, paint_vehicle
from seps.reid.data.synthetic_sensors import (
    Bytes,
    Camera,
    Scene,
    draw_camera,
    draw_scene,
    paint_background,
    paint_clutter,
    render,
)

VERSION = 1
MODALITIES = ("RGB", "NI", "TI")
_CODES, _CAMERAS, _SCENES, _PLAN, _SHOTS, _STRANGERS = range(6)


@dataclass(frozen=True)
class SyntheticConfig:
    """Parameters of a set; see `make_synthetic`."""

    identities: int
    images_per_identity: int
    cameras: int
    seed: int
    kind: Kind
    size: tuple[int, int]
    test_fraction: float
    scenes: int
    blindness: float
    clutter: float
    quality: int

    def __post_init__(self) -> None:
        for name, least in (("identities", 4), ("images_per_identity", 3), ("cameras", 2), ("scenes", 1)):
            if getattr(self, name) < least:
                raise ReidDataError(f"{name} must be >= {least}, not {getattr(self, name)}")
        if self.kind not in ("people", "vehicles"):
            raise ReidDataError(f"kind must be 'people' or 'vehicles', not {self.kind!r}")
        if min(self.size) < 16:
            raise ReidDataError(f"size must be at least 16 x 16 pixels, not {self.size}")
        if self.seed < 0 or not 0 <= self.blindness <= 1 or self.clutter < 0:
            raise ReidDataError(
                "seed must be >= 0, blindness in [0, 1] and clutter >= 0, not "
                f"{self.seed}, {self.blindness}, {self.clutter}"
            )
        if not 0 < self.test_fraction < 1 or not 2 <= self.test_identities <= self.identities - 2:
            raise ReidDataError(
                f"test_fraction {self.test_fraction} of {self.identities} identities must leave two a side"
            )

    @property
    def test_identities(self) -> int:
        """How many identities make query and gallery."""
        return round(self.test_fraction * self.identities)


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


def make_synthetic(
    out_dir: str | Path,
    identities: int = 150,
    images_per_identity: int = 16,
    cameras: int = 4,
    seed: int = 0,
    kind: Kind = "people",
    size: tuple[int, int] = (256, 128),
    *,
    test_fraction: float = 0.4,
    scenes: int = 4,
    blindness: float = 0.5,
    clutter: float = 3.0,
    quality: int = 90,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Draw a set into `out_dir` and return its manifest; a finished set with the same parameters is kept.

    `identities` counts train and test together. `size` is (H, W); vehicles look best twice as wide as high.
    `blindness`: probability that a sensor is blind in part of a shot. `clutter`: mean number of unrelated
    things. `progress(done, all)` is called after every shot. With `workers` > 1 the caller's main module
    must be importable (`if __name__ == "__main__"`). The set is drawn beside `out_dir` and moved there when
    complete. Raises ReidDataError for parameters out of range and for a folder that holds anything else.
    """
    config = SyntheticConfig(
        identities, images_per_identity, cameras, seed, kind, (size[0], size[1]), test_fraction, scenes,
        blindness, clutter, quality,
    )  # fmt: skip
    out = Path(out_dir).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _existing(out, config)
    shots = plan_shots(config)
    partial = _begin(out)
    digest = hashlib.sha256()
    for done, (name, part) in enumerate(_write_all(config, shots, partial, workers), 1):
        digest.update(f"{name} {part}\n".encode())
        if progress is not None:
            progress(done, len(shots))
    manifest = {
        "format": "seps-synthetic-reid",
        "version": VERSION,
        "parameters": _plain(config),
        "modalities": list(MODALITIES),
        "shots": {s: sum(shot.split == s for shot in shots) for s in ("train", "query", "gallery")},
        "sha256": digest.hexdigest(),
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    (partial / _MARK).unlink()
    if out.exists():
        out.rmdir()
    os.replace(partial, out)
    return manifest


# Says that a folder is an unfinished set of ours, which may be removed.
_MARK = ".seps-unfinished"


def _begin(out: Path) -> Path:
    """The folder beside `out` to draw in, empty but for its folders; one that a stopped call left is replaced.

    Raises ReidDataError when it cannot be made, or when something else has that name.
    """
    partial = out.with_name(out.name + ".partial")
    try:
        if partial.exists():
            if not (partial / _MARK).is_file():
                raise ReidDataError(f"{partial} is in the way and was not made by this command: move it elsewhere")
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        (partial / _MARK).touch()
        for split in ("train", "query", "gallery"):
            for modality in MODALITIES:
                (partial / split / modality).mkdir(parents=True)
    except OSError as error:
        raise ReidDataError(
            f"no set can be drawn in {out}: {error.strerror or error}; choose another folder"
        ) from error
    return partial


def _plain(config: SyntheticConfig) -> dict[str, Any]:
    return {**asdict(config), "size": list(config.size)}


def _existing(out: Path, config: SyntheticConfig) -> dict[str, Any]:
    """The manifest of the finished set in `out` if it is the one asked for."""
    path = out / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReidDataError(f"{out} is not empty and holds no synthetic set; choose another folder") from error
    if manifest.get("version") != VERSION or manifest.get("parameters") != _plain(config):
        raise ReidDataError(f"{out} holds a synthetic set with other parameters; choose another folder")
    return manifest


def plan_shots(config: SyntheticConfig) -> list[Shot]:
    """Every shot: cameras in turn, scenes at random; first shots of test identities are queries."""
    train = config.identities - config.test_identities
    queries = min(config.cameras - 1, max(1, config.images_per_identity // 4))
    shots = []
    for identity in range(config.identities):
        rng = _rng(config, _PLAN, identity)
        for number in range(config.images_per_identity):
            camera = (identity + number) % config.cameras
            split = "train" if identity < train else ("query" if number < queries else "gallery")
            shots.append(Shot(split, identity, camera, int(rng.integers(config.scenes)), number))
    return shots


def _write_all(config: SyntheticConfig, shots: list[Shot], root: Path, workers: int) -> Iterator[tuple[str, str]]:
    """(name, digest) of every shot in the order of `shots`."""
    chunks = [shots[start : start + 64] for start in range(0, len(shots), 64)]
    if workers <= 1 or len(chunks) == 1:
        for chunk in chunks:
            yield from write_shots(config, chunk, root)
        return
    # Spawned, not forked: the caller may hold threads (torch, readers) that a fork would copy in mid-flight.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(chunks)), mp_context=context) as pool:
        tasks = [pool.submit(write_shots, config, chunk, root) for chunk in chunks]
        for task in tasks:
            yield from task.result()


def write_shots(config: SyntheticConfig, shots: list[Shot], root: Path) -> list[tuple[str, str]]:
    """Draw and write some shots; (name, digest of the three files) of each."""
    world = World(config)
    written = []
    for shot in shots:
        digest = hashlib.sha256()
        for modality, pixels in zip(MODALITIES, world.look(shot).images, strict=True):
            buffer = BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=config.quality)
            (root / shot.split / modality / f"{shot.name}.jpg").write_bytes(buffer.getvalue())
            digest.update(buffer.getvalue())
        written.append((f"{shot.split}/{shot.name}", digest.hexdigest()))
    return written


def _rng(config: SyntheticConfig, *stream: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, *stream])


class World:
    """The identities, cameras and scenes of a set; draws single shots, each from its own stream of chance."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.codes: list[Code] = draw_codes(config.kind, config.identities, _rng(config, _CODES))
        self.strangers: list[Code] = draw_codes(config.kind, 64, _rng(config, _STRANGERS))
        self.cameras: list[Camera] = [draw_camera(_rng(config, _CAMERAS, c)) for c in range(config.cameras)]
        self.scenes: list[Scene] = [
            draw_scene(_rng(config, _SCENES, s), night=s % 2 == 1) for s in range(config.scenes)
        ]

    def look(self, shot: Shot) -> Look:
        """Draw one shot."""
        rng = _rng(self.config, _SHOTS, shot.identity, shot.number)
        camera = self.cameras[shot.camera]
        height, width = self.config.size
        canvas = Canvas(height, width, camera.wall)
        paint_background(canvas, camera, rng)
        canvas.kind = CLUTTER
        paint_clutter(canvas, rng, int(rng.poisson(self.config.clutter)))
        code = self.codes[shot.identity]
        if self.config.kind == "people":
            self._people(canvas, camera, code, rng)
        else:
            self._vehicle(canvas, camera, code, rng)
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

    def _vehicle(self, canvas: Canvas, camera: Camera, code: Code, rng: np.random.Generator) -> None:
        height, width = float(canvas.height), float(canvas.width)
        view = int(rng.random() < camera.views[0])
        squeeze = float(rng.uniform(0.75, 1.0))
        scale = min(width / (1.12 * squeeze), height / 0.62) * camera.scale * float(rng.uniform(0.9, 1.05))
        facing = (1.0 if view == 0 else -1.0) * squeeze
        middle = width * (0.5 + camera.shift + float(rng.uniform(-0.04, 0.04)))
        y = height * float(rng.uniform(0.82, 0.95))
        canvas.kind = FIGURE
        paint_vehicle(canvas, Frame(middle - 0.5 * scale * facing, y, scale, facing), code, view)
