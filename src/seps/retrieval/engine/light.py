"""`LightEngine`: an embedded model as one vector per picture, without torch.

Sentences are computed in NumPy and pictures by ONNX Runtime, from the weights of the model's folder
(`seps.retrieval.light`). Products are float32, so that its vectors are those of the torch model but for rounding: both
read and write the same stores of the size "vector".

Shapes: B pictures, T queries, C width.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from seps.extras import install_command, is_installed, require
from seps.retrieval.config import VECTOR, ModelConfig
from seps.retrieval.embedded import embedded_folder, stated_facts
from seps.retrieval.engine.engine import (
    BACKGROUND_STRENGTH,
    FIT,
    NATS,
    SHORT_BACKGROUND,
    SHORT_FIT,
    Digests,
    Photo,
    Processor,
    Progress,
    Traits,
    Unread,
)
from seps.retrieval.engine.layout import Kept
from seps.retrieval.engine.mean import ALIGNED_SLOPE, MeanLayout, MeanPictures, mixed
from seps.retrieval.engine.queries import Array, Queries
from seps.retrieval.languages import reads
from seps.retrieval.light.text import LightTexts
from seps.retrieval.light.vision import LightPictures, is_vision_transformer
from seps.retrieval.light.weights import LightWeights

if TYPE_CHECKING:
    from seps.retrieval.explain.explanation import Explanation

KIND = "light"
NO_EXPLANATIONS = f"Explanations need torch, which is not installed: {install_command('torch')}"


def can_compute(name: str) -> bool:
    """Whether `LightEngine` runs an embedded model here: its vision encoder is a transformer, ONNX Runtime is there."""
    return is_vision_transformer(embedded_folder(name)) and is_installed("onnxruntime")


def _digest(arrays: Iterable[Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class LightEngine:
    """An embedded model by its name. Raises ValueError where its files cannot be read."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = embedded_folder(name)
        try:
            self._weights, facts = LightWeights(folder), stated_facts(name)
            self.texts = LightTexts(self._weights)
            self._config = config = ModelConfig(**self._weights.model)
            self._weight = 1 / (1 + math.exp(-float(self._weights.tensor("head.net.trust"))))
            short = "" if self.texts.short is None else _digest(self.texts.short)
            self._digests = Digests(facts["model_hash"], texts=facts["text_hash"], short=short)
            self._size, stride = tuple(facts["image_size"]), facts["stride"]
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(f"The embedded model {name!r} cannot be read ({error}). Install seps again.") from error
        pooled = float(config.slimming["pooled"])
        self._layout = MeanLayout(
            config.embed_size, (self._size[0] // stride[0], self._size[1] // stride[1]), pooled + ALIGNED_SLOPE
        )
        self.traits = Traits(
            kind=KIND,
            reads_pixels=True,
            reads_descriptions=True,
            selects_patches=True,
            explains="" if is_installed("torch") else NO_EXPLANATIONS,
            pairs_queries="Protocol 'published' pairs captions with descriptions inside a slimming head.",
            guides=(),
            languages=tuple(config.languages),
            width=config.embed_size,
            score_unit=(2.0 + pooled) / NATS,
            score_range=2.0 + pooled,
            vector_slope=self._layout.slope,
            word_fit=SHORT_FIT if config.short_queries else FIT,
            background_weight=BACKGROUND_STRENGTH,
            short_background=SHORT_BACKGROUND if config.short_queries else None,
            sizes=(VECTOR,),
            default_size=VECTOR,
            image_size=self._size,
            cpu_batch=8,
            settings=f"{KIND} {config!r}",
        )
        self._loading = threading.Lock()
        self._pictures: LightPictures | None = None
        self._whole: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process reads the files again."""
        return {"name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"])  # type: ignore[misc]

    @property
    def device(self) -> Processor:
        """See `Engine`."""
        return Processor()

    @property
    def decoding(self) -> Any:
        """See `Engine`."""
        return "array"

    def digests(self) -> Digests:
        """See `Engine`; as the release states them."""
        return self._digests

    def load_pixels(self) -> None:
        """Make the graph of pictures where it was not needed yet."""
        with self._loading:
            if self._pictures is None:
                self._pictures = LightPictures(self._weights)

    def encode_pixels(self, decoded: Sequence[Array]) -> Array:
        """See `Engine`: pixels (3, H, W) uint8 each -> (B, C) of length one."""
        self.load_pixels()
        assert self._pictures is not None
        return self._pictures(np.stack(list(decoded)))

    def pictures(
        self,
        encoded: Array,
        descriptions: Sequence[str | None] | None = None,
        *,
        guides: Mapping[str, Any] | None = None,
        keep_words: int | None = None,
        batch_size: int = 128,
        progress: Progress | None = None,
    ) -> MeanPictures:
        """See `Engine`."""
        described = np.array([text is not None for text in descriptions or [None] * len(encoded)], bool)
        words = np.zeros_like(encoded)
        if described.any():
            texts = [text for text in descriptions or () if text is not None]
            words[described] = self.texts.vectors(texts, most=self.texts.max_dense_words, as_sentences=True)
        return MeanPictures(mixed(encoded, words, described, self._weight), encoded, described, self._layout)

    def encode_texts(
        self, texts: Sequence[str], *, as_sentences: bool = False, progress: Progress | None = None
    ) -> Queries:
        """See `Engine`."""
        return Queries(None, self.texts.vectors(texts, as_sentences=as_sentences))

    def vectors(self, encoded: MeanPictures | Queries) -> Array:
        """See `Engine`."""
        found: Array = encoded.vectors  # type: ignore[assignment]
        return found

    def score(
        self,
        pictures: MeanPictures,
        queries: Queries,
        *,
        chosen: Array | None = None,
        paired: Sequence[str] | None = None,
        memory: int | None = None,
    ) -> Array:
        """See `Engine`."""
        return pictures.score(self.vectors(queries), chosen)

    def explain(
        self,
        caption: str,
        description: str | None,
        photo: Callable[[], Photo],
        *,
        stored: MeanPictures | None = None,
        guides: Mapping[str, Any] | None = None,
    ) -> Explanation:
        """See `Engine`. The torch model explains; it is loaded when the first score is."""
        found: Explanation = self.with_torch().explain(caption, description, photo, stored=stored, guides=guides)
        return found

    def layout(self, size: str) -> MeanLayout:
        """See `Engine`."""
        if size != VECTOR:
            raise ValueError(
                f"The store keeps pictures at the size {VECTOR!r}, not {size!r}. "
                "Leave the size out, or use another store."
            )
        return self._layout

    def keep(self, pictures: MeanPictures, layout: Any) -> Kept:
        """See `Engine`."""
        pixels = zip(pictures.pixels, pictures.described, strict=True)
        means = [own[None] if described else None for own, described in pixels]
        return Kept(pictures.vectors, means=means if pictures.described.any() else None)

    def unread(self, text: str) -> Unread:
        """See `Engine`."""
        return Unread(self.texts.cut(text), not reads(self.traits.languages, text, self.texts.pieces))

    def with_torch(self) -> Any:
        """The same model with torch. Raises MissingPackage (a ValueError) without it."""
        require("torch", "This")
        with self._loading:
            if self._whole is None:
                from seps.retrieval.engine.patches import PatchEngine
                from seps.retrieval.pretrained import from_pretrained

                self._whole = PatchEngine(from_pretrained(self.name))
            return self._whole
