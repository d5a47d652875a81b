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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from seps.experiments.compare import Job, Material, config_for, run_one
from seps.experiments.pixels import load_material

_LONGEST_REASON = 2000


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, or with the reason why not."""

    job: Job
    result: dict[str, Any] | None
    reason: str = ""


def attempt(job: Job, material: Material, runs: Path, device: str, keep: bool) -> Outcome:
    """`run_one`, with whatever goes wrong as a reason instead of an exception; a lack of memory says what to change."""
    try:
        return Outcome(job, run_one(job, material, runs, device=device, keep=keep))
    except InterruptedError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        first = str(error).strip().split("\n")[0]
        reason = f"it ran out of memory ({first or type(error).__name__})"
        return Outcome(job, None, f"{reason[:_LONGEST_REASON]}. {less_memory(job, material)}")
    except Exception as error:  # one bad run must not take the others with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return Outcome(job, None, reason[:_LONGEST_REASON])


def less_memory(job: Job, material: Material) -> str:
    """What to change so that a run takes less memory, as a sentence."""
    train = config_for(job, material.recipe).train
    step = train.chunk_size or train.batch_size
    return (
        f"To take less, add --set train.chunk_size={max(1, step // 2)} (now {step} of a batch of {train.batch_size} "
        "at a time; results stay comparable) or lower --processes, and give the same command again: finished runs are "
        "kept."
    )


def _how_it_ended(code: int | None, job: Job, material: Material) -> str:
    """Why a worker sent no outcome."""
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    if -code != signal.SIGKILL:
        return f"its process was ended by {name}"
    return f"its process was ended by {name}, as the system does when memory runs out. {less_memory(job, material)}"


@dataclass(frozen=True)
class _Setting:
    """What a worker gets once. The photos of `material` travel as the names of their files."""

    material: Material
    pixels: tuple[Path, ...]
    runs: Path
    device: str
    keep: bool
    threads: int


def _work(setting: _Setting, pipe: Connection) -> None:
    """The life of a worker: jobs in, outcomes out, until the parent closes the pipe or ends."""
    torch.set_num_threads(setting.threads)
    shared = setting.material
    material = load_material(shared.recipe, [shared.train, *shared.dev], setting.pixels)
    try:
        while True:
            pipe.send(attempt(pipe.recv(), material, setting.runs, setting.device, setting.keep))
    except (EOFError, BrokenPipeError, InterruptedError, KeyboardInterrupt):
        return


class Workers:
    """At most `count` processes, each with one job. Use it in a `with` block: what still runs at its end is ended."""

    def __init__(
        self,
        count: int,
        material: Material,
        pixels: Sequence[Path],
        runs: Path,
        *,
        device: str,
        keep: bool = False,
    ) -> None:
        light = replace(material, pixels=torch.empty(0), dev_pixels=[])
        threads = max(1, (os.cpu_count() or 1) // count)
        self._setting = _Setting(light, tuple(pixels), runs, device, keep, threads)
        self._count = count
        self._context = multiprocessing.get_context("spawn")
        self._busy: dict[Connection, tuple[SpawnProcess, Job]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, (process, _job) in self._busy.items():
            process.terminate()
            process.join()
            pipe.close()
        self._busy.clear()

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Outcomes as they come; jobs begin in the order given."""
        waiting = list(jobs)
        for _ in range(min(self._count, len(waiting))):
            self._start(waiting.pop(0))
        while self._busy:
            for pipe in wait(list(self._busy)):
                if isinstance(pipe, Connection):
                    yield self._collect(pipe, waiting)

    def _start(self, job: Job) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._setting, theirs), daemon=True)
        process.start()
        # Else the end of the worker would not show: this side would hold its pipe open.
        theirs.close()
        ours.send(job)
        self._busy[ours] = (process, job)

    def _collect(self, pipe: Connection, waiting: list[Job]) -> Outcome:
        process, job = self._busy.pop(pipe)
        try:
            outcome: Outcome = pipe.recv()
        except (EOFError, OSError):
            process.join()
            outcome = Outcome(job, None, _how_it_ended(process.exitcode, job, self._setting.material))
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
