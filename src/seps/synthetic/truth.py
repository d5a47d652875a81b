"""What lies where in a synthetic set, drawn again from its parameters: nothing of it is stored with the pictures.

Shapes: S shots, M = 3 sensors, (H, W) pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from seps.files import load_json
from seps.synthetic.files import VERSION, in_chunks
from seps.synthetic.sensors import Bytes
from seps.synthetic.world import Shot, SyntheticConfig, World, plan_shots

KINDS = ("background", "clutter", "figure", "blind")
"""Names of the values of `truth`: the first three in numbers of the canvas, then what a sensor cannot see."""
BLIND = len(KINDS) - 1


def read_parameters(root: str | Path) -> SyntheticConfig:
    """The parameters of the synthetic set in `root`. Raises ValueError where there is none of this version."""
    path = Path(root) / "manifest.json"
    try:
        manifest = load_json(path)
        values = {**manifest["parameters"], "size": tuple(manifest["parameters"]["size"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe a synthetic set of `seps reid synth` ({error})") from error
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} is of version {manifest.get('version')}, not {VERSION}; draw the set again")
    return SyntheticConfig(**values)


def truth(root: str | Path, names: Sequence[str], workers: int = 1) -> Bytes:
    """What each sensor sees at each pixel of the shots `names`: (S, M, H, W), numbers into `KINDS`.

    A pixel is blind where more than half of what is there is lost to shadow, glare, a reflection, warm surroundings
    or detector noise; low light of the whole scene does not count. With `workers` > 1 the caller's main module must
    be importable. Raises ValueError for a name that the set does not have.
    """
    config = read_parameters(root)
    plan = {shot.name: shot for shot in plan_shots(config)}
    unknown = [name for name in names if name not in plan]
    if unknown:
        raise ValueError(f"the synthetic set in {root} has no shot {unknown[0]!r}")
    parts = in_chunks(partial(_draw, config), [plan[name] for name in names], workers)
    return np.concatenate([np.zeros((0, 3, *config.size), dtype=np.uint8), *parts])


def _draw(config: SyntheticConfig, shots: Sequence[Shot]) -> Bytes:
    """Kinds (S, M, H, W) of some shots as each sensor sees them."""
    world = World(config)
    looks = [world.look(shot) for shot in shots]
    return np.stack([np.where(look.blind > 0.5, np.uint8(BLIND), look.kinds[None]) for look in looks])
