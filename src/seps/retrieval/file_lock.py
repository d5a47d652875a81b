"""One writer a file: a lock file that names its holder and that the system releases when the holder dies."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


class FileInUse(ValueError):
    """Another process is writing the same file."""


class FileLock:
    """Holds `path` while entered. Raises FileInUse if a living process holds it.

    The lock is the system's, on the open file: one left behind by a killed process holds nobody up, and no
    process id has to be believed. The id in the file is for the message.
    """

    def __init__(self, path: Path, subject: Path) -> None:
        self.path = path
        self.subject = subject
        self._handle = -1

    def __enter__(self) -> FileLock:
        while self._handle < 0:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _try_lock(handle):
                holder = os.read(handle, 200).decode("utf-8", "replace").strip() or "another process"
                os.close(handle)
                raise FileInUse(
                    f"{self.subject} is being written by {holder}. Wait for it, stop it, or choose another --out."
                )
            if _same_file(handle, self.path):
                self._handle = handle
            else:  # its holder removed the file between our opening and our locking it
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform == "win32":  # an open file cannot be removed there
            os.close(self._handle)
            self.path.unlink(missing_ok=True)
        else:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
        self._handle = -1


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
