"""Runs of a comparison, several at a time: spawned processes that share the decoded photos through a mapped file.

A worker keeps the data between its runs. It sends every result to its parent, the only one that writes. A run that
fails is reported and the next one begins; a worker that dies takes only its own run with it and is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seps.retrieval.compare import Job, Material, run_one
from seps.retrieval.config import RunConfig
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.data.images import decode_all

_LONGEST_REASON = 2000


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, or with the reason why not."""

    job: Job
    result: dict[str, Any] | None
    reason: str = ""


def decode_to(folder: Path, recipe: RunConfig, train: RetrievalDataset, dev: list[RetrievalDataset]) -> list[Path]:
    """Decode the photos of all sets into `folder`, one .npy a set, the training set's first."""
    folder.mkdir(parents=True, exist_ok=True)
    size = recipe.data.size_to_decode(recipe.model.image_size or (224, 224))
    paths = []
    for number, part in enumerate([train, *dev]):
        paths.append(folder / f"pixels-{number}.npy")
        np.save(paths[-1], decode_all(part, size).numpy())
    return paths


def mapped(path: Path) -> Tensor:
    """The array of a .npy file as a tensor whose memory all processes share; writing to it changes a private copy."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def load_material(
    recipe: RunConfig, train: RetrievalDataset, dev: list[RetrievalDataset], pixels: Sequence[Path]
) -> Material:
    """The shared data, with its photos mapped from the files that `decode_to` made."""
    first, *others = map(mapped, pixels)
    return Material(recipe, train, dev, first, others)


def attempt(job: Job, material: Material, runs: Path, device: str, keep: bool) -> Outcome:
    """`run_one`, with whatever goes wrong as a reason instead of an exception."""
    try:
        return Outcome(job, run_one(job, material, runs, device=device, keep=keep))
    except InterruptedError:
        raise
    except Exception as error:  # one bad run must not take the others with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return Outcome(job, None, reason[:_LONGEST_REASON])


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
    material = load_material(shared.recipe, shared.train, shared.dev, setting.pixels)
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
            outcome = Outcome(job, None, f"its process ended with exit code {process.exitcode}")
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
