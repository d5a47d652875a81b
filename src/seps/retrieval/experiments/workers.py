"""Runs of a comparison, several at a time: spawned processes that share the decoded photos through a mapped file.

A worker keeps the data between its runs. It sends every result to its parent, the only one that writes. A run that
fails is reported and the next one begins; a worker that dies takes only its own run with it and is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from seps.plugins import load_plugins
from seps.retrieval.experiments.compare import Trial, config_for, run_one
from seps.retrieval.train.data import SharedData

_LONGEST_REASON = 2000


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, or with the reason why not."""

    trial: Trial
    result: dict[str, Any] | None
    reason: str = ""


def attempt(trial: Trial, shared: SharedData, runs: Path, device: str, keep: bool) -> Outcome:
    """`run_one`, with whatever goes wrong as a reason instead of an exception; a lack of memory says what to change."""
    try:
        return Outcome(trial, run_one(trial, shared, runs, device=device, keep=keep))
    except InterruptedError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        first = str(error).strip().split("\n")[0]
        reason = f"it ran out of memory ({first or type(error).__name__})"
        return Outcome(trial, None, f"{reason[:_LONGEST_REASON]}. {less_memory(trial, shared)}")
    except Exception as error:  # one bad run must not take the others with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return Outcome(trial, None, reason[:_LONGEST_REASON])


def less_memory(trial: Trial, shared: SharedData) -> str:
    """What to change so that a run takes less memory, as a sentence."""
    train = config_for(trial, shared.recipe).train
    step = train.chunk_size or train.batch_size
    return (
        f"To take less, add --train.chunk_size {max(1, step // 2)} (now {step} of a batch of {train.batch_size} at a "
        "time; results stay comparable) or lower --processes, and give the same command again: finished runs are kept."
    )


def _how_it_ended(code: int | None, trial: Trial, shared: SharedData) -> str:
    """Why a worker sent no outcome."""
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    if -code != signal.SIGKILL:
        return f"its process was ended by {name}"
    return f"its process was ended by {name}, as the system does when memory runs out. {less_memory(trial, shared)}"


@dataclass(frozen=True)
class _Setting:
    """What a worker gets once. The photos travel as the names of their files."""

    shared: SharedData
    runs: Path
    device: str
    keep: bool
    threads: int
    plugins: tuple[str, ...] = ()
    """Files of ideas that the worker loads: a spawned process knows none of its parent's."""


def _work(setting: _Setting, pipe: Connection) -> None:
    """The life of a worker: trials in, outcomes out, until the parent closes the pipe or ends."""
    torch.set_num_threads(setting.threads)
    load_plugins(setting.plugins)
    shared = setting.shared.with_photos()
    try:
        while True:
            pipe.send(attempt(pipe.recv(), shared, setting.runs, setting.device, setting.keep))
    except (EOFError, BrokenPipeError, InterruptedError, KeyboardInterrupt):
        return


class Workers:
    """At most `count` processes, each with one trial. Use it in a `with` block: what still runs at its end is ended."""

    def __init__(
        self,
        count: int,
        shared: SharedData,
        runs: Path,
        *,
        device: str,
        keep: bool = False,
        plugins: Sequence[str] = (),
    ) -> None:
        threads = max(1, (os.cpu_count() or 1) // count)
        self._setting = _Setting(shared.without_photos(), runs, device, keep, threads, tuple(plugins))
        self._count = count
        self._context = multiprocessing.get_context("spawn")
        self._busy: dict[Connection, tuple[SpawnProcess, Trial]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, (process, _trial) in self._busy.items():
            process.terminate()
            process.join()
            pipe.close()
        self._busy.clear()

    def run(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Outcomes as they come; trials begin in the order given."""
        waiting = list(trials)
        for _ in range(min(self._count, len(waiting))):
            self._start(waiting.pop(0))
        while self._busy:
            for pipe in wait(list(self._busy)):
                if isinstance(pipe, Connection):
                    yield self._collect(pipe, waiting)

    def _start(self, trial: Trial) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._setting, theirs), daemon=True)
        process.start()
        # Else the end of the worker would not show: this side would hold its pipe open.
        theirs.close()
        ours.send(trial)
        self._busy[ours] = (process, trial)

    def _collect(self, pipe: Connection, waiting: list[Trial]) -> Outcome:
        process, trial = self._busy.pop(pipe)
        try:
            outcome: Outcome = pipe.recv()
        except (EOFError, OSError):
            process.join()
            outcome = Outcome(trial, None, _how_it_ended(process.exitcode, trial, self._setting.shared))
        # After a failure a new process takes over: a GPU's error would stay in the old one and fail all that follows.
        if outcome.result is not None and waiting:
            self._busy[pipe] = (process, waiting[0])
            pipe.send(waiting.pop(0))
            return outcome
        # The worker reads the end of the pipe as the end of its work.
        pipe.close()
        process.join()
        if waiting:
            self._start(waiting.pop(0))
        return outcome
