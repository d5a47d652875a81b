"""From the bytes of an image to what the model and the store need: pixels of one size, thumbnail, digest.

Images are decoded with Pillow, upright and RGB; formats that it does not read come as Pillow images from `readers`.
Every command makes the pixels a model sees in one way, the mode
"model" (the default): the image is stretched to 8/7 of the size, as training keeps its photos, and then sampled
bilinearly, as training samples its crops. It was chosen on dev (docs/retrieval-results.md).

A file from the outside is never trusted: formats are a fixed list, pixels are bounded before decoding, and
whatever a decoder raises comes out as `UnreadableImage` with the file's name.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from PIL import Image, ImageOps

from seps.images.formats import MissingReader, reader_for
from seps.images.formats.still import open_still
from seps.images.sizes import stored_size
from seps.images.sources import DataError, ImageSource

from .shards import UnreadableImage, read_source

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["model", "resize", "center-crop", "array"]
"""How an image is brought to a size.

"model": as a model sees it when it does not train. "resize": stretched at once (what training keeps of its photos, and
what stores without a note of their way hold). "center-crop": keeps its shape and cuts off what sticks out.
"array": as "model", a NumPy array for engines without torch.
"""

PixelMaker = Callable[[Any], Any]
"""Makes what a model of its own preprocessing takes of one image (PIL, upright, RGB), in place of a `Mode`."""

# Pillow also opens formats that run programs (EPS) or hold vectors; a gallery of photos needs none of them.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_TURNED_BY_DECODER = ("HEIF", "JXL")
"""Formats that say themselves how a picture is turned; their EXIF block repeats it, and must not turn it again."""
MAX_PIXELS = 89_478_485  # Pillow's own default: a quarter of a gigabyte of RGB
MAX_JPEG_PIXELS = 3 * MAX_PIXELS
"""Of a JPEG file that is decoded at a half or less: its bytes must still be read, though its pixels are never held."""
MAX_DECODED_BYTES = 768 * 2**20
"""Memory of one decoding, beside the bytes of the file: a HEIC picture of 67 million pixels, a JPEG 2000 of 40."""
STRIP_PIXELS = 2**20
"""Pixels that are brought to RGB at once."""
_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I": 4}
"""As Pillow holds a pixel, by mode; four for all others."""
_DECODER_BYTES = {"WEBP": 10, "AVIF": 6, "HEIF": 4, "JXL": 8}
"""What the decoder of a format holds of a pixel beside the image, as measured."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation."""
_SWAPPING = {_TURNS[number] for number in (5, 6, 7, 8)}
_TOP_STAYS_FIRST = {_TURNS[number] for number in (2, 5, 8)}
"""Turns after which the upper strips of an image are its upper strips, or its left ones."""
_EXIF_KEYS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
"""Where Pillow keeps how an image is turned."""
THUMBNAIL = 160
LEAST_SIDE = 320
"""A JPEG is never decoded smaller than this for a model, so that one decoding serves the thumbnail too."""
READ_AHEAD = 128
"""Pictures that an `ImageReader` begins before the first of them is taken: two batches of a GPU, 20 MB at 224 px."""


@dataclass(frozen=True)
class Upright:
    """A decoded image, upright and RGB."""

    image: Any
    """PIL; a JPEG may be decoded at a half, a quarter or an eighth of its size."""
    width: int
    height: int
    """Of the file, upright."""


def read_image(source: ImageSource, size: tuple[int, int], mode: Mode = "model") -> Tensor:
    """(3, height, width) uint8 RGB of one image; `size` is (height, width), `mode` as in `Mode`.

    The EXIF orientation is applied, transparency lies on white, animations give one frame.
    Raises UnreadableImage, which names the file.
    """
    pixels: Tensor = decode_image(read_source(source), source, size, mode)
    return pixels


def decode_image(data: bytes, source: ImageSource, size: tuple[int, int], mode: Mode | PixelMaker = "model") -> Any:
    """As `read_image`, for bytes already read; `source` is for messages. With a `PixelMaker`, what it makes."""
    return pixels_of(decode_upright(data, source, side_for(size, mode)), source, size, mode)


