"""What is asked for: a sentence or a sum of them, a picture, or both at once, and the pictures of the store that fit.

`photos.search.query` says what parts mean that are asked together. Beside a picture of the weight `Asked.weight` each
sentence has the weight 1 - `Asked.weight`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from seps.images.decoding import resized_jpeg, upright_size
from seps.photos.search.hits import Part
from seps.photos.search.query import Term, parse, search_combined, search_terms, terms_of
from seps.photos.search.searcher import Hit, Searcher
from seps.photos.serve import uploads
from seps.photos.store.rows import Filters
from seps.retrieval.engine.zeroshot import Query
from seps.retrieval.heads import TextFeatures

Sort = Literal["score", "newest", "oldest"]
KEPT_PICTURES = 64
"""Uploaded pictures that are remembered, as the model sees them (about 100 KB each)."""
_THUMBNAIL = 160
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class PictureQuery:
    """A picture as a query: what `Searcher.encode_image` made of it."""

    query: TextFeatures | Query
    vector: Tensor
    thumbnail: bytes = b""
    """JPEG, of an uploaded picture."""


@dataclass(frozen=True)
class Asked:
    """One search. All pages of its results have the same value of this."""

    sentence: str = ""
    like: str = ""
    """Address of a picture of the store to compare with."""
    upload: str = ""
    """Id of an uploaded picture to compare with."""
    weight: float = 0.5
    """Share of the picture where there is a sentence as well."""
    depth: int = 200
    """Images that are scored exactly and ranked."""
    exact: bool = False
    filters: Filters = field(default_factory=Filters)
    min_confidence: float | None = None
    sort: Sort = "score"
    fold: bool = False

    def terms(self) -> tuple[Term, ...]:
        """The sentences with their signs, and the picture, if any, last; its text is not a path.

        Raises ValueError for a sentence that cannot be read, and where nothing is looked for.
        """
        picture = self.like or self.upload
        return terms_of(self.sentence if self.sentence or not picture else None, [picture] if picture else [])


class Recent(Generic[Kept]):
    """A bounded memory, for any number of threads: what was not asked for longest is forgotten first."""

    def __init__(self, most: int) -> None:
        self.most = most
        """The largest sum of the sizes; the newest value is kept even where it is larger by itself."""
        self._kept: OrderedDict[Hashable, tuple[int, Kept]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: Hashable, value: Kept, size: int = 1) -> None:
        """Keep a value of this size."""
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = (size, value)
            while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > self.most:
                self._kept.popitem(last=False)

    def get(self, key: Hashable) -> Kept | None:
        """A kept value; None where there is none."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][1]


def encode_upload(data: bytes, searcher: Searcher) -> tuple[str, PictureQuery]:
    """The id of an uploaded picture, and the picture as a query. Raises UnreadableImage."""
    upright_size(data, uploads.UPLOAD, uploads.UPLOAD_PIXELS)
    query, vector = searcher.encode_image(data)
    picture = PictureQuery(query, vector, resized_jpeg(data, uploads.UPLOAD, _THUMBNAIL))
    return hashlib.sha256(data).hexdigest()[:32], picture


def find(searcher: Searcher, asked: Asked, picture: PictureQuery | None) -> list[Hit]:
    """The best `asked.depth` images, best first. Raises ValueError as `Asked.terms` does."""
    terms, depth = asked.terms(), asked.depth
    among: dict[str, Any] = {"candidates": depth, "exact": asked.exact, "filters": asked.filters}
    if picture is None:
        return search_terms(searcher, terms, depth, min_confidence=asked.min_confidence, **among)
    if len(terms) == 1:
        return searcher.search_encoded_image(picture.query, picture.vector, depth, depth, asked.exact, asked.filters)
    parts = [searcher.part_of_text(term.text, term.sign) for term in terms[:-1]]
    weights = [1 - asked.weight] * len(parts) + [asked.weight]
    hits = search_combined(searcher, [*parts, Part(picture.query, picture.vector, False)], depth, weights, **among)
    return [replace(hit, terms={"sentence": sum(hit.parts[:-1]), "picture": hit.parts[-1]}) for hit in hits]


def explained_sentence(text: str) -> str:
    """The sentence by which a picture that was found is explained: of a sum the first that is looked for.

    Raises ValueError for a text that cannot be read.
    """
    terms = parse(text)
    return next((term.text for term in terms if term.sign > 0), terms[0].text)
