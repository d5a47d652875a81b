"""Read the text in a store's pictures, each once: what was read is written as it comes, and a later run continues."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from seps.images.ocr import TextReader
from seps.images.shards import UnreadableImage, read_source
from seps.photos.indexing.gallery import Problem
from seps.photos.store.rows import StoreError, shown_place
from seps.photos.store.store import Store, writer_lock

COMMIT_PICTURES, COMMIT_SECONDS = 64, 15.0


@dataclass
class ReadingReport:
    """What one run of reading did."""

    read: int = 0
    """Pictures in which text was looked for."""
    with_text: int = 0
    """Those of them that have some."""
    problems: list[Problem] = field(default_factory=list)
    """Pictures that cannot be read now; they stay for a later run."""
    seconds: float = 0.0


def read_texts(
    location: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> ReadingReport:
    """Look for text in the pictures of a store in which it was not looked for; `progress(done, total)` counts them.

    Safe to interrupt anywhere and to run again. Raises DataError where the package is not installed, StoreError for a
    store that is being written.
    """
    start, report, reader = time.monotonic(), ReadingReport(), TextReader()
    Store.open(location)  # the lock would make a folder where there is no store
    with writer_lock(str(location)):
        store = Store.open(location)
        ids = store.unread()
        found: dict[str, str] = {}
        committed = time.monotonic()
        try:
            for done, identity in enumerate(ids, 1):
                text = _text(store, identity, reader, report)
                if text is not None:
                    found[identity] = text
                    report.read += 1
                    report.with_text += bool(text)
                if len(found) >= COMMIT_PICTURES or time.monotonic() - committed > COMMIT_SECONDS:
                    store.put_texts(found)
                    found, committed = {}, time.monotonic()
                if progress is not None:
                    progress(done, len(ids))
        finally:  # also after Ctrl-C: what was read is kept
            store.put_texts(found)
        if ids:
            store.tidy()
    report.seconds = time.monotonic() - start
    return report


def _text(store: Store, identity: str, reader: TextReader, report: ReadingReport) -> str | None:
    """The text of one picture; None where its file cannot be read, or is not the one that was indexed."""
    row = store.get(identity, ["path", "member", "sha256"])
    if row is None:
        return None
    try:
        source = store.settings.source(row)
        data = read_source(source)
        if hashlib.sha256(data).hexdigest() == row["sha256"]:
            return reader.text(data, source)
        why = "the file has changed since it was indexed; run seps index again"
    except UnreadableImage as error:
        why = error.why
    except StoreError as error:
        why = str(error)
    report.problems.append(Problem(shown_place(row["path"], row["member"]), why))
    return None