def side_for(size: tuple[int, int], mode: Mode | PixelMaker) -> int:
    """The side that `decode_upright` needs to keep for pixels of this size and mode."""
    if callable(mode):
        return max(LEAST_SIDE, 2 * max(size))
    height, width = _checked_size(size, mode)
    # Twice the target leaves the resize enough to average; the larger side covers images that EXIF turns.
    as_model = mode in ("model", "array")
    return max(LEAST_SIDE, 2 * max(stored_size((height, width)))) if as_model else 2 * max(height, width)


def decode_upright(data: bytes, source: ImageSource, side: int) -> Upright:
    """Decode once, whatever is made of it. A JPEG is decoded smaller where both its sides stay above `side`.

    Raises UnreadableImage for broken bytes, and before decoding for more than `MAX_PIXELS` pixels or
    `MAX_DECODED_BYTES` of memory.
    """
    if not data:
        raise UnreadableImage(source, "the file is empty. Replace it or take it out of the data.", "empty")
    try:
        image = opened(data, source)
        width, height = image.size
        image.draft(None, (side, side))
        whole = image.size == (width, height) or bool(image.info.get("progressive"))
        limit = MAX_PIXELS if whole else MAX_JPEG_PIXELS
        if width * height <= limit:
            needed = _bytes_to_decode(image, width, height)
            if needed <= MAX_DECODED_BYTES:
                image.load()
                size = (height, width) if _turned(image) else (width, height)
                return Upright(_upright_rgb(image), *size)
            most = f"{needed >> 20} MiB of memory, and more than {MAX_DECODED_BYTES >> 20} MiB are not used"
            why = f"its {width} x {height} pixels take {most}."
        else:
            why = f"it has {width} x {height} pixels, and more than {limit:,} pixels are not decoded."
    except Exception as error:  # Pillow's decoders raise almost anything on broken bytes
        raise _unreadable(source, error) from error
    raise UnreadableImage(source, f"{why} Make it smaller.", "too large")


def as_file(image: Any) -> bytes:
    """A Pillow image as the bytes of a file, so that it is seen as its own file is: upright, transparency on white.

    Raises UnreadableImage for pixels that cannot be shown.
    """
    out = io.BytesIO()
    as_upright(image).image.save(out, "PNG")
    return out.getvalue()


def as_upright(image: Any) -> Upright:
    """A Pillow image as its own file is decoded. Raises UnreadableImage for pixels that cannot be shown."""
    try:
        made = _upright_rgb(image)
    except Exception as error:  # a lazily opened file may be broken
        raise _unreadable(ImageSource(Path("the picture")), error) from error
    return Upright(made, *made.size)


