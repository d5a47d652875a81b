"""From images to outcomes: read, compare the hash, describe, judge, ask again. On this machine, or over a cluster.

No files are written here: that is done by one process alone, which is why a cluster's run resumes like any other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from seps.images.shards import UnreadableImage, read_source
from seps.ray_cluster import LOST, ClusterError, ClusterWork, RayConfig, spread

from .backends import Answer, Backend, FatalError, Stopped, build
from .config import BackendConfig, CaptionConfig
from .images import Item, content_hash
from .quality import answer_problem, words_of

# same: described before. aside: set aside before. fault: the backend failed on it, the next start tries again.
# fatal: not about one image, but the end of the run.
OutcomeKind = Literal["good", "same", "aside", "bad", "fault", "unreadable", "fatal"]
Stop = Callable[[], bool]


@dataclass
class ImageOutcome:
    """What became of one image. `bad`: what was wrong with each bad answer on the way, the last one included."""

    id: str
    kind: OutcomeKind
    sha256: str = ""
    text: str = ""
    reason: str = ""
    finish: str = ""
    tokens: int | None = None
    attempts: int = 0
    bad: list[str] = field(default_factory=list)
    words: int = 0


@dataclass
class _Pending:
    """An image that was read and has no outcome yet."""

    item: Item
    sha256: str
    picture: Any
    bad: list[str] = field(default_factory=list)


def describe_items(items: Sequence[Item], backend: Backend, config: CaptionConfig) -> list[ImageOutcome]:
    """The outcomes of a batch, in no particular order; fewer than items if the run was stopped.

    After a FatalError the outcomes reached so far come with one of kind "fatal" at the end.
    """
    outcomes: list[ImageOutcome] = []
    pending: list[_Pending] = []
    for item in items:
        read = _read(item, backend)
        if isinstance(read, ImageOutcome):
            outcomes.append(read)
        else:
            pending.append(read)
    for attempt in range(config.bad_retries + 1):
        if not pending:
            break
        try:
            answers = backend.describe([one.picture for one in pending], config.sampling.retry(attempt))
        except Stopped:
            break
        except FatalError as error:
            return [*outcomes, ImageOutcome("", "fatal", reason=str(error))]
        again = []
        for one, answer in zip(pending, answers, strict=True):
            outcome = _judge(one, answer, attempt, config)
            if outcome is None:
                again.append(one)
            else:
                outcomes.append(outcome)
        pending = again
    return outcomes


def _read(item: Item, backend: Backend) -> ImageOutcome | _Pending:
    try:
        data = read_source(item.source)
        sha256 = content_hash(data)
        if sha256 == item.described:
            return ImageOutcome(item.id, "same", sha256)
        if sha256 == item.set_aside:
            return ImageOutcome(item.id, "aside", sha256)
        return _Pending(item, sha256, backend.prepare(data, item.source))
    except UnreadableImage as error:
        return ImageOutcome(item.id, "unreadable", reason=str(error))


def _judge(one: _Pending, answer: Answer | ValueError, attempt: int, config: CaptionConfig) -> ImageOutcome | None:
    """The outcome of an answer, None to ask again."""
    outcome = ImageOutcome(one.item.id, "fault", one.sha256, attempts=attempt + 1, bad=one.bad)
    if not isinstance(answer, Answer):
        outcome.reason = str(answer)
        return outcome
    # Half a surrogate pair is valid JSON, but cannot be written as UTF-8.
    text = answer.text.encode("utf-8", "replace").decode("utf-8").strip()
    outcome.text, outcome.finish, outcome.tokens = text, answer.finish, answer.tokens
    outcome.words = len(words_of(text))
    problem = answer_problem(text, answer.finish)
    if problem is None or problem in config.accept:
        outcome.kind = "good"
        return outcome
    one.bad.append(problem)
    if attempt < config.bad_retries:
        return None
    outcome.kind, outcome.reason = "bad", problem
    return outcome


def run_local(
    items: Sequence[Item], backend: Backend, config: CaptionConfig, halt: threading.Event, stop: Stop
) -> Generator[ImageOutcome]:
    """Outcomes as they come, described by `backend.parallel` threads; few images are under way at a time.

    Threads by hand, because an executor's are no daemons: a second Ctrl-C would wait for a request that hangs.
    """
    tasks: queue.SimpleQueue[Sequence[Item] | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[list[ImageOutcome]] = queue.SimpleQueue()

    def work() -> None:
        while (batch := tasks.get()) is not None:
            try:
                results.put([] if halt.is_set() else describe_items(batch, backend, config))
            except Exception as error:  # whatever it is, the lines of the other threads must be written first
                results.put([ImageOutcome("", "fatal", reason=f"{type(error).__name__}: {error}")])

    for _ in range(backend.parallel):
        threading.Thread(target=work, daemon=True, name="seps-caption").start()
    starts = iter(range(0, len(items), backend.batch_size))
    running = 0
    try:
        while True:
            while running < 2 * backend.parallel and not halt.is_set():
                start = next(starts, None)
                if start is None:
                    break
                tasks.put(items[start : start + backend.batch_size])
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
            tasks.put(None)


def run_ray(
    items: Sequence[Item],
    backend: BackendConfig,
    config: CaptionConfig,
    ray: RayConfig,
    halt: threading.Event,
    stop: Stop,
) -> Generator[ImageOutcome]:
    """Outcomes as the cluster delivers them, batch by batch. Raises ValueError where Ray is missing.

    The workers read the images themselves: the paths must lead to them on every machine.
    A worker that finds its backend unusable ends the run.
    """
    # A batch is what reaches the driver at once, and so what a killed driver loses at most.
    size = backend.batch_size if backend.kind == "transformers" else 4 * backend.parallel
    placed = [replace(item, source=replace(item.source, path=item.source.path.absolute())) for item in items]
    batches = [placed[start : start + size] for start in range(0, len(placed), size)]
    try:
        for _, outcomes in spread(ray, batches, ClusterWork(partial(describer, backend, config), _lost, _joined)):
            yield from outcomes
            if stop():
                halt.set()
            if halt.is_set():
                return
    except ClusterError as error:
        yield ImageOutcome("", "fatal", reason=str(error))


def describer(
    backend: BackendConfig, config: CaptionConfig, on_gpu: bool = False
) -> Callable[[Sequence[Item]], list[ImageOutcome]]:
    """What a worker of the cluster describes batches by; it builds its backend once."""
    halt = threading.Event()
    try:
        built = build(backend, halt)
    except ValueError as error:
        problem = str(error)
        return lambda items: [ImageOutcome("", "fatal", reason=problem)]
    return lambda items: list(run_local(items, built, config, halt, lambda: False))


def _lost(item: Item) -> list[ImageOutcome]:
    return [ImageOutcome(item.id, "fault", reason=LOST)]


def _joined(parts: Sequence[list[ImageOutcome]]) -> list[ImageOutcome]:
    return [outcome for part in parts for outcome in part]
