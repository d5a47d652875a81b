"""One image from its bytes to what the model and the store need: pixels, size, thumbnail, digest."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from seps.retrieval.data import ImageSource, UnreadableImage, read_source
from seps.retrieval.data.images import FORMATS, MAX_PIXELS, decode_image

THUMBNAIL = 160
_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Picture:
    """A decoded image."""

    pixels: Tensor
    """(3, height, width) uint8 at the model's size."""
    sha256: str
    width: int
    height: int
    """Of the image itself, upright."""
    thumbnail: bytes
    """JPEG, its longer side `THUMBNAIL`."""


def read_picture(source: ImageSource, size: tuple[int, int]) -> Picture:
    """Read and decode one image; `size` is the model's (height, width). Raises UnreadableImage."""
    return decode_picture(read_source(source), source, size)


def decode_picture(data: bytes, source: ImageSource, size: tuple[int, int]) -> Picture:
    """As `read_picture`, for bytes already read; `source` is for messages. Raises UnreadableImage."""
    pixels = decode_image(data, source, size)
    width, height = upright_size(data, source)
    return Picture(pixels, hashlib.sha256(data).hexdigest(), width, height, resized_jpeg(data, source, THUMBNAIL))


def upright_size(data: bytes, source: ImageSource, limit: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) after turning by EXIF, from the head of the file. Raises UnreadableImage above `limit`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except Image.DecompressionBombError as error:  # Pillow's own limit; the size is not known then
        raise UnreadableImage(source, f"it has more than {limit:,} pixels. Make it smaller.") from error
    except Exception as error:  # Pillow raises almost anything on broken bytes
        raise UnreadableImage(source, "it is not an image in a known format.") from error
    if width * height > limit:
        raise UnreadableImage(source, f"it has {width} x {height} pixels, more than {limit:,}. Make it smaller.")
    return (height, width) if turned else (width, height)


def resized_jpeg(data: bytes, source: ImageSource, longest: int) -> bytes:
    """The image as JPEG, upright, its longer side at most `longest` pixels."""
    width, height = upright_size(data, source)
    scale = min(1.0, longest / max(width, height))
    target = (max(1, round(height * scale)), max(1, round(width * scale)))
    small = Image.fromarray(decode_image(data, source, target).permute(1, 2, 0).numpy())
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80)
    return out.getvalue()
