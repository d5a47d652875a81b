"""One writer a file: a lock file that names its holder and that the system releases when the holder dies.

Some network file systems have no such locks. There a marker file names the holder instead; one left behind by a killed
process of the same machine is recognised and removed (`filelock.SoftFileLock`).
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from typing import Any

_HELD = frozenset({errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK})
_UNSUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})


class FileInUse(ValueError):
    """Another process is writing the same file."""


class FileLock:
    """Holds `path` while entered. Raises FileInUse if a living process holds it, OSError if it cannot be made.

    The lock is the system's, on the open file: one left behind by a killed process holds nobody up, and no
    process id has to be believed. The id in the file is for the message.
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
            else:  # its holder removed the file between our opening and our locking it
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
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
        if self._marker is not None:
            self.path.unlink(missing_ok=True)
            self._marker.release()
            self._marker = None
        elif sys.platform == "win32":  # an open file cannot be removed there
            os.close(self._handle)
            self.path.unlink(missing_ok=True)
        else:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
        self._handle = -1


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
