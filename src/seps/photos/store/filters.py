"""Which pictures of a store a search may find."""

from __future__ import annotations

import os
import posixpath
import unicodedata
from dataclasses import dataclass

from seps.images.dates import local_time

_MOST_PIXELS = 2**31 - 1
"""What the columns `width` and `height` can hold."""


@dataclass(frozen=True)
class Filters:
    """Which images a search may find: those that fit all fields that are not None.

    `folder`, `since` <= date < `until` and `min_size` are for callers; `Store.allowed` sets the other fields.
    """

    folder: str | None = None
    """Path below the indexed folder, or one tar shard; absolute for a further folder of the store."""
    since: int | None = None
    until: int | None = None
    """Nanoseconds since 1970; the date is when the photo was taken or, where that is not known, its file's time."""
    min_size: int | None = None
    """Pixels of the shorter side."""
    all_rows: bool = True
    """Also those that are excluded; `Store.allowed` leaves them out."""
    first_root: bool = False
    """Only pictures of the store's first folder; `Store.allowed` sets it where `folder` is that one."""

    def __post_init__(self) -> None:
        """Raises ValueError for dates that no picture can have."""
        if self.folder is not None:
            object.__setattr__(self, "folder", os.fspath(self.folder))
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError(
                f"No picture is of {local_time(self.since)} or later and from before {local_time(self.until)}: the "
                "second date must be later, and is itself left out."
            )

    def clause(self) -> str | None:
        """As a condition in SQL; None without any."""
        parts = []
        folder = posixpath.normpath((self.folder or "").strip("/") or ".").replace("'", "''")
        if folder != ".":
            # One name can be composed or decomposed Unicode, and systems differ in which they store and type.
            names = dict.fromkeys([folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD"))])
            if (self.folder or "").startswith("/"):
                names |= {f"/{name}": None for name in names}
            parts.append("(" + " OR ".join(f"starts_with(path, '{name}/') OR path = '{name}'" for name in names) + ")")
        if self.since is not None:
            parts.append(f"COALESCE(taken, mtime) >= {int(self.since)}")
        if self.until is not None:
            parts.append(f"COALESCE(taken, mtime) < {int(self.until)}")
        if self.min_size:
            size = min(max(int(self.min_size), 0), _MOST_PIXELS)
            parts.append(f"(width >= {size} AND height >= {size})")
        if self.first_root:
            parts.append("NOT starts_with(path, '/')")
        if not self.all_rows:
            parts.append("(excluded IS NULL OR NOT excluded)")
        return " AND ".join(parts) or None
