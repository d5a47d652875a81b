"""One writer a store in object storage: a small table beside it that names its holder and the time of its last sign.

Object storage has no locks that die with their process, so the holder signs again and again, and a lock without a
sign for two minutes may be taken over. Whoever lost it that way is told at the next write.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from types import TracebackType
from typing import Any

LOCK = "writer"
SIGN_SECONDS = 20.0
STALE_SECONDS = 120.0


class RemoteLockHeld(ValueError):
    """Another process writes the store, or took it over."""


class RemoteLock:
    """Holds the store of `connection` while entered. Raises RemoteLockHeld if another process does.

    Making the table is atomic: the storage refuses a second first version of it. `check` raises once the lock is lost.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._token = uuid.uuid4().hex
        self._done = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._sign, name="seps-lock", daemon=True)

    def __enter__(self) -> RemoteLock:
        if not self._make():
            holder, age = self._holder()
            if age < STALE_SECONDS:
                raise RemoteLockHeld(
                    f"is being written by {holder}, which gave a sign {age:.0f} seconds ago. Wait for it; if it was "
                    f"killed, the store is free {STALE_SECONDS:.0f} seconds after its last sign."
                )
            self._connection.drop_table(LOCK, ignore_missing=True)
            if not self._make():
                raise RemoteLockHeld("is being written by another process. Wait for it, and run again.")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if not self._lost and self._holds():
            self._connection.drop_table(LOCK, ignore_missing=True)

    def check(self) -> None:
        """Raise RemoteLockHeld if another process took the store over."""
        if self._lost or not self._holds():
            self._lost = True
            raise RemoteLockHeld("was taken over by another process, because this one gave no sign for too long.")

    def _make(self) -> bool:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        row = {"token": self._token, "holder": holder, "time": time.time()}
        try:
            self._connection.create_table(LOCK, data=[row])
        except (ValueError, RuntimeError, OSError) as error:
            if "already exists" not in str(error):
                raise
            return False
        return True

    def _row(self) -> dict[str, Any] | None:
        rows = self._connection.open_table(LOCK).search().limit(1).to_list()
        return dict(rows[0]) if rows else None

    def _holder(self) -> tuple[str, float]:
        try:
            row = self._row()
        except (ValueError, RuntimeError, OSError):  # it was given back just now
            row = None
        return ("another process", 0.0) if row is None else (str(row["holder"]), time.time() - float(row["time"]))

    def _holds(self) -> bool:
        try:
            row = self._row()
        except (ValueError, RuntimeError, OSError):
            return False
        return row is not None and row["token"] == self._token

    def _sign(self) -> None:
        while not self._done.wait(SIGN_SECONDS):
            try:
                table = self._connection.open_table(LOCK)
                table.update(where=f"token = '{self._token}'", values={"time": time.time()})
            except (ValueError, RuntimeError, OSError):
                continue  # the storage may be back before the lock is stale; `check` tells
