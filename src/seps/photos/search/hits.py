"""What a search is made of and what it finds: the parts of a query, and hits with their confidences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from seps.images.dates import local_time
from seps.photos.store.store import AT_ONCE, Store
from seps.retrieval.engine.pictures import Queries
from seps.retrieval.ranking import lexical
from seps.retrieval.ranking.bank import GOOD, has_article, level, noun_vectors
from seps.retrieval.ranking.confidence import falling, sentence_share, word_confidence
from seps.retrieval.ranking.lexical import Matches

if TYPE_CHECKING:
    from seps.photos.search.searcher import Searcher

SHOWN = (
    *("id", "path", "member", "width", "height", "mtime", "sha256", "taken"),
    *("sources", "latitude", "longitude", "ocr"),
)
"""Columns of the store that a `Hit` has."""


IN_PICTURE = "text in the picture"
"""As a source, beside those of descriptions."""


def sources_of(described: str | None, ocr: str | None) -> list[str]:
    """Sources of a picture's texts, of the columns `sources` and `ocr` of a row."""
    return [*(described.split(", ") if described else []), *([IN_PICTURE] if ocr else [])]


@dataclass(frozen=True)
class Part:
    """One part of a query, a sentence or a picture, as the model sees it."""

    query: Queries
    vector: torch.Tensor
    """(C,) its product with an image's vector is about the score."""
    described: bool
    """A sentence: descriptions and the bank of background queries take part."""
    found: Matches = lexical.NONE
    sign: int = 1
    """-1: the score of this part is taken off."""
    scale: float = 1.0
    mean: float = 0.0
    """Beside other parts its score s counts as `scale (s - mean)`; see `seps.photos.search.sums`."""

    @property
    def factor(self) -> float:
        """What the score is multiplied by, with its sign."""
        return self.sign * self.scale


@dataclass(frozen=True)
class Hit:
    """One image that a search found: `rank` from 1, `score`, and where the image is.

    `path` is relative to the indexed folder; `member` is its name inside a tar shard, or the time of a video's frame.
    `mtime` is the time of the file in nanoseconds since 1970, `width` and `height` are pixels.
    """

    rank: int
    score: float
    id: str
    path: str
    """Relative to the indexed folder."""
    member: str | None
    width: int
    height: int
    mtime: int
    sha256: str = ""
    """Of the file's content when it was indexed."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Parts of the score that do not come from the model, by name: "lexical" for words found in texts,
    "background" for the level of the picture over the bank."""
    confidence: float | None = None
    """In [0, 1]; None where the store has no bank of background queries, or a picture was searched by."""
    taken: int | None = None
    """Nanoseconds since 1970 at which the photo was taken, by EXIF; None where that is not known."""
    parts: Sequence[float] = ()
    """Of a query of several parts what each adds to the score."""
    sources: str | None = None
    """Where its description is from: "jsonl, xmp title, iptc keywords"; None without a description."""
    latitude: float | None = None
    longitude: float | None = None
    """Degrees, where the file says where the photo was taken."""
    ocr: str | None = None
    """Text in the picture; empty where there is none, None where it was not looked for."""
    folded: tuple[Hit, ...] = ()
    """Near-duplicates that come after it, where these are folded."""

    @property
    def when(self) -> int:
        """Nanoseconds since 1970 at which it was taken, or else the time of its file."""
        return self.mtime if self.taken is None else self.taken

    @property
    def date(self) -> str:
        """`when` in local time like 2024-05-31T18:20:05."""
        return local_time(self.when)

    @property
    def described_by(self) -> list[str]:
        """Sources of its texts, like "jsonl", "xmp title" or `IN_PICTURE`."""
        return sources_of(self.sources, self.ocr)

    @property
    def date_source(self) -> str:
        """Where `date` comes from: "exif" or "file"."""
        return "file" if self.taken is None else "exif"

    @property
    def good(self) -> bool | None:
        """Whether it is a good match and not one of the rest; None without a confidence."""
        return None if self.confidence is None else self.confidence >= GOOD

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank": self.rank,
            "score": round(self.score, 6),
            **({"confidence": round(self.confidence, 4)} if self.confidence is not None else {}),
            "path": self.path,
            **({"member": self.member} if self.member is not None else {}),
            "id": self.id,
            "width": self.width,
            "height": self.height,
            "date": self.date,
            "date_source": self.date_source,
            **({"described_by": self.described_by} if self.described_by else {}),
            **({"text_in_picture": self.ocr} if self.ocr else {}),
            **({"position": [self.latitude, self.longitude]} if self.latitude is not None else {}),
            **({"terms": {name: round(value, 6) for name, value in self.terms.items()}} if self.terms else {}),
        }


@torch.no_grad()
def confidences(searcher: Searcher, text: str, part: Part, hits: Sequence[Hit]) -> list[float] | None:
    """Of the best hits for one sentence, in the order of ranks, which they fall with; None without a calibration."""
    calibration = searcher.calibration
    if calibration is None:
        return None
    whole = [calibration.confidence(hit.score) for hit in hits]
    share = sentence_share(text)
    if share == 1 or not hits:
        return whole
    digests = searcher.store.settings.digests._replace(texts=searcher.text_hash)
    vectors = _vectors(searcher.store, [hit.id for hit in hits]).to(part.vector)
    others = noun_vectors(searcher.engine, digests)[0 if has_article(text) else 1].to(part.vector)
    better = (vectors @ part.vector - level(vectors @ others.T)) * searcher.slope
    added = [hit.terms.get("lexical", 0.0) for hit in hits]
    fits = [(value + more) / searcher.nat for value, more in zip(better.tolist(), added, strict=True)]
    words = (word_confidence(fit, searcher.engine.traits.word_fit) for fit in falling(fits))
    return [share * one + (1 - share) * other for one, other in zip(whole, words, strict=True)]


def _vectors(store: Store, ids: Sequence[str]) -> torch.Tensor:
    """(B, C) search vectors of pictures; zeros for one that is gone."""
    columns = ["id", "vector"]
    rows: dict[str, np.ndarray] = {}
    for start in range(0, len(ids), AT_ONCE):
        images = store.select(ids[start : start + AT_ONCE], columns)
        rows.update(zip(images.values("id"), images.vectors(), strict=True))
    return torch.from_numpy(
        np.stack([rows.get(one, np.zeros(store.settings.layout.vector_width)) for one in ids])
    ).float()


def check_text(text: object) -> None:
    """Raise ValueError for what is no sentence to search by."""
    if not isinstance(text, str):
        raise ValueError(f"A query is a text, like 'a dog running on the beach', not {type(text).__name__}.")
    if not text.strip():
        raise ValueError("The query is blank. Write what to look for, like 'a dog running on the beach'.")
