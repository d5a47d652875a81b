"""Dates as EXIF blocks and people write them. `seps.images.metadata` reads when a photo was taken."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_LIMIT = 2**63 // 10**9
_DATE = re.compile(r"(\d{4})[:-](\d\d)[:-](\d\d)[ T](\d\d):(\d\d)(?::(\d\d))?")
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)|Z")


def nanoseconds_of(date: object, offset: object = None, fraction: object = None) -> int | None:
    """An EXIF date like `2024:05:31 18:20:05`, with its offset (`+02:00`) and digits of a second; None for no date."""
    parts = _DATE.match(_text(date))
    if parts is None:
        return None
    zone = _OFFSET.fullmatch(_text(offset))
    try:
        year, month, day, hour, minute, second = (int(part or 0) for part in parts.groups())
        written = f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{min(second, 59):02}"
        if zone is not None:
            written += "+00:00" if zone[1] is None else f"{zone[1]}{zone[2]}:{zone[3]}"
        seconds = int(datetime.fromisoformat(written).timestamp())
    except (ValueError, OverflowError, OSError):
        return None
    digits = re.match(r"\d{1,9}", _text(fraction))
    if abs(seconds) >= _LIMIT - 1:
        return None
    return seconds * 10**9 + (int(digits[0].ljust(9, "0")) if digits else 0)


def nanoseconds(text: str) -> int:
    """A date like 2024-05-31, or with a time, as nanoseconds since 1970 (local time). Raises ValueError."""
    try:
        seconds = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"The date {text!r} cannot be read; write it like 2024-05-31") from error
    if abs(seconds) >= 2**63 / 1e9:
        raise ValueError(f"The date {text!r} is beyond what file times can hold (1678 to 2261)")
    return int(seconds * 1e9)


def local_time(when: int) -> str:
    """Nanoseconds since 1970 as local time, like 2024-05-31T18:20:05."""
    try:
        return datetime.fromtimestamp(when // 10**9).isoformat()
    except (ValueError, OverflowError, OSError):  # some systems know no date before 1970
        return (datetime(1970, 1, 1) + timedelta(seconds=when // 10**9)).isoformat()


def _text(value: object) -> str:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
    return text.strip("\0 ")
