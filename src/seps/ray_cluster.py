"""A Ray cluster, for captioning and for indexing: where it is, and the package itself."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RayConfig:
    """Where Ray runs: `address` of a cluster ("" starts one here), how many `workers`, GPUs of each."""

    address: str = ""
    workers: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.gpus < 0:
            raise ValueError(f"Ray needs at least one worker and no negative GPUs, not {self.workers}, {self.gpus}.")


def load_ray(*parts: str) -> Any:
    """The package, with some of its parts ("ray.data") imported. Raises ValueError where it is missing."""
    try:
        for part in parts:
            importlib.import_module(part)
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError("A cluster needs Ray: pip install 'seps[dist]', or leave out --engine ray.") from error
