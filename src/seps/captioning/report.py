"""What a captioning run did: counts, lengths, bad answers, samples, speed."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

from .work import Outcome

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

    def add(self, outcome: Outcome) -> None:
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
        """Images described anew each second."""
        return self.counts["good"] / max(self.seconds, 1e-9)


def lengths(words: list[int]) -> dict[str, float]:
    """Smallest, middle, mean and largest number of words; {} for none."""
    if not words:
        return {}
    return {
        "min": min(words),
        "median": statistics.median(words),
        "mean": round(statistics.fmean(words), 1),
        "max": max(words),
    }


def make_report(tally: Tally, words: list[int], samples: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """The report as it is written to JSON; `about` names the files, the model and the settings."""
    return {
        **about,
        "images": tally.total,
        "described_in_file": len(words),
        "described_now": tally.counts["good"],
        "described_before": tally.counts["same"],
        "set_aside_before": tally.counts["aside"],
        "set_aside": dict(sorted(tally.set_aside.items())),
        "bad_answers": dict(sorted(tally.bad_answers.items())),
        "recovered_by_asking_again": tally.recovered,
        "words": lengths(words),
        "tokens": tally.tokens,
        "seconds": round(tally.seconds, 2),
        "images_per_second": round(tally.per_second, 3),
        "complete": tally.done == tally.total and not tally.problem,
        "problem": tally.problem,
        "interrupted": tally.interrupted,
        "samples": samples,
    }


def evenly(names: list[str], count: int = SAMPLES) -> list[str]:
    """`count` names spread over the list."""
    step = max(len(names) / count, 1.0) if names else 1.0
    return [names[int(k * step)] for k in range(min(count, len(names)))]
