"""A captioning run from images to a file: write each line as its outcome comes, count, stop cleanly, report."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from typing import Any

from seps.images.sources import DataError
from seps.ray_cluster import RayConfig

from .backends import build
from .config import BackendConfig, CaptionConfig
from .engines import ImageOutcome, Stop, run_local, run_ray
from .images import Item
from .journal import Journal, Line, maker_of

SAMPLES = 3


class Tally:
    """Counts outcomes while they come. `done` of `total` images are accounted for."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts: Counter[str] = Counter()
        self.bad_answers: Counter[str] = Counter()
        self.recovered = 0
        self.set_aside: Counter[str] = Counter()
        self.tokens = 0
        self.bad_in_a_row = 0
        self.problem = ""
        self.interrupted = False
        self._started = time.monotonic()

    def add(self, outcome: ImageOutcome) -> None:
        """Count one image's outcome."""
        self.counts[outcome.kind] += 1
        self.bad_answers.update(outcome.bad)
        self.tokens += outcome.tokens or 0
        if outcome.kind in ("good", "bad"):
            self.bad_in_a_row = self.bad_in_a_row + 1 if outcome.kind == "bad" else 0
        if outcome.kind == "good" and outcome.bad:
            self.recovered += 1
        if outcome.kind in ("bad", "fault", "unreadable"):
            self.set_aside[outcome.reason if outcome.kind == "bad" else outcome.kind] += 1

    @property
    def done(self) -> int:
        """Images whose outcome is known."""
        return sum(self.counts.values())

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @property
    def per_second(self) -> float:
        """Images described by this run, per second."""
        return self.counts["good"] / max(self.seconds, 1e-9)


