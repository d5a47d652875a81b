"""Pictures sent to the service: how many are held at once, how large they may be, and how long they may take."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request

from seps.images.decoding import resized_jpeg, upright_size
from seps.photos.search.searcher import Part, Searcher

UPLOAD_BYTES, UPLOAD_PIXELS = 20 * 2**20, 50_000_000
UPLOADS = 8
"""Pictures in memory at once; what comes beyond is refused before it is read."""
UPLOAD_SECONDS = 30.0
UPLOADED = "upload:"
"""How a query names a picture that was sent; its id follows."""
_HEAD = 4096
_THUMBNAIL = 160


@dataclass(frozen=True)
class Sent:
    """A picture that was sent, as a part of a query."""

    part: Part
    thumbnail: bytes
    """JPEG."""


class Uploads:
    """Counts the pictures that are being read or searched for."""

    def __init__(self) -> None:
        self._held = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Room for one picture, from before its first byte is read. Raises HTTPException 503 when there is none."""
        if self._held >= UPLOADS:
            raise HTTPException(503, "Too many pictures are being searched for. Try again in a moment.")
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1


_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.I | re.S)


class _Upload:
    """Stands for an uploaded picture in messages."""

    def __str__(self) -> str:
        return "that was sent"


UPLOAD: Any = _Upload()


def encode_upload(data: bytes, searcher: Searcher) -> tuple[str, Sent]:
    """The id of an uploaded picture, and the picture as part of a query. Raises UnreadableImage."""
    upright_size(data, UPLOAD, UPLOAD_PIXELS)
    with searcher.running:
        part = searcher.part_of_image(data)
    return hashlib.sha256(data).hexdigest()[:32], Sent(part, resized_jpeg(data, UPLOAD, _THUMBNAIL))


async def bounded_body(request: Request) -> bytes:
    """The body of a request.

    Raises HTTPException 413 as soon as it is known to be too long, 408 if it takes too long, 400 for a false length.
    """
    limit = f"The picture is larger than {UPLOAD_BYTES // 2**20} MiB. Make it smaller."
    try:
        stated = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise HTTPException(400, "The length of the request is not a number.") from None
    if stated > UPLOAD_BYTES:
        raise HTTPException(413, limit)

    async def read() -> bytes:
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > UPLOAD_BYTES:
                raise HTTPException(413, limit)
        return bytes(parts)

    try:
        data = await asyncio.wait_for(read(), UPLOAD_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"The picture took longer than {UPLOAD_SECONDS:.0f} s to come. Try again.") from None
    return data


def picture_in(body: bytes, content_type: str) -> bytes:
    """The picture in a request's body: the whole body, or the first file of a form.

    Raises HTTPException 400 where there is none.
    """
    data = body
    if content_type.lower().startswith("multipart/"):
        boundary = _BOUNDARY.match(content_type)
        if boundary is None:
            raise HTTPException(400, "The form has no boundary. Send it as multipart/form-data; boundary=...")
        data = _file_in(body, (boundary[1] or boundary[2]).encode("latin-1", "replace"))
    if not data:
        raise HTTPException(
            400, "The request holds no picture. Send its bytes as the request's body, or a form's file."
        )
    return data


def _file_in(body: bytes, boundary: bytes) -> bytes:
    """The content of the first part of a form that has a file name; empty where none has."""
    mark = b"\r\n--" + boundary
    form = b"\r\n" + body
    start = form.find(mark)
    while start >= 0:
        start += len(mark)
        head_end = form.find(b"\r\n\r\n", start)
        end = form.find(mark, start)
        if head_end < 0 or end < 0:
            break
        head = form[start : min(head_end, start + _HEAD)].lower()
        if head_end < end and b"content-disposition:" in head and b"filename" in head:
            return form[head_end + 4 : end]
        start = end
    return b""
