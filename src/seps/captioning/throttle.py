"""Sending requests politely: a rate limit, retries with back-off and jitter, pauses that a server asks for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .backends import Fault, Health, Rejected, Stopped

T = TypeVar("T")
LONGEST_WAIT = 60.0
LONGEST_PAUSE = 600.0  # a server that asks for more is down; giving up is left to the count of faults


def backoff_delay(tries: int, base: float, jitter: float, cap: float = LONGEST_WAIT) -> float:
    """Seconds before try number `tries` + 1: base doubled each time up to `cap`, times jitter/2 + 1/2."""
    return min(cap, base * 2.0 ** min(max(tries - 1, 0), 60)) * (0.5 + 0.5 * jitter)


class Throttle:
    """Calls functions for many threads; `halt` ends every wait with Stopped."""

    def __init__(
        self, health: Health, halt: threading.Event, *, retries: int, backoff: float, requests_per_minute: float = 0.0
    ) -> None:
        self.health = health
        self.halt = halt
        self.retries = retries
        self.backoff = backoff
        self.interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0
        self._paused_until = 0.0
        self._lock = threading.Lock()

    def call(self, request: Callable[[], T]) -> T:
        """The result of `request`, sent again after a Fault.

        Being told to slow down (`limited`) uses up no retry, but counts as a fault in a row. Raises the last
        Fault, Rejected at once, Fatal when the faults in a row are too many, Stopped when halted.
        """
        tries = 0
        limited = 0
        while True:
            self._wait_for_turn()
            try:
                result = request()
            except Rejected as error:
                self.health.failed(error)
                raise
            except Fault as fault:
                self.health.failed(fault)
                tries, limited = (tries, limited + 1) if fault.limited else (tries + 1, limited)
                if tries > self.retries:
                    raise
                self._back_off(fault, tries + limited)
            else:
                self.health.succeeded()
                return result

    def _wait_for_turn(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                start = max(self._next, self._paused_until)
                if start <= now:
                    self._next = now + self.interval
                    break
            self._sleep(min(start - now, 0.5))
        if self.halt.is_set():
            raise Stopped

    def _back_off(self, fault: Fault, tries: int) -> None:
        delay = backoff_delay(tries, self.backoff, random.random())
        if fault.retry_after is not None:
            pause = min(max(fault.retry_after, 0.0), LONGEST_PAUSE)
            # One thread was told: all wait, then start apart from each other by the jitter.
            with self._lock:
                self._paused_until = max(self._paused_until, time.monotonic() + pause)
            delay = pause + random.random() * min(self.backoff, 1.0)
        self._sleep(delay)

    def _sleep(self, seconds: float) -> None:
        if self.halt.wait(max(seconds, 0.0)):
            raise Stopped
