"""Where a store is: a folder or object storage, opened for reading or writing, and held by one writer at a time."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from seps.extras import install_command
from seps.locks import FileInUse, FileLock, RemoteLock
from seps.photos.store.rows import TABLE, StoreError, StoreSettings

ERRORS = (ValueError, RuntimeError, OSError)
"""What Lance raises."""
REMOTE_LOCKS: dict[str, RemoteLock] = {}
"""Remote locks that this process holds, by store."""


def open_dataset(location: str) -> Any:
    """The table of a store at its newest commit. Raises StoreError without the packages."""
    return _lance().dataset(_table_place(location))


def create_dataset(location: str, schema: Any) -> Any:
    """An empty table of a store. Raises StoreError without the packages, and what Lance raises where there is one."""
    return _lance().write_dataset(schema.empty_table(), _table_place(location), mode="create")


def made_by(settings: StoreSettings) -> StoreSettings:
    """What must stay the same while a store is open; its folders, levels, exclusions and calibration may change."""
    return replace(
        settings,
        root="",
        text_hash="",
        bank="",
        calibration={},
        calibrated="",
        more_roots=(),
        removed_roots=(),
        excluded=0,
        unreadable={},
    )


def newest_settings(dataset: Any, known: StoreSettings, where: str) -> StoreSettings:
    """What a table says of itself now, where it is still of the same model and state as `known` says; else `known`."""
    try:
        found = StoreSettings.from_json(dataset.schema.metadata[b"seps"].decode("utf-8", "replace"), where)
    except (StoreError, KeyError, TypeError):
        return known
    return found if made_by(found) == made_by(known) else known


def _table_place(location: str) -> str:
    # By its whole path, since a name may hold a colon.
    place = location.rstrip("/") if is_remote(location) else os.path.abspath(location)
    return f"{place}/{TABLE}.lance"


def _lance() -> Any:
    os.environ.setdefault("LANCE_LOG", "error")
    try:
        return importlib.import_module("lance")
    except ImportError as error:
        raise StoreError(f"The store needs the package pylance ({error}): {install_command('lance')}") from error


def is_remote(location: str) -> bool:
    """Whether the location is a URI (object storage) and not a folder."""
    return "://" in location


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


def first_line(error: Exception) -> str:
    """The first line of an error, without the place in a library's source."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.split(r", (?:/|rust/)\S+\.rs:", text)[0].rstrip(".")
