"""Ctrl-C and SIGTERM ask a run to stop after its step; a second Ctrl-C stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class InterruptGuard:
    """While entered, `requested` turns true at the first SIGINT or SIGTERM instead of ending the process.

    Only a second SIGINT raises KeyboardInterrupt: torchrun follows a Ctrl-C with a SIGTERM of its own, which
    must not count as impatience. Outside the main thread, where python forbids handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
