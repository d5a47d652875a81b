"""Threads that compute on their own cores."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


def cores_used() -> int:
    """The cores that one computation uses: torch's number where it is loaded, else all that this process may use."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return max(1, int(torch.get_num_threads()))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def computing_threads(workers: int, name: str, cores_each: int = 1) -> ThreadPoolExecutor:
    """A pool whose threads use `cores_each` cores within torch; the caller's own number stays as it is.

    Several pieces of work on one core each are faster than one after the other on all cores: the cores wait for each
    other once per piece and not at every matrix product. Where torch is not loaded nothing is set.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ThreadPoolExecutor(workers, thread_name_prefix=name)
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=_use_cores, initargs=(cores_each,))
    # What one thread sets is also what later ones begin with: all start now, then ours is set again.
    started = threading.Barrier(workers + 1)
    for _ in range(workers):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(before)
    return pool


def _use_cores(count: int) -> None:
    import torch

    torch.get_num_threads()  # a thread's first question sets its number to the process's, so ask before setting it
    torch.set_num_threads(count)
