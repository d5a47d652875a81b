"""Images as a describing model gets them: whole, upright, RGB."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from seps.retrieval.data import ImageSource, UnreadableImage
from seps.retrieval.data.images import FORMATS, MAX_PIXELS, _rgb, _sentence, _upright

SENT_AS_THEY_ARE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
_ORIENTATION = 0x0112


def open_picture(data: bytes, source: ImageSource, max_side: int = 0) -> Any:
    """The decoded PIL image, no side longer than `max_side` (0: any). Raises UnreadableImage."""
    try:
        image = _rgb(_upright(_opened(data)))
        if max_side and max(image.size) > max_side:
            image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
        return image
    except Exception as error:  # Pillow's decoders raise almost anything on broken bytes
        raise UnreadableImage(source, f"{_why(error)} Replace it or take it out of the data.") from error


def data_url(data: bytes, source: ImageSource, max_side: int = 0) -> str:
    """The image as a `data:` URL. Raises UnreadableImage.

    Photos go as they are; those that lie on their side, are too long, or are of a format that servers do not
    read are encoded anew, upright: not every server looks at the EXIF block.
    """
    try:
        image = _opened(data)
        kind = SENT_AS_THEY_ARE.get(image.format)
        animated = getattr(image, "is_animated", False)
        turned = image.getexif().get(_ORIENTATION, 1) != 1
        fits = not max_side or max(image.size) <= max_side
        if kind is not None and fits and not turned and not animated:
            image.load()
            return _url(kind, data)
    except Exception as error:
        raise UnreadableImage(source, f"{_why(error)} Replace it or take it out of the data.") from error
    buffer = io.BytesIO()
    lossless = image.format in ("PNG", "GIF", "BMP")
    options: dict[str, Any] = {} if lossless else {"quality": 95}
    open_picture(data, source, max_side).save(buffer, "PNG" if lossless else "JPEG", **options)
    return _url("image/png" if lossless else "image/jpeg", buffer.getvalue())


def _opened(data: bytes) -> Any:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    return image


def _why(error: Exception) -> str:
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"it has more than {MAX_PIXELS:,} pixels."
    return _sentence(error)


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
