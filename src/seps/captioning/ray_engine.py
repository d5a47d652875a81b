"""The same work over a cluster: Ray Data carries batches to workers that each hold a backend.

Only the driver writes the file, so a cluster's run is resumed like any other. The workers read the images
themselves: the paths must lead to them on every machine.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from seps.ray_cluster import RayConfig, load_ray
from seps.retrieval.data import ImageSource

from .backends import build
from .config import BackendConfig, CaptionConfig
from .local_engine import Stop, run_local
from .sources import Item
from .work import Outcome

MOST_BLOCKS = 10_000


def run_ray(
    items: Sequence[Item],
    backend: BackendConfig,
    config: CaptionConfig,
    ray_config: RayConfig,
    halt: threading.Event,
    stop: Stop,
) -> Iterator[Outcome]:
    """Outcomes as the cluster delivers them, block by block. Raises ValueError where Ray is missing.

    The rate limit is shared among the workers. A worker that finds its backend unusable ends the run.
    """
    ray = load_ray("ray.data")
    started = not ray.is_initialized()
    if started:
        ray.init(address=ray_config.address or None, log_to_driver=False)
    each = replace(backend, requests_per_minute=backend.requests_per_minute / ray_config.workers)
    batch = backend.batch_size if backend.kind == "transformers" else 4 * backend.parallel
    # A block is what reaches the driver at once, and so what a killed driver loses at most.
    blocks = min(MOST_BLOCKS, math.ceil(len(items) / batch))
    described = ray.data.from_items([{"item": pack(item)} for item in items], override_num_blocks=blocks).map_batches(
        Describer,
        fn_constructor_kwargs={"backend": each, "config": config},
        batch_size=batch,
        compute=ray.data.ActorPoolStrategy(size=ray_config.workers),
        num_gpus=ray_config.gpus or None,
    )
    try:
        # Whole blocks: stopping between two rows of one would throw finished work away.
        for block in described.iter_batches(batch_size=None, batch_format="numpy"):
            for text in block.get("outcome", ()):
                yield Outcome(**json.loads(text))
            if stop():
                halt.set()
            if halt.is_set():
                return
    except ray.exceptions.RayError as error:
        yield Outcome("", "fatal", reason=f"Ray: {str(error).strip().splitlines()[-1]}")
    finally:
        if started:
            ray.shutdown()


class Describer:
    """A worker of the cluster: builds its backend once and describes batch after batch."""

    def __init__(self, backend: BackendConfig, config: CaptionConfig) -> None:
        self.config = config
        self.halt = threading.Event()
        self.problem = ""
        try:
            self.backend = build(backend, self.halt)
        except ValueError as error:
            self.problem = str(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """{"item": packed items} -> {"outcome": outcomes as JSON}."""
        if self.problem:
            return {"outcome": [json.dumps(asdict(Outcome("", "fatal", reason=self.problem)))]}
        items = [unpack(str(text)) for text in batch["item"]]
        outcomes = run_local(items, self.backend, self.config, self.halt, lambda: False)
        return {"outcome": [json.dumps(asdict(outcome)) for outcome in outcomes]}


def pack(item: Item) -> str:
    """An item as JSON, for a column of plain texts."""
    return json.dumps([item.id, str(item.source.path.absolute()), item.source.member, item.known, item.aside])


def unpack(text: str) -> Item:
    """The item that `pack` packed."""
    image, path, member, known, aside = json.loads(text)
    return Item(image, ImageSource(Path(path), member), known, aside)
