"""Work on a Ray cluster, for captioning and for indexing: actors answer batches, and the driver has their answers.

A worker that dies is started again and its batch done item by item, so that an item that kills its worker costs no
other. What an item names must be at the same path on every machine.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from seps.plugins import plugin_modules

AHEAD = 2
"""Batches a worker has at a time: one it computes, one that waits."""
TRIES = 2
"""How often a single item is tried whose batch ended with the death of its worker."""
READY_SECONDS = 300.0
"""How long a worker that died may take to start again."""
LOST = "the worker that read it died, each time it was tried; look at the file, or at the cluster's memory"
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ClusterError(ValueError):
    """The cluster failed while it worked."""


@dataclass(frozen=True)
class RayConfig:
    """Where Ray runs: `address` of a cluster ("" starts one here), how many `workers`, GPUs of each."""

    address: str = ""
    workers: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.gpus < 0:
            raise ValueError(f"Ray needs at least one worker and no negative GPUs, not {self.workers}, {self.gpus}.")


@dataclass(frozen=True)
class ClusterWork(Generic[Item, Answer]):
    """What workers do."""

    start: Callable[[bool], Callable[[Sequence[Item]], Answer]]
    """Called by each worker, with whether it has a GPU: what answers batches."""
    lost: Callable[[Item], Answer]
    """The answer for an item that killed its worker each time."""
    join: Callable[[Sequence[Answer]], Answer]
    """One answer of those for single items."""


class Worker:
    """An actor of the cluster."""

    def __init__(self, start: Callable[[bool], Callable[[Sequence[Any]], Any]], on_gpu: bool) -> None:
        self.answer = start(on_gpu)

    def ready(self) -> None:
        """Answer, once the worker has started."""

    def run(self, batch: Sequence[Any]) -> Any:
        """Answer one batch."""
        return self.answer(batch)


@contextlib.contextmanager
def connected(config: RayConfig) -> Iterator[Any]:
    """Ray, connected while entered; an earlier connection stays.

    Ray prints on standard output that a worker died, whatever its settings: meanwhile that stream is standard error,
    so that a command's own output stays alone. Raises ValueError where Ray is missing or there is no such cluster.
    """
    try:
        ray = importlib.import_module("ray")
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


def carry_plugins(ray: Any) -> None:
    """Send the ideas of loaded plugins by value: other processes and machines do not know the file."""
    for module in plugin_modules():
        ray.cloudpickle.register_pickle_by_value(module)


def spread(
    config: RayConfig, batches: Sequence[Sequence[Item]], work: ClusterWork[Item, Answer]
) -> Generator[tuple[int, Answer]]:
    """Answers with the numbers of their batches, as they come.

    Raises ValueError without Ray, ClusterError where the cluster fails.
    """
    with connected(config) as ray:
        try:
            yield from answers(ray, config, batches, work)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise ClusterError(f"The cluster failed: {why}. What is done is kept; run again.") from error


def answers(
    ray: Any, config: RayConfig, batches: Sequence[Sequence[Item]], work: ClusterWork[Item, Answer]
) -> Generator[tuple[int, Answer]]:
    """As `spread`, of a cluster that is connected."""
    carry_plugins(ray)
    actor = ray.remote(Worker).options(num_cpus=1, num_gpus=config.gpus or None, max_restarts=-1)
    shared = ray.put(work.start)
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
                raise ClusterError(
                    f"No worker of the cluster has started in {READY_SECONDS:.0f} s: has it free processors"
                    f"{' and GPUs' if config.gpus else ''}? What is done is kept; run again."
                )
            (done,) = found
            if done in starting:
                worker = starting.pop(done)
                for _ in range(AHEAD):
                    give(worker)
                continue
            number, worker = running.pop(done)
            try:
                answer: Answer = ray.get(done)
            except ray.exceptions.RayActorError:
                # Its other batch must end first: were that one the killer, it would take these items along.
                others = [task for task, (_, owner) in running.items() if owner is worker]
                ray.wait(others, num_returns=len(others)) if others else None
                answer = one_by_one(ray, worker, batches[number], work)
            give(worker)
            left -= 1
            yield number, answer
    finally:
        for worker in workers:
            ray.kill(worker)


def one_by_one(ray: Any, worker: Any, batch: Sequence[Item], work: ClusterWork[Item, Answer]) -> Answer:
    """The answer of a batch whose worker died. Raises ClusterError where it dies at every item: they are not to
    blame.
    """
    parts, lost = [], 0
    for item in batch:
        for _ in range(TRIES):
            _wait_until_ready(ray, worker)
            try:
                parts.append(ray.get(worker.run.remote([item])))
                break
            except ray.exceptions.RayActorError:
                continue
        else:
            parts.append(work.lost(item))
            lost += 1
    if len(batch) > 1 and lost == len(batch):
        raise ClusterError(
            "The cluster's workers die whatever they read. Is the same release of seps on every machine, and "
            "is there memory for the model? What is done is kept; run again."
        )
    return work.join(parts)


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
