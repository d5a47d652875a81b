"""What the threads of `seps index` do, from when to when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from seps.photos.indexing.embedding import PreparedImage, Preparer, Unread

STEPS = ("decoding", "waiting", "encoding", "levels", "packing", "writing")
"""Of a photo: read and decoded; waiting for the GPU; encoded, the copy to and from the GPU included; its level over the
bank of background queries; packed, and stacked before; written, by the one thread that writes."""


class Spans:
    """Spans of time by name; any number of threads add to them."""

    def __init__(self) -> None:
        self.all: list[tuple[str, float, float]] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Time a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.all.append((name, start, time.perf_counter()))

    def seconds(self, name: str, start: float, end: float) -> float:
        """How much of what has this name lies between two moments, over all threads."""
        return sum(max(0.0, min(end, last) - max(start, first)) for own, first, last in self.all if own == name)

    def steps(self, start: float, end: float) -> dict[str, float]:
        """The seconds of each of `STEPS` between two moments."""
        found = {name: self.seconds(name, start, end) for name in ("decoding", "waiting", "held", "levels", "writing")}
        packing = self.seconds("embedding", start, end) - found["waiting"] - found["held"]
        return {**found, "encoding": found["held"] - found["levels"], "packing": packing}


class WatchedLock:
    """A context, mostly a lock, of which is known when threads waited for it and when they held it."""

    def __init__(self, inner: AbstractContextManager[Any], spans: Spans) -> None:
        self.inner, self.spans, self.own = inner, spans, threading.local()

    def __enter__(self) -> None:
        with self.spans.of("waiting"):
            self.inner.__enter__()
        self.own.since = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        # Before the lock is free: otherwise the next span may begin before this one has ended.
        self.spans.all.append(("held", self.own.since, time.perf_counter()))
        self.inner.__exit__(*error)


class Timed(Preparer):
    """A `Preparer` of this process whose steps are timed."""

    spans = Spans()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, WatchedLock(value, self.spans) if name == "gpu_lock" else value)

    def _read(self, job: Any) -> PreparedImage | Unread:
        with self.spans.of("decoding"):
            return super()._read(job)

    def embed(self, *arguments: Any) -> list[dict[str, Any]]:
        """See `Preparer.embed`."""
        with self.spans.of("embedding"):
            return super().embed(*arguments)

    def _with_levels(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with self.spans.of("levels"):
            return super()._with_levels(states)


def steady_window(marks: Sequence[tuple[float, int]], ahead: int) -> tuple[float, float, int] | None:
    """Start, end and photos of the steady part of a run; `marks` are moments and the photos done by then.

    It begins once the batches are done that were read while the encoder was still being made (`ahead` of them). None
    where there are no others.
    """
    if len(marks) <= ahead:
        return None
    (start, before), (end, done) = marks[ahead - 1], marks[-1]
    return (start, end, done - before) if end > start else None
