"""Text in pictures: signs, labels and screenshots, read by `rapidocr` on this machine (extra `ocr`).

The package brings its networks with it, so that nothing is downloaded. Photos without text give it false lines: short
ones, of low confidence. Lines below `LEAST_CONFIDENCE` or shorter than `SHORTEST` are left out.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np

from seps.extras import missing_package
from seps.images.decoding import decode_upright
from seps.images.sources import DataError, ImageSource

LEAST_CONFIDENCE = 0.9
"""Of a line, 0 to 1. On photos without text false lines have less (docs/search-figures.md)."""
SHORTEST = 3
"""Letters and digits of a line."""
LONGEST_SIDE = 2000
"""Pixels that are read of a larger picture."""
MOST_LETTERS = 10_000
"""Of one picture; a photographed page has about 3,000."""


def check_installed() -> None:
    """Raise DataError where the packages are not installed; nothing is imported."""
    for name in ("rapidocr", "onnxruntime"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise DataError(f"To read text in pictures: {missing_package(name)}")


class TextReader:
    """Reads the text in pictures, one at a time. Raises DataError where the package is not installed."""

    def __init__(self) -> None:
        check_installed()
        self._read = importlib.import_module("rapidocr").RapidOCR(params={"Global.log_level": "critical"})

    def lines(self, data: bytes, source: ImageSource) -> list[tuple[str, float]]:
        """All lines that are found in a picture and the confidence of each, also the false ones.

        Raises UnreadableImage.
        """
        image: Any = decode_upright(data, source, LONGEST_SIDE).image
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        read = self._read(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))  # blue, green, red
        return list(zip(read.txts or (), map(float, read.scores or ()), strict=True))

    def text(self, data: bytes, source: ImageSource) -> str:
        """The text in a picture, a line per line; empty where there is none. Raises UnreadableImage."""
        return "\n".join(line for line, sure in self.lines(data, source) if is_text(line, sure))[:MOST_LETTERS]


def is_text(line: str, confidence: float) -> bool:
    """Whether a line is taken for text, and not for a pattern of something else."""
    return confidence >= LEAST_CONFIDENCE and sum(letter.isalnum() for letter in line) >= SHORTEST