def pixels_of(decoded: Upright, source: ImageSource, size: tuple[int, int], mode: Mode | PixelMaker = "model") -> Any:
    """(3, height, width) uint8 of a decoded image, an array in the mode "array", or what a `PixelMaker` makes of it.

    Raises UnreadableImage where memory ends.
    """
    if callable(mode):
        try:
            return mode(decoded.image)
        except MemoryError as error:
            raise _unreadable(source, error) from error
    height, width = _checked_size(size, mode)
    image, target = decoded.image, (width, height)
    try:
        if mode == "center-crop":
            image = ImageOps.fit(image, target, Image.Resampling.BICUBIC)
        elif mode == "resize":
            image = image.resize(target, Image.Resampling.BICUBIC)
        else:
            rows, columns = stored_size(size)
            stored = image.resize((columns, rows), Image.Resampling.BICUBIC)
            # Not `resize`, which averages: training takes the four nearest pixels of what it kept, no more.
            box = (0, 0, columns, rows)
            image = stored.transform(target, Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
        pixels = np.array(image, dtype=np.uint8)
    except MemoryError as error:
        raise _unreadable(source, error) from error
    if mode == "array":
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    import torch

    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def opened(data: bytes, source: ImageSource | None = None) -> Any:
    """The image of a file, its pixels not yet decoded; of a camera's RAW file its preview.

    `source` has the name that tells a RAW file from a TIFF. Raises what Pillow raises, and MissingReader for a format
    whose package is not installed.
    `Image.open` without its bound on the pixels: that one does not know that a JPEG can be decoded smaller.
    """
    reader = reader_for(data, _name(source))
    if reader is not None:
        return open_still(data, reader)
    prefix, file = data[:16], io.BytesIO(data)
    for name in FORMATS:
        if name not in Image.OPEN:
            Image.init()
        factory, accepts = Image.OPEN.get(name, (None, None))
        if factory is None or (accepts is not None and accepts(prefix) is not True):
            continue
        try:
            file.seek(0)
            return factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue
    raise Image.UnidentifiedImageError("cannot identify the image")


def _checked_size(size: tuple[int, int], mode: str) -> tuple[int, int]:
    if len(size) != 2 or min(size) < 1:
        raise DataError(f"The image size must be (height, width), both at least 1, not {size!r}.")
    if mode not in get_args(Mode):
        raise DataError(f"The image mode must be one of {', '.join(get_args(Mode))}, not {mode!r}.")
    return size


def upright_size(data: bytes, source: ImageSource, limit: int | None = None) -> tuple[int, int]:
    """(width, height) after turning by EXIF, from the head of the file.

    Raises UnreadableImage for what is no image, and above `limit` pixels.
    """
    try:
        image = opened(data, source)
        width, height = image.size
        turned = _turned(image)
    except MissingReader as error:
        raise _unreadable(source, error) from error
    except Exception as error:  # Pillow raises almost anything on broken bytes
        raise UnreadableImage(source, "it is not an image in a known format.") from error
    if limit is not None and width * height > limit:
        raise UnreadableImage(source, f"it has {width} x {height} pixels, more than {limit:,}. Make it smaller.")
    return (height, width) if turned else (width, height)


def _turned(image: Any) -> bool:
    """Whether the EXIF orientation swaps width and height."""
    if image.format in _TURNED_BY_DECODER:
        return False
    try:
        # Not PNG's own method, which decodes all pixels to look behind them.
        return Image.Image.getexif(image).get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception:  # a broken EXIF block says nothing about the pixels
        return False


class _WideNumbers(ValueError):
    """Pixels of a range that nothing says: which value is white is not known."""


def _upright_rgb(image: Any) -> Any:
    """A loaded image upright, as RGB, on white. Made strip by strip, so that it takes no third copy of the pixels."""
    turn = _turn(image)
    if image.mode == "RGB" and turn is None and not image.has_transparency_data:
        return image
    width, height = image.size
    made = None
    for top in range(0, height, max(1, STRIP_PIXELS // width)):
        bottom = min(height, top + max(1, STRIP_PIXELS // width))
        strip = _rgb(image.crop((0, top, width, bottom)))
        if made is None:
            made = Image.new("RGB", (height, width) if turn in _SWAPPING else (width, height))
            made.info = {name: value for name, value in strip.info.items() if name not in _EXIF_KEYS}
        if turn is None:
            made.paste(strip, (0, top))
        else:
            along = top if turn in _TOP_STAYS_FIRST else height - bottom
            made.paste(strip.transpose(turn), (along, 0) if turn in _SWAPPING else (0, along))
    return made


def _turn(image: Any) -> Any:
    """How an image is turned upright by its EXIF orientation; None where it is upright."""
    if image.format in _TURNED_BY_DECODER:
        return None
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a broken EXIF block says nothing about the pixels
        return None


def _rgb(image: Any) -> Any:
    if image.mode == "F":
        raise _WideNumbers("its pixels are floating point numbers")
    if image.mode.startswith("I"):  # 16 bits a pixel: converting clips at 255, nearly all to white
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise _WideNumbers(f"its pixels go from {values.min()} to {values.max()}")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _bytes_to_decode(image: Any, width: int, height: int) -> int:
    """Memory that decoding an opened image takes, from its head: its pixels, their RGB, and what the decoder holds.

    `width` and `height` are those of the file, of which a JPEG may be decoded smaller.
    """
    pixels = image.size[0] * image.size[1] * (_PIXEL_BYTES.get(image.mode.partition(";")[0], 4) + 4)
    held = _DECODER_BYTES.get(image.format, 0)
    if image.info.get("progressive"):  # two bytes of every value of the whole picture
        held = 2 * len(image.getbands())
    elif image.format == "JPEG2000":
        held = 4 * len(image.getbands())
    elif image.format == "TIFF":  # the whole picture may be one strip; 258: bits of each value
        held = (sum(image.tag_v2.get(258, (8,))) + 7) // 8
    return int(pixels + width * height * held)


def _unreadable(source: ImageSource, error: Exception) -> UnreadableImage:
    """What a decoder raised, as a sentence."""
    match error:
        case MissingReader():
            return UnreadableImage(source, f"{error}.", "without a reader")
        case _WideNumbers():
            return UnreadableImage(source, f"{error}. Save it with 8 or 16 bits per value.", "of more than 16 bits")
        case Image.UnidentifiedImageError():
            why, kind = f"it is not an image in a known format ({', '.join(FORMATS)}).", "in no known format"
        case MemoryError():
            why, kind = "there is not enough memory to decode it.", "too large"
        case _:
            why = f"it is damaged or cut short ({str(error) or type(error).__name__})."
            kind = "damaged or cut short"
    return UnreadableImage(source, f"{why} Replace it or take it out of the data.", kind)


def _name(source: ImageSource | None) -> str:
    """The file name of a picture; empty for one that was sent without."""
    return str(getattr(source, "member", None) or getattr(source, "path", ""))


@dataclass(frozen=True)
class Picture:
    """A decoded image."""

    pixels: Any
    """(3, height, width) uint8 at the model's size, or what a `PixelMaker` made."""
    sha256: str
    width: int
    height: int
    """Of the image itself, upright."""
    thumbnail: bytes
    """JPEG, its longer side `THUMBNAIL`."""


def read_picture(source: ImageSource, size: tuple[int, int], mode: Mode | PixelMaker = "model") -> Picture:
    """Read and decode one image; `size` is the model's (height, width). Raises UnreadableImage."""
    return decode_picture(read_source(source), source, size, mode)


def decode_picture(
    data: bytes, source: ImageSource, size: tuple[int, int], mode: Mode | PixelMaker = "model"
) -> Picture:
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


class ImageReader:
    """Reads many images with a pool of threads (Pillow decodes outside the interpreter's lock).

    Use it in a `with` block, or call `close`.
    """

    def __init__(self, mode: Mode = "model", workers: int | None = None) -> None:
        self.mode: Mode = mode
        self.workers = workers if workers is not None else min(16, os.cpu_count() or 1)
        if self.workers < 1:
            raise DataError(f"An image reader needs at least one worker, not {workers}.")
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="seps-images")

    def read_many(
        self, sources: Sequence[ImageSource], size: tuple[int, int], progress: Callable[[int, int], None] | None = None
    ) -> Tensor:
        """(n, 3, height, width) uint8, in the order of `sources`. Raises UnreadableImage at the first bad.

        `progress(done, total)` is called after every image.
        """
        import torch

        pixels = torch.empty(len(sources), 3, *_checked_size(size, self.mode), dtype=torch.uint8)
        for index, image in enumerate(self.map(lambda source: read_image(source, size, self.mode), sources)):
            pixels[index] = image
            if progress is not None:
                progress(index + 1, len(sources))
        return pixels

    def map(self, function: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """`function` of every source (or of several values each), in order, computed by the pool.

        It runs at most `READ_AHEAD` ahead: results that wait for a slow caller would fill the memory.
        """
        waiting: deque[Future[Any]] = deque()
        try:
            for values in zip(*arguments, strict=True):
                waiting.append(self._pool.submit(function, *values))
                if len(waiting) > READ_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Wait for what is running, drop what is queued."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
