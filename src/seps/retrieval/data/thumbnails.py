"""One image from its bytes to what the model and the store need: pixels, size, thumbnail, digest."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from seps.retrieval.data import ImageSource, read_source
from seps.retrieval.data.images import Mode, Upright, decode_upright, pixels_of, side_for, upright_size

__all__ = ["THUMBNAIL", "Picture", "decode_picture", "read_picture", "resized_jpeg", "upright_size"]

THUMBNAIL = 160


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


def read_picture(source: ImageSource, size: tuple[int, int], mode: Mode = "model") -> Picture:
    """Read and decode one image; `size` is the model's (height, width). Raises UnreadableImage."""
    return decode_picture(read_source(source), source, size, mode)


def decode_picture(data: bytes, source: ImageSource, size: tuple[int, int], mode: Mode = "model") -> Picture:
    """As `read_picture`, for bytes already read; `source` is for messages. Decodes once. Raises UnreadableImage."""
    decoded = decode_upright(data, source, side_for(size, mode))
    pixels = pixels_of(decoded, source, size, mode)
    digest = hashlib.sha256(data).hexdigest()
    return Picture(pixels, digest, decoded.width, decoded.height, _jpeg(decoded, THUMBNAIL))


def resized_jpeg(data: bytes, source: ImageSource, longest: int) -> bytes:
    """The image as JPEG, upright, its longer side at most `longest` pixels. Raises UnreadableImage."""
    return _jpeg(decode_upright(data, source, 2 * longest), longest)


def _jpeg(decoded: Upright, longest: int) -> bytes:
    scale = min(1.0, longest / max(decoded.width, decoded.height))
    target = (max(1, round(decoded.width * scale)), max(1, round(decoded.height * scale)))
    out = io.BytesIO()
    decoded.image.resize(target, Image.Resampling.BICUBIC).save(out, "JPEG", quality=80)
    return out.getvalue()
