"""When a photo was taken, as its EXIF block says, and dates as people write them."""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta

from PIL import Image

from seps.images.decoding import opened
from seps.images.formats import is_video
from seps.images.sources import ImageSource

from .shards import read_source

HEAD = 2**18
"""Bytes of a JPEG file in which its EXIF block lies: it comes first, and has at most 64 KiB."""
_EXIF = 0x8769
_TIMES = ((0x9003, 0x9011, 0x9291), (0x9004, 0x9012, 0x9292), (0x0132, 0x9010, 0x9290))
"""Tags of date, offset and parts of a second: of the original, of the digitised picture, of the last change."""
_LIMIT = 2**63 // 10**9
_DATE = re.compile(r"(\d{4})[:-](\d\d)[:-](\d\d)[ T](\d\d):(\d\d)(?::(\d\d))?")
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)|Z")


def date_taken(source: ImageSource) -> int | None:
    """Nanoseconds since 1970 at which an image was taken; None where its file does not say, or cannot be read.

    The offset to UTC is that of the EXIF block, and where it has none that of this machine at that date: cameras write
    the time of their clock.
    """
    if is_video(source.path):
        return None  # a frame is decoded at some cost, and has no EXIF block
    try:
        data = _head(source) if source.member is None and os.path.isfile(source.path) else b""
        return date_of(data if data.startswith(b"\xff\xd8") else read_source(source))
    except Exception:  # Pillow raises almost anything on broken bytes, and a photo without a date is still a photo
        return None


def date_of(data: bytes) -> int | None:
    """As `date_taken`, of the bytes of a file. Raises what Pillow raises for bytes that are no image."""
    # Not PNG's own method, which decodes all pixels to look behind them.
    exif = Image.Image.getexif(opened(data))
    more = exif.get_ifd(_EXIF)
    for date, offset, second in _TIMES:
        found = nanoseconds_of(*(more.get(tag, exif.get(tag)) for tag in (date, offset, second)))
        if found is not None:
            return found
    return None


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


def _head(source: ImageSource) -> bytes:
    with open(source.path, "rb") as file:
        return file.read(HEAD)
