"""One writer a store in object storage: a small table beside it that names its holder and the time of its last sign.

Object storage has no locks that die with their process, so the holder signs again and again, and a lock without a
sign for two minutes may be taken over. Whoever lost it that way is told at the next write.

The table has one row. Every change of holder is one update on the condition that the row is still the one that was
read, which the storage grants to one process alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from types import TracebackType
from typing import Any

LOCK = "writer"
FREE = ""
"""Token of a lock that nobody holds."""
SIGN_SECONDS = 20.0
STALE_SECONDS = 120.0
_FAULTS = (ValueError, RuntimeError, OSError)


class RemoteLockHeld(ValueError):
    """Another process writes the store, or took it over."""


class RemoteLock:
    """Holds the store of `connection` while entered. Raises RemoteLockHeld if another process does.

    Making the table is atomic: the storage refuses a second first version of it. `check` raises once the lock is lost.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._token = uuid.uuid4().hex
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._done = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._sign, name="seps-lock", daemon=True)

    def __enter__(self) -> RemoteLock:
        if not self._make():
            self._take_over()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        with contextlib.suppress(*_FAULTS):  # then it is free once it is stale
            self._update(f"token = '{self._token}'", {"token": FREE, "holder": "", "time": 0.0})

    def check(self) -> None:
        """Raise RemoteLockHeld if another process took the store over."""
        if self._lost or not self._holds():
            self._lost = True
            raise RemoteLockHeld("was taken over by another process, because this one gave no sign for too long.")

    def _make(self) -> bool:
        row = {"token": self._token, "holder": self._holder, "time": time.time()}
        try:
            self._connection.create_table(LOCK, data=[row])
        except _FAULTS as error:
            if "already exists" not in str(error):
                raise
            return False
        return True

    def _take_over(self) -> None:
        """Put our name into a row that is free, or without a sign for too long. Raises RemoteLockHeld."""
        try:
            row = self._row()
        except _FAULTS:  # an earlier release gave it back just now
            row = None
        if row is None:
            raise RemoteLockHeld("is being written by another process. Wait for it, and run again.")
        token, signed = str(row["token"]), float(row["time"])
        age = time.time() - signed
        if token != FREE and age < STALE_SECONDS:
            raise RemoteLockHeld(
                f"is being written by {row['holder']}, which gave a sign {age:.0f} seconds ago. Wait for it; if it was "
                f"killed, the store is free {STALE_SECONDS:.0f} seconds after its last sign."
            )
        # The same token with a later sign is a holder that came back to life.
        unchanged = f"token = '{token}' AND time < {signed + 1e-3!r}"
        mine = {"token": self._token, "holder": self._holder, "time": time.time()}
        if self._update(unchanged, mine) != 1 or not self._holds():
            raise RemoteLockHeld("is being written by another process, which was quicker. Wait for it, and run again.")
        with contextlib.suppress(*_FAULTS):  # signs leave old versions behind
            self._connection.open_table(LOCK).to_lance().cleanup_old_versions(timedelta(days=1))

    def _update(self, condition: str, values: dict[str, Any]) -> int:
        """Change the row if it meets the condition; how many rows did."""
        return int(self._connection.open_table(LOCK).update(where=condition, values=values).rows_updated)

    def _row(self) -> dict[str, Any] | None:
        rows = self._connection.open_table(LOCK).search().limit(1).to_list()
        return dict(rows[0]) if rows else None

    def _holds(self) -> bool:
        try:
            row = self._row()
        except _FAULTS:
            return False
        return row is not None and row["token"] == self._token

    def _sign(self) -> None:
        while not self._done.wait(SIGN_SECONDS):
            # The storage may be back before the lock is stale; `check` tells.
            with contextlib.suppress(*_FAULTS):
                self._update(f"token = '{self._token}'", {"time": time.time()})
