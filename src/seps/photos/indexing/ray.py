"""Indexing over a Ray cluster: actors read, decode and embed; the driver alone writes the store.

The workers read the images themselves: the folder must be at the same path on every machine.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Sequence
from typing import Any

from seps.photos.indexing.embedding import ImageJob, PreparedBatch, PreparedImage, Preparer, Unread
from seps.plugins import plugin_modules
from seps.ray_cluster import RayConfig, connected
from seps.retrieval.engine.loading import on_device
from seps.retrieval.ranking.bank import bank_of

AHEAD = 2
"""Batches a worker has at a time: one it computes, one that waits."""
TRIES = 2
"""How often a single image is tried whose batch ended with the death of its worker."""
READY_SECONDS = 300.0
"""How long a worker that died may take to start again."""
LOST = Unread("the worker that read it died, each time it was tried; look at the file, or at the cluster's memory")


class Worker:
    """An actor of the cluster. A GPU is used where the cluster gave it one."""

    def __init__(self, prepare: Preparer, on_gpu: bool) -> None:
        self.prepare = prepare
        if on_gpu:
            prepare.engine = on_device(prepare.engine, "cuda")
            prepare.bank = None if prepare.bank is None else prepare.bank.to("cuda")

    def ready(self) -> None:
        """Answer, once the worker has started."""

    def run(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
        """Prepare one batch."""
        return self.prepare(jobs)


def prepare_on_cluster(
    batches: Sequence[Sequence[ImageJob]], prepare: Preparer, config: RayConfig
) -> Generator[tuple[int, PreparedBatch]]:
    """Batches with their numbers, as they are done. Raises ValueError without Ray, or where the cluster fails.

    A worker that dies is started again and its batch done image by image, so that an image that kills its reader
    costs no other.
    """
    with connected(config) as ray:
        try:
            yield from _spread(ray, batches, prepare, config)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise ValueError(f"The cluster failed: {why}. What was indexed is kept; run again.") from error


def carry_plugins(ray: Any) -> None:
    """Send the ideas of loaded plugins by value: other processes and machines do not know the file."""
    for module in plugin_modules():
        ray.cloudpickle.register_pickle_by_value(module)


def _spread(
    ray: Any, batches: Sequence[Sequence[ImageJob]], prepare: Preparer, config: RayConfig
) -> Generator[tuple[int, PreparedBatch]]:
    prepare = copy.copy(prepare)
    if prepare.engine.device.type != "cpu":  # a machine without a GPU could not load it
        prepare.engine = on_device(prepare.engine, "cpu")
    if prepare.has_bank:  # each worker would encode its sentences anew
        prepare.bank = bank_of(prepare.engine)
    carry_plugins(ray)
    actor = ray.remote(Worker).options(num_cpus=1, num_gpus=config.gpus or None, max_restarts=-1)
    shared = ray.put(prepare)
    count = min(config.workers, len(batches))
    if not config.address:  # a cluster of this machine does not grow, and one that died needs its place again
        count = max(1, min(count, int(ray.cluster_resources().get("CPU", 1))))
    workers = [actor.remote(shared, config.gpus > 0) for _ in range(count)]
    todo = iter(enumerate(batches))
    # Work is for workers that have started: of more than the cluster has room for, some never do.
    starting = {worker.ready.remote(): worker for worker in workers}
    running: dict[Any, tuple[int, Any]] = {}
    left = len(batches)

    def give(worker: Any) -> None:
        entry = next(todo, None)
        if entry is not None:
            running[worker.run.remote(list(entry[1]))] = (entry[0], worker)

    try:
        while left:
            found, _ = ray.wait([*running, *starting], num_returns=1, timeout=None if running else READY_SECONDS)
            if not found:
                raise ValueError(
                    f"No worker of the cluster has started in {READY_SECONDS:.0f} s: has it free processors"
                    f"{' and GPUs' if config.gpus else ''}? What was indexed is kept; run again."
                )
            (done,) = found
            if done in starting:
                worker = starting.pop(done)
                for _ in range(AHEAD):
                    give(worker)
                continue
            number, worker = running.pop(done)
            try:
                prepared: PreparedBatch = ray.get(done)
            except ray.exceptions.RayActorError:
                # Its other batch must end first: were that one the killer, it would take these images along.
                others = [task for task, (_, owner) in running.items() if owner is worker]
                ray.wait(others, num_returns=len(others)) if others else None
                prepared = _one_by_one(ray, worker, batches[number])
            give(worker)
            left -= 1
            yield number, prepared
    finally:
        for worker in workers:
            ray.kill(worker)


def _one_by_one(ray: Any, worker: Any, jobs: Sequence[ImageJob]) -> PreparedBatch:
    """Outcomes of a batch whose worker died. Raises ValueError where it dies at every image: they are not to blame."""
    outcomes: list[PreparedImage | Unread] = []
    decoding = encoding = 0.0
    for job in jobs:
        part = PreparedBatch([LOST])
        for _ in range(TRIES):
            _wait_until_ready(ray, worker)
            try:
                part = ray.get(worker.run.remote([job]))
                break
            except ray.exceptions.RayActorError:
                continue
        outcomes += part.outcomes
        decoding, encoding = decoding + part.decoding, encoding + part.encoding
    if len(jobs) > 1 and all(outcome == LOST for outcome in outcomes):
        raise ValueError(
            "The cluster's workers die whatever they read. Is the same release of seps on every machine, and "
            "is there memory for the model? What was indexed is kept; run again."
        )
    return PreparedBatch(outcomes, decoding, encoding)


def _wait_until_ready(ray: Any, worker: Any) -> None:
    """Wait for a worker that is starting again: what it is given meanwhile fails, whatever it is."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            ray.get(worker.ready.remote(), timeout=READY_SECONDS)
            return
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