def caption_images(
    items: Sequence[Item],
    out: str | os.PathLike[str],
    backend: BackendConfig,
    config: CaptionConfig | None = None,
    *,
    ray: RayConfig | None = None,
    stop: Stop = lambda: False,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> dict[str, Any]:
    """Describe `items` into the JSONL file `out` and return the report.

    Lines that are there already stay, for images whose content is the same; the rest is described and written
    line by line. `stop` is asked several times a second: once true, what is running is finished and nothing new
    begins. A backend that fails for good ends the run early: the report's "problem" says why.
    Raises ValueError before anything is written where the file or the backend cannot be used.
    """
    config = config or CaptionConfig()
    halt = threading.Event()
    with Journal(out) as journal:
        outcomes: Generator[ImageOutcome]
        if ray is None or not backend.model:  # a server without a named model is asked for it, once
            built = build(backend, halt)
            backend = replace(backend, model=built.model)
        _refuse_mixture(journal, backend.model, config)
        todo = _with_hashes(items, journal, config)
        if ray is None:
            outcomes = run_local(todo, built, config, halt, stop)
        else:
            outcomes = run_ray(todo, backend, config, ray, halt, stop)
        tally = Tally(len(todo))
        progress(tally)
        with contextlib.closing(outcomes):  # a cluster must not outlive a run that fails
            for outcome in outcomes:
                _write(outcome, journal, tally, backend, config)
                if tally.bad_in_a_row >= backend.give_up_after:
                    tally.problem = tally.problem or _too_many_bad(tally)
                if tally.problem:
                    halt.set()
                progress(tally)
        tally.interrupted = halt.is_set() and not tally.problem and tally.done < tally.total
        journal.tidy()
        return _report(items, journal, tally, backend, config)


def _write(
    outcome: ImageOutcome, journal: Journal, tally: Tally, backend: BackendConfig, config: CaptionConfig
) -> None:
    if outcome.kind == "fatal":
        tally.problem = tally.problem or outcome.reason
        return
    if outcome.kind == "good":
        journal.write_good(_good_line(outcome, backend, config))
    elif outcome.kind not in ("same", "aside"):
        journal.write_failed(_failed_line(outcome, backend, config))
    tally.add(outcome)


def _good_line(outcome: ImageOutcome, backend: BackendConfig, config: CaptionConfig) -> Line:
    """The line of a description: `image` and `dense` as `attach_dense` reads them, and where it comes from."""
    own: Line = {"dense": outcome.text, "words": outcome.words, "tokens": outcome.tokens}
    if outcome.attempts > 1:
        used = config.sampling.retry(outcome.attempts - 1)
        own["retry"] = {"after": outcome.bad, "temperature": used.temperature, "seed": used.seed}
    return _line(outcome, own, backend, config)


def _failed_line(outcome: ImageOutcome, backend: BackendConfig, config: CaptionConfig) -> Line:
    """The line of an image that was set aside, with the reason and the last answer for a person to judge."""
    own: Line = {"kind": outcome.kind, "reason": outcome.reason, "bad": outcome.bad, "answer": outcome.text}
    return _line(outcome, own, backend, config)


def _line(outcome: ImageOutcome, own: Line, backend: BackendConfig, config: CaptionConfig) -> Line:
    made = {"model": backend.model, "backend": backend.kind, "settings": asdict(config.sampling)}
    ended = {"finish": outcome.finish, "attempts": outcome.attempts}
    return {"image": outcome.id, "sha256": outcome.sha256, **own, **made, **ended}


def _with_hashes(items: Sequence[Item], journal: Journal, config: CaptionConfig) -> list[Item]:
    """Each item with the content hashes that need no new description."""
    todo = []
    for item in items:
        good, failed = journal.good.entries.get(item.id), journal.failed.entries.get(item.id)
        rejected = failed is not None and failed.note == "bad" and not config.retry_failed
        todo.append(
            replace(
                item,
                described=good.sha256 if good is not None else "",
                set_aside=failed.sha256 if failed is not None and rejected else "",
            )
        )
    return todo


def _refuse_mixture(journal: Journal, model: str, config: CaptionConfig) -> None:
    ours = maker_of({"model": model, "settings": asdict(config.sampling)})
    others = sorted(journal.makers - {ours})
    if others and not config.mixed:
        raise DataError(
            f"{journal.path} holds descriptions made with {others[0]}, and this run would add some made with {ours}. "
            "Choose another --out, the same settings, or --mixed to have both in one file."
        )


def _too_many_bad(tally: Tally) -> str:
    reasons = ", ".join(f"{reason} {count} times" for reason, count in tally.set_aside.most_common())
    return (
        f"{tally.bad_in_a_row} images in a row got no good answer ({reasons}). Read the answers in the side file: "
        "another model, another --prompt, more --max-tokens or --accept may help; then use --retry-failed."
    )


def _report(
    items: Sequence[Item], journal: Journal, tally: Tally, backend: BackendConfig, config: CaptionConfig
) -> dict[str, Any]:
    described = [item.id for item in items if item.id in journal.good.entries]
    step = max(len(described) / SAMPLES, 1.0)  # the samples are spread evenly over the images
    samples = [journal.good.read(described[int(k * step)]) for k in range(min(SAMPLES, len(described)))]
    return {
        "out": str(journal.path),
        "failed": str(journal.failed.path) if journal.failed.entries else "",
        "model": backend.model,
        "backend": backend.kind,
        "settings": asdict(config.sampling),
        "images": tally.total,
        "described_in_file": len(described),
        "described_now": tally.counts["good"],
        "described_before": tally.counts["same"],
        "set_aside_before": tally.counts["aside"],
        "set_aside": dict(sorted(tally.set_aside.items())),
        "bad_answers": dict(sorted(tally.bad_answers.items())),
        "recovered_by_asking_again": tally.recovered,
        "words": _lengths([journal.good.entries[image].note[0] for image in described]),
        "tokens": tally.tokens,
        "seconds": round(tally.seconds, 2),
        "images_per_second": round(tally.per_second, 3),
        "complete": tally.done == tally.total and not tally.problem,
        "problem": tally.problem,
        "interrupted": tally.interrupted,
        "samples": [{"image": line["image"], "dense": line["dense"]} for line in samples],
    }


def _lengths(words: list[int]) -> dict[str, float]:
    """Smallest, middle, mean and largest number of words; {} for none."""
    if not words:
        return {}
    return {
        "min": min(words),
        "median": statistics.median(words),
        "mean": round(statistics.fmean(words), 1),
        "max": max(words),
    }
