"""OpenVINO without its reports: importing it sends an event to its makers, from a process that it forks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_PACKAGE = "openvino_telemetry"


@contextlib.contextmanager
def without_telemetry() -> Iterator[None]:
    """While the context lasts, the package that sends OpenVINO's reports counts as not installed.

    OpenVINO then takes a stub of its own, for good. The fork matters as well: the child could wait forever for a lock
    that a thread of the database held.
    """
    modules: dict[str, Any] = sys.modules
    if _PACKAGE in modules:
        yield
        return
    modules[_PACKAGE] = None  # an import of it raises ModuleNotFoundError
    try:
        yield
    finally:
        del modules[_PACKAGE]
