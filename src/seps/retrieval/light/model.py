"""`LightModel`: sentences and pictures as vectors, for programs without torch.

    model = LightModel()
    model.sentences(["a dog"]) @ model.pictures([Path("dog.jpg")]).T

They are those of a store of the size "vector", but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from seps.images.decoding import decode_image
from seps.images.shards import read_source
from seps.images.sources import ImageSource
from seps.retrieval.light.text import LightTexts
from seps.retrieval.light.vision import LightPictures
from seps.retrieval.light.weights import Array, LightWeights


class LightModel:
    """The embedded model `base`. Any thread may call it. Raises OSError or ValueError where it cannot be read."""

    def __init__(self) -> None:
        self.weights = LightWeights(Path(str(files("seps"))) / "assets" / "base")
        self._texts = LightTexts(self.weights)

    @cached_property
    def _pictures(self) -> LightPictures:
        return LightPictures(self.weights)

    def sentences(self, texts: Sequence[str]) -> Array:
        """(T, C); texts of one or two words by the projection of short queries. Raises ValueError for broken text."""
        return self._texts.vectors(texts)

    def descriptions(self, texts: Sequence[str]) -> Array:
        """(T, C), as descriptions of pictures are read: longer, and none as a short query."""
        return self._texts.vectors(texts, most=self._texts.max_dense_words, as_sentences=True)

    def pictures(self, paths: Sequence[Path]) -> Array:
        """(B, C) of picture files. Raises UnreadableImage."""
        height, width = self.weights.model["image_size"]
        sources = [ImageSource(path) for path in paths]
        pixels = [decode_image(read_source(source), source, (height, width), "array") for source in sources]
        return self._pictures(np.stack(pixels))
