"""A Ray cluster, for captioning and for indexing: where it is, and the package itself."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def connected(config: RayConfig, *parts: str) -> Iterator[Any]:
    """Ray, with some of its `parts` ("ray.data") imported, connected while entered; an earlier connection stays.

    Ray prints on standard output that a worker died, whatever its settings: meanwhile that stream is standard error,
    so that a command's own output stays alone. Raises ValueError where Ray is missing or there is no such cluster.
    """
    try:
        ray, *_ = (importlib.import_module(name) for name in ("ray", *parts))
    except ImportError as error:
        raise ValueError("A cluster needs Ray: pip install 'seps[dist]', or leave out --engine ray.") from error
    started = not ray.is_initialized()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if started:
                ray.init(address=config.address or None, log_to_driver=False)
            yield ray
        except ConnectionError as error:
            raise ValueError(f"There is no Ray cluster at {config.address or 'this machine'}: {error}") from error
        finally:
            if started and ray.is_initialized():
                ray.shutdown()
