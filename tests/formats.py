"""Tiny files of the formats of real libraries, made by the tests that read them."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def corners(width: int = 96, height: int = 64) -> Image.Image:
    """A picture whose four quarters differ, so that a turned or mirrored one is another picture."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (220, 40, 40)
    pixels[: height // 2, width // 2 :] = (40, 200, 60)
    pixels[height // 2 :, : width // 2] = (50, 60, 210)
    pixels[height // 2 :, width // 2 :] = (230, 220, 60)
    return Image.fromarray(pixels)


def exif_bytes(orientation: int) -> bytes:
    """An EXIF block that says how a picture is turned."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """A picture as the bytes of a file, by Pillow."""
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def heic(image: Image.Image, **options: Any) -> bytes:
    """A picture as HEIC."""
    import pillow_heif

    pillow_heif.register_heif_opener()
    return encoded(image, "HEIF", **{"quality": 90, **options})


def jxl(image: Image.Image, **options: Any) -> bytes:
    """A picture as lossless JPEG XL."""
    import pylibjxl

    return pylibjxl.encode(np.asarray(image), lossless=True, **options)


def dng(preview: bytes | None, size: tuple[int, int], orientation: int = 1, raw: tuple[int, int] = (128, 96)) -> bytes:
    """A DNG file: a JPEG `preview` of this size in its first directory, and a mosaic of `raw` pixels in another."""
    width, height = raw
    mosaic = np.full((height, width), 900, "<u2")
    mosaic[: height // 2] = 3000
    strip = mosaic.tobytes()
    inner = [
        (254, 4, [0]),
        (256, 4, [width]),
        (257, 4, [height]),
        (258, 3, [16]),
        (259, 3, [1]),
        (262, 3, [32803]),
        (273, 4, ["strip"]),
        (277, 3, [1]),
        (278, 4, [height]),
        (279, 4, [len(strip)]),
        (33421, 3, [2, 2]),
        (33422, 1, [0, 1, 1, 2]),
        (50717, 3, [4095]),
    ]
    about = [
        (271, 2, b"Seps\0"),
        (272, 2, b"Tiny\0"),
        (274, 3, [orientation]),
        (50706, 1, [1, 4, 0, 0]),
        (50708, 2, b"Seps Tiny\0"),
        (50721, 10, [1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1]),
        (50778, 3, [21]),
    ]
    if preview is None:
        return _tiff(sorted([*inner, *about], key=lambda tag: tag[0]), {"strip": strip})
    outer = [
        (254, 4, [1]),
        (256, 4, [size[0]]),
        (257, 4, [size[1]]),
        (258, 3, [8, 8, 8]),
        (259, 3, [7]),
        (262, 3, [6]),
        (273, 4, ["preview"]),
        (277, 3, [3]),
        (278, 4, [size[1]]),
        (279, 4, [len(preview)]),
        (330, 4, ["inner"]),
        *about,
    ]
    return _tiff(sorted(outer, key=lambda tag: tag[0]), {"strip": strip, "preview": preview}, inner)


_CODES = {1: "B", 3: "H", 4: "I", 10: "i"}


def _tiff(outer: Sequence[Any], blobs: dict[str, bytes], inner: Sequence[Any] = ()) -> bytes:
    """Two directories one after the other, then the blobs that they point to by name."""
    places: dict[str, int] = {}
    for _ in range(2):  # the second time every place is known
        body = b"II*\0" + struct.pack("<I", 8)
        body += _directory(outer, len(body), places)
        places["inner"] = len(body)
        if inner:
            body += _directory(inner, len(body), places)
        for name, blob in blobs.items():
            places[name] = len(body)
            body += blob + b"\0" * (len(blob) % 2)
    return body


def _directory(tags: Sequence[Any], start: int, places: dict[str, int]) -> bytes:
    head, tail = struct.pack("<H", len(tags)), b""
    after = start + 2 + 12 * len(tags) + 4
    for number, kind, values in tags:
        if isinstance(values, bytes):
            packed, count = values, len(values)
        else:
            numbers = [places.get(value, 0) if isinstance(value, str) else value for value in values]
            packed, count = struct.pack(f"<{len(numbers)}{_CODES[kind]}", *numbers), len(numbers)
            count //= 2 if kind == 10 else 1  # two numbers are one fraction
        head += struct.pack("<HHI", number, kind, count)
        if len(packed) <= 4:
            head += packed.ljust(4, b"\0")
        else:
            head += struct.pack("<I", after + len(tail))
            tail += packed + b"\0" * (len(packed) % 2)
    return head + struct.pack("<I", 0) + tail


def video(
    colours: Sequence[tuple[int, int, int]],
    *,
    seconds_each: float = 10.0,
    size: tuple[int, int] = (96, 64),
    format: str = "mp4",
    codec: str = "libx264",
    rate: int = 2,
    image: Image.Image | None = None,
) -> bytes:
    """A video that shows each colour for some seconds; or a picture, for as long as there are colours."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for colour in colours:
            pixels = np.full((size[1], size[0], 3), colour, np.uint8) if image is None else np.asarray(image)
            for _ in range(int(rate * seconds_each)):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def turned_video(data: bytes, clockwise: int) -> bytes:
    """An MP4 with another matrix in its track header: how a phone says that it was held upright."""
    fixed = {
        90: (0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000),
        270: (0, -0x10000, 0, 0x10000, 0, 0, 0, 0, 0x40000000),
    }
    start = data.index(b"tkhd") + 4 + 40
    return data[:start] + struct.pack(">9i", *fixed[clockwise]) + data[start + 36 :]
