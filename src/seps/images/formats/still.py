"""Pictures of the extra "formats" as Pillow images: HEIC, JPEG XL, and the previews of camera RAW files."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from seps.images.formats import HEIF, JXL, RAW, MissingReader, Reader

LEAST_PREVIEW = 320
"""Longer side from which the preview in a RAW file is used; below, the RAW is decoded at half its size."""
MAX_RAW_PIXELS = 178_956_970
"""Of a RAW file that is decoded at half its size, because it holds no preview."""
_ORIENTATION = 0x0112
_TURNS = {3: 3, 5: 8, 6: 6}
"""EXIF orientation by LibRaw's `flip`."""


def open_still(data: bytes, reader: Reader) -> Any:
    """The image of a file, its pixels not yet decoded (of a RAW: its preview's).

    Raises MissingReader without the package, and what the package raises for broken bytes.
    """
    try:
        return _OPENERS[reader](data)
    except ImportError as error:
        raise MissingReader(reader) from error


def _open_heif(data: bytes) -> Any:
    import pillow_heif

    if "HEIF" not in Image.OPEN:
        pillow_heif.register_heif_opener()
    return Image.OPEN["HEIF"][0](io.BytesIO(data), "")


def _open_jxl(data: bytes) -> Any:
    from pylibjxl.pillow_plugin import JxlImageFile

    return JxlImageFile(io.BytesIO(data), "")


def _open_raw(data: bytes) -> Any:
    import rawpy

    with rawpy.imread(io.BytesIO(data)) as raw:
        preview = _preview(rawpy, raw)
        if preview is not None and max(preview.size) >= LEAST_PREVIEW:
            return preview
        pixels = raw.sizes.raw_width * raw.sizes.raw_height
        if pixels > MAX_RAW_PIXELS:
            if preview is not None:
                return preview
            raise ValueError(f"it has no preview, and {pixels:,} pixels are too many to decode")
        try:
            return Image.fromarray(raw.postprocess(half_size=True, use_camera_wb=True, output_bps=8))
        except rawpy.LibRawError:
            if preview is None:
                raise
            return preview


def _preview(rawpy: Any, raw: Any) -> Any:
    """The picture that the camera put into the file; None where there is none."""
    try:
        thumbnail = raw.extract_thumb()
    except rawpy.LibRawError:
        return None
    if thumbnail.format == rawpy.ThumbFormat.JPEG:
        Image.preinit()
        try:
            image = Image.OPEN["JPEG"][0](io.BytesIO(thumbnail.data), "")
        except SyntaxError:
            return None
    elif thumbnail.format == rawpy.ThumbFormat.BITMAP:
        image = Image.fromarray(thumbnail.data)
    else:
        return None
    exif = image.getexif()
    if _ORIENTATION not in exif and raw.sizes.flip in _TURNS:
        exif[_ORIENTATION] = _TURNS[raw.sizes.flip]
    image.format = RAW.format  # its bytes are not those of the file, so nothing may send these as a JPEG
    return image


_OPENERS = {HEIF: _open_heif, JXL: _open_jxl, RAW: _open_raw}
