"""Index again and again, whenever the folders have changed.

Polling: the folders are listed every few seconds, and only where a listing differs from the last is anything indexed.
It works on every disk, network shares too, where notifications of the system do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seps.images.sources import DataError
from seps.photos.indexing.gallery import walk
from seps.photos.store.rows import StoreError


@dataclass(frozen=True)
class FolderListing:
    """What can change what indexing does."""

    folders: tuple[Any, ...]
    """Of each folder that is there: its pictures with their sizes and times, what is left out, what cannot be read."""
    away: tuple[str, ...]
    """Folders that are not there."""
    texts: tuple[tuple[Any, ...], ...]
    """Files of descriptions with their sizes and times."""


def list_folders(
    folders: Sequence[str], texts: Sequence[str | os.PathLike[str]] = (), exclude: Sequence[str] = ()
) -> FolderListing:
    """List folders, and the files of descriptions in them and those named. Raises DataError for one it cannot read."""
    there = [folder for folder in folders if os.path.isdir(folder)]
    galleries = [walk(folder, exclude) for folder in there]
    files = [*map(Path, texts), *(file for folder in there for file in sorted(Path(folder).glob("*.jsonl")))]
    return FolderListing(
        tuple((str(g.root), tuple(g.images), frozenset(g.left_out), frozenset(g.unread)) for g in galleries),
        tuple(folder for folder in folders if folder not in there),
        tuple((str(file), *_facts(file)) for file in files),
    )


def _facts(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns


@dataclass
class Watch:
    """One watch over folders: `look` lists them, `update` indexes, `tell` says a sentence.

    A fault that lasts, such as a folder that is not there or a store that would lose too much, is said once, and so is
    its end. What was stored stays.
    """

    look: Callable[[], FolderListing]
    update: Callable[[], None]
    tell: Callable[[str], None]
    seen: FolderListing | None = None
    fault: str = ""

    def step(self) -> bool:
        """Look once, and index where something has changed; whether it indexed."""
        fault, changed = "", False
        try:
            now = self.look()
            if now.away:
                fault = f"{', '.join(now.away)} is not there. Is the disk mounted? What the store holds of it stays."
            changed = now != self.seen and bool(now.folders)
            if changed:
                self.update()
            self.seen = now
        except (DataError, StoreError) as error:
            fault, self.seen, changed = str(error), None, False
        if fault and fault != self.fault:
            self.tell(f"{fault} Watching goes on.")
        elif self.fault and not fault:
            self.tell("The folders are there again, and the store is up to date.")
        self.fault = fault
        return changed

    def run(self, wait: Callable[[], None]) -> None:
        """Look, wait, and so on, until an exception such as KeyboardInterrupt ends it."""
        while True:
            self.step()
            wait()
