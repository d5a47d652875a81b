"""Indexing over a Ray cluster: actors read, decode and embed; the driver alone writes the store.

The workers read the images themselves: the folder must be at the same path on every machine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from seps.ray_cluster import RayConfig, load_ray
from seps.retrieval.index.embedding import Batch, Job, Preparer

RETRIES = 1
"""How often a batch is tried again whose worker died."""
AHEAD = 2
"""Batches a worker has at a time: one it computes, one that waits."""
LOST = "the worker that read it died, each time it was tried; look at the file, or at the cluster's memory"


class Worker:
    """An actor of the cluster. A GPU is used where the cluster gave it one."""

    def __init__(self, prepare: Preparer, on_gpu: bool) -> None:
        self.prepare = prepare
        if on_gpu:
            prepare.model.to("cuda")
        prepare.model.eval()

    def run(self, jobs: Sequence[Job]) -> Batch:
        """Prepare one batch."""
        return self.prepare(jobs)


def prepare_on_cluster(
    batches: Sequence[Sequence[Job]], prepare: Preparer, config: RayConfig
) -> Iterator[tuple[int, Batch]]:
    """Batches and their places, as they are done. Raises ValueError without Ray, or where the cluster fails.

    A worker that dies is started again and its batch tried `RETRIES` times more, then image by image, so that one
    image that kills its reader costs itself alone.
    """
    ray = load_ray()
    started = not ray.is_initialized()
    try:
        if started:
            ray.init(address=config.address or None, log_to_driver=False)
        yield from _spread(ray, batches, prepare, config)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"The cluster failed: {why}. What was indexed is kept; run again.") from error
    except ConnectionError as error:
        raise ValueError(f"There is no Ray cluster at {config.address or 'this machine'}: {error}") from error
    finally:
        if started and ray.is_initialized():
            ray.shutdown()


def _spread(
    ray: Any, batches: Sequence[Sequence[Job]], prepare: Preparer, config: RayConfig
) -> Iterator[tuple[int, Batch]]:
    if prepare.model.device.type != "cpu":  # a machine without a GPU could not load it
        prepare = copy.copy(prepare)
        prepare.model = copy.deepcopy(prepare.model).cpu()
    actor = ray.remote(Worker).options(
        num_cpus=1, num_gpus=config.gpus or None, max_restarts=-1, max_task_retries=RETRIES
    )
    shared = ray.put(prepare)
    workers = [actor.remote(shared, config.gpus > 0) for _ in range(min(config.workers, len(batches)))]
    todo = iter(enumerate(batches))
    running: dict[Any, tuple[int, Any]] = {}

    def give(worker: Any) -> None:
        entry = next(todo, None)
        if entry is not None:
            running[worker.run.remote(list(entry[1]))] = (entry[0], worker)

    try:
        for _ in range(AHEAD):
            for worker in workers:
                give(worker)
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            place, worker = running.pop(done)
            give(worker)
            try:
                yield place, ray.get(done)
            except ray.exceptions.RayActorError:
                yield place, _one_by_one(ray, worker, batches[place])
    finally:
        for worker in workers:
            ray.kill(worker)


def _one_by_one(ray: Any, worker: Any, jobs: Sequence[Job]) -> Batch:
    """Outcomes of a batch that killed its worker. Raises ValueError where every image does: then it is not they."""
    outcomes: list[Any] = []
    decoding = encoding = 0.0
    for job in jobs:
        try:
            part: Batch = ray.get(worker.run.remote([job]))
        except ray.exceptions.RayActorError:
            outcomes.append(LOST)
            continue
        outcomes += part.outcomes
        decoding, encoding = decoding + part.decoding, encoding + part.encoding
    if len(jobs) > 1 and all(outcome == LOST for outcome in outcomes):
        raise ValueError(
            "The cluster's workers die whatever they read. Is the same release of seps on every machine, and "
            "is there memory for the model? What was indexed is kept; run again."
        )
    return Batch(outcomes, decoding, encoding)
