"""Memory that the C library of Linux keeps for later, given back to the system: it counts as the process's own."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of `mallopt`, from <malloc.h>."""
_LARGE, _FREE = 4 << 20, 16 << 20


@functools.cache
def _c_library() -> Any:
    """The C library, or None where it is another one than glibc, which alone has these functions."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


def hold_little_memory() -> None:
    """Let the threads of this process share one heap, and large tensors go back to the system when they are freed.

    NumPy computes its products on the thread that calls, without threads and buffers of its own, and Arrow takes its
    memory from the same heap. For a process that runs one command, before it starts threads and imports either.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    library = _c_library()
    if library is not None:
        for name, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _FREE)):
            library.mallopt(name, value)


def release_free_memory() -> None:
    """Give back what is free now, for example after a model was read."""
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)
