"""One run at a time in a run folder: two would write over each other's checkpoints and figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from seps.locks import FileLock
from seps.training import distributed as processes

LOCK = ".training.lock"


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Make the run folder and hold it, by the first process, while the context lasts.

    Raises FileInUse (a ValueError) where another run is training into it, ValueError where it cannot be made. The lock
    ends with its process, so that a killed run can be continued at once.
    """
    with ExitStack() as held:
        processes.on_first_rank(lambda: held.enter_context(_lock(run_dir)))
        yield


def _lock(run_dir: Path) -> FileLock:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The run folder {run_dir} cannot be made: {error}.") from error
    folder = Path(os.path.realpath(run_dir))
    return FileLock(folder / LOCK, folder)
