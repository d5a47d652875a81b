"""Threads for the CPU: one image each, every product on one core.

An image's work is some two hundred operations, most too small to be shared by cores; whole images are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def map_images(work: Callable[[int], Tensor], starts: Iterable[int], threads: int) -> Iterator[Tensor]:
    """`work(start)` for each start, in order, on `threads` threads without gradients."""
    if threads <= 1:
        yield from map(work, starts)
        return
    before = torch.get_num_threads()

    def alone(start: int) -> Tensor:
        # Gradient mode and autocast belong to a thread.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return work(start)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(alone, starts)
    finally:
        torch.set_num_threads(before)
