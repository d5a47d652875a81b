"""Batches of any nesting: walk their tensors, move them, and prepare them ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from seps.method.encoded import map_tensors


def leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in the nesting that is not itself a container."""
    items: Iterable[tuple[Any, Any]]
    match batch:
        case dict():
            items = batch.items()
        case tuple() if hasattr(batch, "_fields"):
            items = zip(batch._fields, batch, strict=True)
        case list() | tuple():
            items = enumerate(batch)
        case _ if is_dataclass(batch) and not isinstance(batch, type):
            items = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
        case _:
            yield name or "batch", batch
            return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


class Prefetcher:
    """Yields `make(step)` for each step of a range, in order, computing up to `ahead` of them in threads.

    An error in `make` is raised at the step that asked for the batch. Close it (or leave its `with`) to drop
    what is still being prepared.
    """

    def __init__(self, make: Callable[[int], Any], steps: range, ahead: int, workers: int, pin: bool) -> None:
        self._make, self._steps, self._ahead = make, iter(steps), ahead
        self._pin = pin
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="seps-batch") if ahead else None
        self._pending: deque[Future[Any]] = deque()

    def _prepare(self, step: int) -> Any:
        batch = self._make(step)
        # An expanded tensor cannot be page-locked as it is.
        return map_tensors(batch, lambda tensor: tensor.contiguous().pin_memory()) if self._pin else batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._pool is None:
            return self._prepare(next(self._steps))
        while len(self._pending) < self._ahead + 1:
            step = next(self._steps, None)
            if step is None:
                break
            self._pending.append(self._pool.submit(self._prepare, step))
        if not self._pending:
            raise StopIteration
        return self._pending.popleft().result()

    def close(self) -> None:
        """Stop preparing; batches already begun end in the background."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
