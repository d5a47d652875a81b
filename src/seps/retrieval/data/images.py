"""Images as uint8 tensors: decoded with Pillow, upright, RGB, of one size.

A file from the outside is never trusted: formats are a fixed list, pixels are bounded before decoding, and
whatever a decoder raises comes out as `UnreadableImage` with the file's name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .records import DataError, ImageSource, RetrievalDataset
from .shards import UnreadableImage, read_source

Mode = Literal["resize", "center-crop"]

# Pillow also opens formats that run programs (EPS) or hold vectors; a gallery of photos needs none of them.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = 89_478_485  # Pillow's own default: a quarter of a gigabyte of RGB


def read_image(source: ImageSource, size: tuple[int, int], mode: Mode = "resize") -> Tensor:
    """(3, height, width) uint8 RGB of one image; `size` is (height, width).

    "resize" stretches the whole image to the size; "center-crop" keeps its shape and cuts off what
    sticks out. The EXIF orientation is applied, transparency lies on white, animations give one frame.
    Raises UnreadableImage, which names the file.
    """
    return decode_image(read_source(source), source, size, mode)


def decode_image(data: bytes, source: ImageSource, size: tuple[int, int], mode: Mode = "resize") -> Tensor:
    """As `read_image`, for bytes already read; `source` is for messages."""
    height, width = _checked_size(size, mode)
    if not data:
        raise UnreadableImage(source, "the file is empty. Replace it or take it out of the data.")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        # JPEG decoders can halve the size while decoding. Twice the target leaves the resize enough to
        # average, and the larger side covers images that the EXIF orientation turns.
        side = 2 * max(height, width)
        image.draft(None, (side, side))
        image.load()
        image = _rgb(_upright(image))
        target = (width, height)
        if mode == "resize":
            image = image.resize(target, Image.Resampling.BICUBIC)
        else:
            image = ImageOps.fit(image, target, Image.Resampling.BICUBIC)
        pixels = np.array(image, dtype=np.uint8)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        why = f"it has more than {MAX_PIXELS:,} pixels. Make it smaller or take it out of the data."
        raise UnreadableImage(source, why) from error
    except Exception as error:  # Pillow's decoders raise almost anything on broken bytes
        raise UnreadableImage(source, f"{_sentence(error)} Replace it or take it out of the data.") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _checked_size(size: tuple[int, int], mode: str) -> tuple[int, int]:
    if len(size) != 2 or min(size) < 1:
        raise DataError(f"The image size must be (height, width), both at least 1, not {size!r}.")
    if mode not in ("resize", "center-crop"):
        raise DataError(f"The image mode must be 'resize' or 'center-crop', not {mode!r}.")
    return size


def _upright(image: Any) -> Any:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block says nothing about the pixels
        return image


def _rgb(image: Any) -> Any:
    if image.mode.startswith("I"):  # 16 bits a pixel: converting clips at 255, nearly all to white
        values = np.asarray(image).astype(np.float64) / 256
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _sentence(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"it is not an image in a known format ({', '.join(FORMATS)})."
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it."
    return f"it is damaged or cut short ({str(error) or type(error).__name__})."


class ImageReader:
    """Reads many images with a pool of threads (Pillow decodes outside the interpreter's lock).

    Use it in a `with` block, or call `close`.
    """

    def __init__(self, mode: Mode = "resize", workers: int | None = None) -> None:
        self.mode: Mode = mode
        self.workers = workers if workers is not None else min(16, os.cpu_count() or 1)
        if self.workers < 1:
            raise DataError(f"An image reader needs at least one worker, not {workers}.")
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="seps-images")

    def read_many(self, sources: Sequence[ImageSource], size: tuple[int, int]) -> Tensor:
        """(n, 3, height, width) uint8, in the order of `sources`. Raises UnreadableImage at the first bad."""
        height, width = _checked_size(size, self.mode)
        pixels = torch.empty(len(sources), 3, height, width, dtype=torch.uint8)
        for index, image in enumerate(self.map(lambda source: read_image(source, size, self.mode), sources)):
            pixels[index] = image
        return pixels

    def map(self, function: Callable[[ImageSource], Any], sources: Iterable[ImageSource]) -> Iterable[Any]:
        """`function` of every source, in order, computed by the pool."""
        return self._pool.map(function, sources)

    def close(self) -> None:
        """Wait for what is running, drop what is queued."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def decode_all(
    dataset: RetrievalDataset,
    size: tuple[int, int],
    progress: Callable[[int, int], None] | None = None,
    *,
    mode: Mode = "resize",
    workers: int | None = None,
    chunk: int = 256,
) -> Tensor:
    """(images, 3, height, width) uint8 of a whole data set, for sets that fit in memory.

    Takes images x 3 x height x width bytes: 5,827 images at 224 px are 0.9 GB. `progress(done, total)` is
    called after every chunk. Raises UnreadableImage; `check_dataset` and `drop_bad` take such images out.
    """
    height, width = _checked_size(size, mode)
    sources = dataset.sources
    pixels = torch.empty(len(sources), 3, height, width, dtype=torch.uint8)
    with ImageReader(mode, workers) as reader:
        for start in range(0, len(sources), chunk):
            part = sources[start : start + chunk]
            pixels[start : start + len(part)] = reader.read_many(part, size)
            if progress is not None:
                progress(start + len(part), len(sources))
    return pixels
