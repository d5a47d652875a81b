"""The files of pictures as they are: to open in the browser, or to download.

Only files inside the indexed folder are sent. A file that was written again after it was indexed is sent as it is now
if it still begins like a picture, and refused otherwise: it may be anything by then. Browsers are told a type that can
hold no script, and none of them may guess another.
"""

from __future__ import annotations

import os
import stat
from pathlib import PurePosixPath
from urllib.parse import quote

from fastapi.responses import FileResponse, Response

from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource

_KINDS = (
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftypavif", "image/avif"),
    (0, b"BM", "image/bmp"),
    (0, b"II*\x00", ""),
    (0, b"MM\x00*", ""),
    (0, b"\x00\x00\x00\x0cjP  ", ""),
    (0, b"\xff\x4f\xff\x51", ""),
    (0, b"\xff\x0a", ""),
    (0, b"\x00\x00\x00\x0cJXL ", ""),
    (4, b"ftyp", ""),
    *((0, f"P{number}".encode(), "") for number in range(1, 7)),
)
"""Offset, the bytes there, and the type that browsers show; without one, the file is for downloading."""
_HEAD = 32
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


class NoPictureError(ValueError):
    """The file is there, but begins like no picture."""


def original(source: ImageSource, *, changed: bool, download: bool) -> Response:
    """The file of a picture as an answer, inline where browsers show its type and `download` is not asked for.

    Raises OSError and UnreadableImage where it cannot be read, NoPictureError where it has `changed` and is no picture
    any more.
    """
    data = None
    if source.member is not None:
        data = read_source(source)
        head = data[:_HEAD]
    else:
        with open(source.path, "rb", opener=_plain) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableImage(source, "it is no regular file.")
            head = file.read(_HEAD)
    kind = kind_of(head)
    if kind is None and changed:
        raise NoPictureError("The file is not an image any more.")
    name = PurePosixPath(source.member or str(source.path)).name
    place = "inline" if kind and not download else "attachment"
    headers = {
        "Content-Disposition": f"{place}; filename*=UTF-8''{quote(name, safe='')}",
        "Content-Security-Policy": _POLICY,
        "Cache-Control": "private, no-cache",
    }
    media = kind or "application/octet-stream"
    if data is not None:
        return Response(data, media_type=media, headers=headers)
    return FileResponse(source.path, media_type=media, headers=headers, stat_result=status)


def _plain(path: str, flags: int) -> int:
    """Open without waiting: a named pipe in place of a picture has no writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def kind_of(head: bytes) -> str | None:
    """The type that a browser shows, by a file's first bytes; empty: a picture that none shows; None: no picture."""
    for offset, mark, kind in _KINDS:
        if head[offset : offset + len(mark)] == mark and (kind != "image/webp" or head[:4] == b"RIFF"):
            return kind
    return None
