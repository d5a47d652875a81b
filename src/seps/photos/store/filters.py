"""Which pictures of a store a search may find."""

from __future__ import annotations

import math
import os
import posixpath
import unicodedata
from dataclasses import dataclass

from seps.images.dates import local_time

WITHIN = 10.0
"""Kilometres around a place, where none are given."""
EARTH = 6371.0088
"""Mean radius in kilometres."""
_MOST_PIXELS = 2**31 - 1
"""What the columns `width` and `height` can hold."""


def place_of(text: str) -> tuple[float, float]:
    """(latitude, longitude) of a text like 48.86,2.35. Raises ValueError."""
    try:
        latitude, longitude = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"The place {text!r} cannot be read; write it as latitude,longitude, like 48.86,2.35"
        ) from None
    return latitude, longitude


def _distance(latitude: float, longitude: float) -> str:
    """The great-circle distance of a picture from a place in kilometres, as SQL; NULL for one without coordinates."""
    north = f"power(sin(radians(latitude - {latitude!r}) / 2), 2)"
    east = f"power(sin(radians(longitude - {longitude!r}) / 2), 2)"
    return f"{2 * EARTH} * asin(sqrt({north} + cos(radians({latitude!r})) * cos(radians(latitude)) * {east}))"


@dataclass(frozen=True)
class Filters:
    """Which images a search may find: those that fit all fields that are not None.

    `folder`, `since` <= date < `until`, `min_size`, `near` and `within` are for callers; `Store.allowed` sets the other
    fields.
    """

    folder: str | None = None
    """Path below the indexed folder, or one tar shard; absolute for a further folder of the store."""
    since: int | None = None
    until: int | None = None
    """Nanoseconds since 1970; the date is when the photo was taken or, where that is not known, its file's time."""
    min_size: int | None = None
    """Pixels of the shorter side."""
    near: tuple[float, float] | None = None
    """(latitude, longitude) in degrees: only pictures taken at most `within` kilometres from there."""
    within: float | None = None
    """Default: `WITHIN`."""
    all_rows: bool = True
    """Also those that are excluded; `Store.allowed` leaves them out."""
    first_root: bool = False
    """Only pictures of the store's first folder; `Store.allowed` sets it where `folder` is that one."""

    def __post_init__(self) -> None:
        """Raises ValueError for dates and places that no picture can have."""
        if self.folder is not None:
            object.__setattr__(self, "folder", os.fspath(self.folder))
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError(
                f"No picture is of {local_time(self.since)} or later and from before {local_time(self.until)}: the "
                "second date must be later, and is itself left out."
            )

        if self.near is not None and not (abs(self.near[0]) <= 90 and abs(self.near[1]) <= 180):
            raise ValueError(f"{self.near} is no place: latitude is -90 to 90, longitude -180 to 180 degrees.")
        if self.within is not None and not 0 < self.within < math.inf:
            raise ValueError(f"within is {self.within}; it must be a number of kilometres above 0.")
        if self.within is not None and self.near is None:
            raise ValueError("within is the kilometres around a place: give near (--near LAT,LON), too.")

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
        if self.near is not None:
            parts.append(_distance(*map(float, self.near)) + f" <= {float(self.within or WITHIN)}")
        if self.first_root:
            parts.append("NOT starts_with(path, '/')")
        if not self.all_rows:
            parts.append("(excluded IS NULL OR NOT excluded)")
        return " AND ".join(parts) or None
