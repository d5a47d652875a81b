"""What this machine can do at most: its own matrix products and copies, measured in the same run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def clock(work: Callable[[], object], device: torch.device, repeats: int = 3, warm: bool = True) -> float:
    """Seconds of the fastest of `repeats` runs, after one to warm up unless that is not `warm`."""
    if warm:
        work()
    best = float("inf")
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Device, threads, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    try:
        import triton

        kernels = triton.__version__
    except ImportError:
        kernels = None
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "triton": kernels}


def limits(device: torch.device, quick: bool) -> dict[str, float]:
    """Measured TFLOP/s of float32 and half matrix products, and GB/s of a copy."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else (512 if quick else 1024)
    result = {}
    for name, dtype in (("float32", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        if not cuda and dtype != torch.float32:
            continue
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = clock(partial(torch.matmul, left, right), device, 5)
        result[f"{name}_tflops"] = 2 * size**3 / seconds / 1e12
    source = torch.zeros(2**28 if cuda else 2**24, device=device)
    target = torch.empty_like(source)
    result["copy_gbs"] = 2 * source.numel() * 4 / clock(lambda: target.copy_(source), device, 5) / 1e9
    return result


class PeakMemory:
    """Most bytes a block of code held on the GPU beyond what was there before; 0 on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            synchronise(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            synchronise(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
