"""What is asked for: a sentence, a picture, or both at once, and the pictures of the store that fit.

The score of a sentence and that of a picture have different scales. Asked together, both are therefore counted in
standard deviations over the candidates, and the score of an image v is

    S(v) = (1 - weight) z_sentence(v) + weight z_picture(v),        z(v) = (s(v) - mean) / deviation
"""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Literal

from torch import Tensor

from seps.retrieval.data.images import resized_jpeg, upright_size
from seps.retrieval.heads import TextFeatures
from seps.retrieval.index import lexical
from seps.retrieval.index.rows import Columns, Filters
from seps.retrieval.index.search import Hit, Searcher
from seps.retrieval.index.store import AT_ONCE
from seps.retrieval.index.zeroshot import Query
from seps.serve import uploads

Sort = Literal["score", "newest", "oldest"]
KEPT_PICTURES = 64
"""Uploaded pictures that are remembered, as the model sees them (about 100 KB each)."""
_THUMBNAIL = 160


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

    @property
    def by_sentence(self) -> bool:
        """Whether the score is that of a sentence alone."""
        return bool(self.sentence) and not self.like and not self.upload


class UploadedPictures:
    """The pictures that were uploaded last, so that pages, filters and addresses can name them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, PictureQuery] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, data: bytes, searcher: Searcher) -> str:
        """Encode a picture and keep it; its id. Raises UnreadableImage."""
        upright_size(data, uploads.UPLOAD, uploads.UPLOAD_PIXELS)
        query, vector = searcher.encode_image(data)
        identity = hashlib.sha256(data).hexdigest()[:32]
        with self._lock:
            self._kept[identity] = PictureQuery(query, vector, resized_jpeg(data, uploads.UPLOAD, _THUMBNAIL))
            self._kept.move_to_end(identity)
            while len(self._kept) > KEPT_PICTURES:
                self._kept.popitem(last=False)
        return identity

    def get(self, identity: str) -> PictureQuery | None:
        """A kept picture; None where it was never sent, or others have taken its place."""
        with self._lock:
            found = self._kept.get(identity)
            if found is not None:
                self._kept.move_to_end(identity)
            return found


def find(searcher: Searcher, asked: Asked, picture: PictureQuery | None) -> list[Hit]:
    """The best `asked.depth` images, best first. Raises ValueError for a blank sentence without a picture."""
    depth = asked.depth
    if picture is None:
        return searcher.search(
            asked.sentence,
            depth,
            candidates=depth,
            exact=asked.exact,
            filters=asked.filters,
            min_confidence=asked.min_confidence,
        )
    if not asked.sentence.strip():
        return searcher.search_encoded_image(picture.query, picture.vector, depth, depth, asked.exact, asked.filters)
    return find_both(searcher, asked, picture)


def find_both(searcher: Searcher, asked: Asked, picture: PictureQuery) -> list[Hit]:
    """As `find`, for a sentence and a picture together."""
    sentence = searcher.encode(asked.sentence)
    words = lexical.matches(asked.sentence, searcher.store)
    vectors = [searcher.search_vector(sentence), picture.vector]
    rows, said, seen = [], [], []
    for images in _candidates(searcher, vectors, words, asked):
        rows += images.rows(searcher.shown_columns)
        terms = searcher.terms(images, words)
        said += [
            score + sum(added.values()) for score, added in zip(searcher.scores(images, sentence), terms, strict=True)
        ]
        seen += searcher.scores(images, picture.query, described=False)
    parts = zip(standardised(said), standardised(seen), strict=True)
    terms = [{"sentence": (1 - asked.weight) * a, "picture": asked.weight * b} for a, b in parts]
    order = heapq.nsmallest(
        asked.depth, range(len(rows)), key=lambda place: (-sum(terms[place].values()), rows[place]["id"])
    )
    return [
        Hit(rank, sum(terms[place].values()), **rows[place], terms=terms[place]) for rank, place in enumerate(order, 1)
    ]


def _candidates(
    searcher: Searcher, vectors: Sequence[Tensor], words: lexical.Matches, asked: Asked
) -> Iterable[Columns]:
    """The images nearest to each vector, and those whose descriptions have words of the sentence; each once."""
    store, columns = searcher.store, [*searcher.shown_columns, *searcher.columns]
    filters = searcher.allowed(asked.filters)
    if asked.exact:
        yield from store.scan(columns, filters)
        return
    ids: dict[str, None] = {}
    for vector, prior in zip(vectors, (searcher.prior(), None), strict=True):  # the sentence's, and the picture's
        found = store.nearest(vector.cpu().numpy(), asked.depth, ["id"], filters, prior)
        ids.update(dict.fromkeys(found.values("id")))
    named = [identity for identity in words.best(len(words.found)) if identity not in ids]
    ids.update(dict.fromkeys(store.among(named, filters, asked.depth)))
    every = sorted(ids)
    for start in range(0, len(every), AT_ONCE):
        yield store.select(every[start : start + AT_ONCE], columns)


def standardised(scores: list[float]) -> list[float]:
    """Scores as standard deviations from their mean; zeros where all are the same."""
    deviation = pstdev(scores) if len(scores) > 1 else 0.0
    middle = fmean(scores) if scores else 0.0
    return [(score - middle) / deviation if deviation else 0.0 for score in scores]
