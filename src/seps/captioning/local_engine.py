"""The work on this machine: threads that describe, a few images ahead of the one who writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from .backends import Backend
from .config import CaptionConfig
from .sources import Item
from .work import Outcome, describe_items

Stop = Callable[[], bool]


def run_local(
    items: Sequence[Item], backend: Backend, config: CaptionConfig, halt: threading.Event, stop: Stop
) -> Iterator[Outcome]:
    """Outcomes as they come, described by `backend.parallel` threads; few images are under way at a time.

    The threads are daemons: a second Ctrl-C must not wait for a request that hangs.
    """
    jobs: queue.SimpleQueue[list[Item] | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()

    def work() -> None:
        while (batch := jobs.get()) is not None:
            try:
                results.put([] if halt.is_set() else describe_items(batch, backend, config))
            except Exception as error:  # whatever it is, the lines of the other threads must be written first
                results.put([Outcome("", "fatal", reason=f"{type(error).__name__}: {error}")])

    for _ in range(backend.parallel):
        threading.Thread(target=work, daemon=True, name="seps-caption").start()
    batches = _batches(items, backend.batch_size)
    running = 0
    try:
        while True:
            while running < 2 * backend.parallel and not halt.is_set():
                batch = next(batches, None)
                if batch is None:
                    break
                jobs.put(batch)
                running += 1
            if not running:
                return
            try:
                outcomes = results.get(timeout=0.1)
            except queue.Empty:
                outcomes = None
            if stop():
                halt.set()
            if outcomes is not None:
                running -= 1
                if any(outcome.kind == "fatal" for outcome in outcomes):
                    halt.set()
                yield from outcomes
    except BaseException:  # also a caller that stops listening
        halt.set()
        raise
    finally:
        for _ in range(backend.parallel):
            jobs.put(None)


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
