"""`Engine`: what encodes pictures and sentences and scores them, and its `Traits`.

What a store, a search or an evaluation must know of an engine is a trait or a method. An engine knows of no store:
how a picture is kept is a `Layout` of plain values.

Shapes: B images, T texts, K texts of each image, N patches, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from seps.images.sources import ImageSource
from seps.retrieval.engine.layout import Kept, Layout
from seps.retrieval.engine.queries import Array, Queries

if TYPE_CHECKING:
    from torch import Tensor

    from seps.images.decoding import Mode, PixelMaker
    from seps.retrieval.explain.explanation import Explanation

Progress = Callable[[str, int, int | None], None]
"""Called with what is encoded, how many are done, and of how many."""


FIT = 2.5
"""Nats by which a word has to fit a picture better than other things for a confidence of 1/2, chosen on training photos
and half of dev (docs/search-figures.md)."""
SHORT_FIT = 2.5
"""The same where short queries have a projection of their own (docs/search-figures.md)."""
SHORT_BACKGROUND = 0.5
"""Part of `BACKGROUND_STRENGTH` for short queries with another projection, chosen on dev (docs/search-figures.md)."""
NATS = 25.0
"""The score range of our models is about this many nats: 28 for the embedded one on dev."""
BACKGROUND_STRENGTH = 0.5
"""Part of a picture's level over the background queries that is taken off, chosen on dev with `base` and `mini`
(docs/search-figures.md)."""
PATCHES = "patches"
"""The kind of the engine of our models, with torch."""
UNDESCRIBED = "The store holds no description of this picture: its score is that of its pixels alone."


class Processor(NamedTuple):
    """The processor, as the device of an engine without torch."""

    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


@dataclass(frozen=True)
class Traits:
    """What an engine is like."""

    kind: str
    """Its name, which is that of its layouts."""
    reads_pixels: bool
    reads_descriptions: bool
    selects_patches: bool
    """Whether a sentence selects some patches of a picture: `Explanation.kept`."""
    explains: str
    """Empty where scores can be split (`Engine.explain`), else a sentence why they cannot."""
    pairs_queries: str
    """Empty where queries may carry descriptions, as in the published protocol, else a sentence why they may not."""
    guides: tuple[str, ...]
    """Names of the guides whose vectors come with the pictures; a store keeps none."""
    languages: tuple[str, ...]
    """ISO 639 codes; empty: not known, or many."""
    width: int
    """C of what is encoded."""
    score_unit: float
    """What a score changes by when a match becomes e times likelier."""
    score_range: float
    """The largest possible score."""
    vector_slope: float
    """About what a score gains where the product of search vectors gains 1."""
    word_fit: float
    """Nats by which a word has to fit a picture better than other things for a confidence of 1/2."""
    background_weight: float | None
    """Part of a picture's level over the background queries that is taken off; None: found for each gallery."""
    short_background: float | None
    """Of queries of one or two words: what of `background_weight` is taken off, where they are read apart from
    sentences and only the confidence of words counts for them; None: they are read as sentences."""
    sizes: tuple[str, ...]
    """Names of its layouts."""
    default_size: str
    image_size: tuple[int, int]
    """(height, width) of the pictures it takes."""
    cpu_batch: int
    """Pictures a CPU encodes at a time: larger activations make the allocator hand memory back and forth."""
    settings: str
    """What encodings of sentences depend on beside the weights."""


class Digests(NamedTuple):
    """Identify the weights of an engine."""

    pictures: str
    words: str = ""
    """Of the model that encodes descriptions, where that is another one."""
    texts: str = ""
    """Of the side of a model of ours that reads texts, where it can be another for the same pictures."""
    short: str = ""
    """Of what reads short queries alone."""


class Unread(NamedTuple):
    """What of a sentence the engine does not read."""

    cut: tuple[int, int] | None
    """Tokens and how many are read, where these are fewer."""
    foreign: bool
    """Whether it seems to be in a language that the engine does not read."""


@dataclass(frozen=True)
class Photo:
    """The content of a picture's file."""

    data: bytes
    source: ImageSource
    note: str = ""
    """A sentence where this is not the file that was encoded."""


class Pictures(Protocol):
    """Encoded pictures; what else they hold is the engine's alone."""

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Any:
        """Images `start` to `stop`."""
        ...

    def without_descriptions(self) -> Any:
        """The same images, their pixels alone."""
        ...

    def as_queries(self) -> Queries:
        """The pictures as queries, to search others by."""
        ...

    @property
    def described(self) -> Tensor | Array:
        """(B,) bool, on the CPU."""
        ...


class Engine(Protocol):
    """What encodes and scores. Any thread may call it."""

    @property
    def traits(self) -> Traits:
        """What it is like."""
        ...

    @property
    def device(self) -> Any:
        """Where it is: a `torch.device`, or a `Processor`."""
        ...

    @property
    def decoding(self) -> Mode | PixelMaker:
        """How pictures are decoded for it."""
        ...

    def digests(self) -> Digests:
        """Of its weights."""
        ...

    def encode_pixels(self, decoded: Sequence[Any]) -> Any:
        """(B, ...) what it makes of decoded pictures, at once."""
        ...

    def pictures(
        self,
        encoded: Any,
        descriptions: Sequence[str | None] | None = None,
        *,
        guides: Mapping[str, Tensor] | None = None,
        keep_words: int | None = None,
        batch_size: int = 128,
        progress: Progress | None = None,
    ) -> Any:
        """Pictures from what `encode_pixels` gave, with their descriptions, merged to `keep_words`, and guides."""
        ...

    def encode_texts(
        self, texts: Sequence[str], *, as_sentences: bool = False, progress: Progress | None = None
    ) -> Queries:
        """Texts as queries; `as_sentences`: also short ones as sentences are read."""
        ...

    def vectors(self, encoded: Any) -> Any:
        """(B or T, width) search vectors, a tensor or an array: their products are about the scores."""
        ...

    def score(
        self,
        pictures: Any,
        queries: Queries,
        *,
        chosen: Array | None = None,
        paired: Sequence[str] | None = None,
        memory: int | None = None,
    ) -> Any:
        """(B, T) scores, a tensor or an array; with `chosen` (B, K) those queries of each picture, (B, K).

        `paired`: a description that comes with each query, see `Traits.pairs_queries`.
        """
        ...

    def explain(
        self,
        caption: str,
        description: str | None,
        photo: Callable[[], Photo],
        *,
        stored: Any = None,
        guides: Mapping[str, Tensor] | None = None,
    ) -> Explanation:
        """Why a picture has its score for a caption; `stored` is the picture as a store has it.

        `guides` are vectors (width,) by name. `photo` reads its file, which is not needed where the store has its
        patches. Raises UnreadableImage, and ValueError where `Traits.explains` has a reason.
        """
        ...

    def layout(self, size: str) -> Layout:
        """How a store keeps pictures at this size. Raises ValueError for another name than those of its sizes."""
        ...

    def keep(self, pictures: Any, layout: Any) -> Kept:
        """What a store with this layout keeps of pictures."""
        ...

    def unread(self, text: str) -> Unread:
        """What of a sentence it does not read."""
        ...
