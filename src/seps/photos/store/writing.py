"""A store is held by one writer at a time, in a folder by a file and in object storage by an object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from seps.locks import FileInUse, FileLock, RemoteLock
from seps.photos.store.rows import StoreError, is_remote

REMOTE_LOCKS: dict[str, RemoteLock] = {}
"""Remote locks that this process holds, by store."""


@contextlib.contextmanager
def writer_lock(location: str) -> Iterator[None]:
    """Hold a store for writing. Raises StoreError while another process writes it, or if it cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            if is_remote(location):
                REMOTE_LOCKS[location] = stack.enter_context(RemoteLock(location))
                stack.callback(REMOTE_LOCKS.pop, location)
            else:
                place = Path(location)
                for folder in (*reversed(place.parents), place):
                    if not folder.exists():
                        stack.callback(_remove_empty, folder)  # where nothing comes to be written
                place.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(place / "writer.lock", place))
        except FileInUse as error:
            raise StoreError(f"The store {error} What was written is kept.") from error
        except OSError as error:
            raise StoreError(
                f"The store {location} cannot be written ({error.strerror or error}). Look at its permissions and at "
                "the disk, or name another folder with --store. Nothing was changed."
            ) from error
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
