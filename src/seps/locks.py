"""One writer at a time: a lock file for a folder or file, a table of one row for a store in object storage."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import socket
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

_HELD = frozenset({errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK})
_UNSUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})
LOCK_TABLE = "writer"
FREE = ""
"""Token of a lock that no process holds."""
SIGN_SECONDS = 20.0
"""How often the holder of a remote lock renews its time."""
STALE_SECONDS = 120.0
"""Age of that time from which another process may take the lock."""
_STORAGE_ERRORS = (ValueError, RuntimeError, OSError)


class FileInUse(ValueError):
    """Another process writes the same file or store, or has taken the lock over."""


class FileLock:
    """Holds `path` while entered. Raises FileInUse if a living process holds it, OSError if it cannot be made.

    The lock is the operating system's, on the open file, so it ends with its process; the process id in the file is
    only for the message. Network file systems without such locks get a marker file (`filelock.SoftFileLock`), which
    a later process of the same machine removes if its holder was killed.

    flock by hand, because filelock raises on ENOTSUP and, before 4.0, empties a lock file that another process holds.
    """

    def __init__(self, path: Path, subject: Path) -> None:
        self.path = path
        self.subject = subject
        self._handle = -1
        self._marker: Any = None

    def __enter__(self) -> FileLock:
        while self._handle < 0:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                locked = _try_lock(handle)
            except OSError as error:
                os.close(handle)
                if error.errno not in _UNSUPPORTED:
                    raise
                self._enter_marker()
                return self
            if not locked:
                holder = os.read(handle, 200).decode("utf-8", "replace").strip() or "another process"
                os.close(handle)
                raise self._in_use(holder)
            if _same_file(handle, self.path):
                self._handle = handle
            else:  # its holder removed the file after we opened it and before we locked it
                os.close(handle)
        try:
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{_this_process()}\n".encode())
        except BaseException:  # a full disk: `with` calls no `__exit__` for it, and the lock would last
            self.__exit__()
            raise
        return self

    def _enter_marker(self) -> None:
        import filelock

        place = self.path.with_name(self.path.name + ".held")
        marker = filelock.SoftFileLock(place)
        try:
            marker.acquire(timeout=0)
        except filelock.Timeout as error:
            holder = " on ".join(place.read_text(errors="replace").split()[:2]) if place.exists() else "unknown"
            raise self._in_use(
                f"process {holder} (this file system has no locks; if that process is gone, delete {place})"
            ) from error
        self._marker = marker

    def _in_use(self, holder: str) -> FileInUse:
        return FileInUse(f"{self.subject} is being written by {holder}. Wait for it, stop it, or choose another place.")

    def __exit__(self, *_: object) -> None:
        handle, self._handle = self._handle, -1
        marker, self._marker = self._marker, None
        if sys.platform == "win32" and handle >= 0:  # an open file cannot be removed there
            os.close(handle)
            handle = -1
        try:
            self.path.unlink(missing_ok=True)
        finally:
            if marker is not None:
                marker.release()
            elif handle >= 0:
                os.close(handle)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _try_lock(handle: int) -> bool:
    """Lock an open file; False where another process holds it. Raises OSError where it cannot be locked at all."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


class RemoteLock:
    """Holds the store at a `location` in object storage while entered. Raises FileInUse if another process does.

    By hand, because object storage has no locks that end with their process. A small table beside the store has one
    row: who holds the lock, and when the holder last renewed it. A lock that was not renewed for `STALE_SECONDS` may be
    taken over; the former holder notices at its next `check`. Making the table is atomic, and every change of holder
    is one update on the condition that the row is still the one that was read, which the storage grants once.
    """

    def __init__(self, location: str) -> None:
        self._subject = location
        self._table = f"{location.rstrip('/')}/{LOCK_TABLE}.lance"
        self._token = uuid.uuid4().hex
        self._done = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._renew, name="seps-lock", daemon=True)

    def __enter__(self) -> RemoteLock:
        if not self._make():
            self._take_over()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        with contextlib.suppress(*_STORAGE_ERRORS):  # then it is free once it is stale
            self._update(f"token = '{self._token}'", {"token": FREE, "holder": "", "time": 0.0})

    def check(self) -> None:
        """Raise FileInUse if another process took the store over."""
        if self._lost or not self._holds():
            self._lost = True
            raise FileInUse(
                f"{self._subject} was taken over by another process, because this one gave no sign for too long."
            )

    def _mine(self) -> dict[str, Any]:
        return {"token": self._token, "holder": _this_process(), "time": time.time()}

    def _make(self) -> bool:
        try:
            _lance().write_dataset(_arrow_table(self._mine()), self._table, mode="create")
        except _STORAGE_ERRORS as error:
            if "already exists" not in str(error):
                raise
            return False
        return True

    def _take_over(self) -> None:
        """Put our name into a row that is free, or stale. Raises FileInUse."""
        try:
            row = self._row()
        except _STORAGE_ERRORS:  # a row that cannot be read is not free
            row = None
        if row is None:
            raise FileInUse(f"{self._subject} is being written by another process. Wait for it, and run again.")
        token, renewed = str(row["token"]), float(row["time"])
        age = time.time() - renewed
        if token != FREE and age < STALE_SECONDS:
            raise FileInUse(
                f"{self._subject} is being written by {row['holder']}, which gave a sign {age:.0f} seconds ago. Wait "
                f"for it; if it was killed, the store is free {STALE_SECONDS:.0f} seconds after its last sign."
            )
        # The same token with a later time is a holder that was only slow.
        unchanged = f"token = '{token}' AND time < {renewed + 1e-3!r}"
        if self._update(unchanged, self._mine()) != 1 or not self._holds():
            raise FileInUse(
                f"{self._subject} is being written by another process, which was quicker. Wait for it, and run again."
            )
        with contextlib.suppress(*_STORAGE_ERRORS):  # every renewal leaves an old version behind
            _lance().dataset(self._table).cleanup_old_versions(timedelta(days=1))

    def _update(self, condition: str, values: dict[str, Any]) -> int:
        """Change the row if it meets the condition; how many rows did."""
        literals = {name: _sql_literal(value) for name, value in values.items()}
        return int(_lance().dataset(self._table).update(literals, where=condition)["num_rows_updated"])

    def _row(self) -> dict[str, Any] | None:
        rows = _lance().dataset(self._table).to_table(limit=1).to_pylist()
        return dict(rows[0]) if rows else None

    def _holds(self) -> bool:
        try:
            row = self._row()
        except _STORAGE_ERRORS:
            return False
        return row is not None and row["token"] == self._token

    def _renew(self) -> None:
        while not self._done.wait(SIGN_SECONDS):
            # The storage may be back before the lock is stale; `check` tells.
            with contextlib.suppress(*_STORAGE_ERRORS):
                self._update(f"token = '{self._token}'", {"time": time.time()})


def _lance() -> Any:
    return importlib.import_module("lance")  # on first use: locks of files do without


def _arrow_table(row: dict[str, Any]) -> Any:
    return importlib.import_module("pyarrow").Table.from_pylist([row])


def _sql_literal(value: str | float) -> str:
    return repr(value) if isinstance(value, float) else "'" + value.replace("'", "''") + "'"
