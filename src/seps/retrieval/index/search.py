"""Search a store: candidates by their vectors and by words of their descriptions, then the exact score of each."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from seps.retrieval.data import ImageSource
from seps.retrieval.data.images import decode_image
from seps.retrieval.data.shards import read_source
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.index import lexical
from seps.retrieval.index.bank import GOOD, NO_BANK, Calibration, background
from seps.retrieval.index.codec import StoredScorer, image_vectors, model_hash, restore, text_vectors, unpack_padded
from seps.retrieval.index.embedding import computing_threads
from seps.retrieval.index.lexical import Matches
from seps.retrieval.index.rows import Columns, Filters, StoreError
from seps.retrieval.index.store import Store
from seps.retrieval.index.zeroshot import Query, ZeroShotModel, load_search_model, nat_of, other_words
from seps.retrieval.model import RetrievalModel

__all__ = ["CANDIDATES", "SHOWN", "Filters", "Hit", "Searcher", "nanoseconds"]

CANDIDATES = 200
SCORED_AT_ONCE = 32
"""Images that one core scores at a time: what fits its cache is much faster."""
SHOWN = ("id", "path", "member", "width", "height", "mtime", "sha256")


@dataclass(frozen=True)
class Hit:
    """One image that was found."""

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
    """Parts of the score that do not come from the model, by name: "lexical" for words found in the description,
    "background" for the level of the picture over the bank."""
    confidence: float | None = None
    """In [0, 1]; None where the store has no bank of background queries, or a picture was searched by."""

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
            **({"terms": {name: round(value, 6) for name, value in self.terms.items()}} if self.terms else {}),
        }


def nanoseconds(text: str) -> int:
    """A date like 2024-05-31, or with a time, as nanoseconds since 1970 (local time). Raises ValueError."""
    try:
        seconds = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"The date {text!r} cannot be read; write it like 2024-05-31") from error
    if abs(seconds) >= 2**63 / 1e9:
        raise ValueError(f"The date {text!r} is beyond what file times can hold (1678 to 2261)")
    return int(seconds * 1e9)


class Searcher:
    """Search one store, from any number of threads.

        searcher = Searcher("store")
        for hit in searcher.search("a dog on the beach", k=10): ...

    Raises StoreError for a store that is not there, or was made with other weights than `model` has.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        model: RetrievalModel | ZeroShotModel | str | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.store = store if isinstance(store, Store) else Store.open(store)
        settings = self.store.settings
        if model is None or isinstance(model, str):
            model = load_search_model(model or settings.model, device=device)
        self.model: RetrievalModel | ZeroShotModel = model
        self.model.eval()
        digest = self.model.embedder.digest() if isinstance(self.model, ZeroShotModel) else model_hash(self.model)
        if digest != settings.model_hash:
            raise StoreError(
                f"The store {self.store.location} was made with {settings.model} ({settings.model_hash[:8]}), whose "
                "weights are not those of the model that came. Use that model, or index again into another store."
            )
        if isinstance(self.model, ZeroShotModel) and model_hash(self.model.describer) != settings.words_hash:
            raise StoreError(other_words(self.store.location))
        self.scorer = None if isinstance(self.model, ZeroShotModel) else StoredScorer(self.model, settings)
        # One query already uses every core; more than two at a time only use memory.
        self._running = threading.BoundedSemaphore(2)
        self._pool = computing_threads(max(1, torch.get_num_threads()), "seps-search")

    def search(
        self,
        text: str,
        k: int = 10,
        *,
        candidates: int = CANDIDATES,
        exact: bool = False,
        filters: Filters | None = None,
        min_confidence: float | None = None,
    ) -> list[Hit]:
        """The `k` images that fit the text best.

        `candidates` images are found by their vectors and scored exactly; with `exact` all images are. Hits below
        `min_confidence` are left out. Raises StoreError for it where the store has no bank of background queries.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError("The query is blank. Write what to look for, like 'a dog running on the beach'.")
        if min_confidence is not None and not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence is {min_confidence}; it must lie between 0 and 1.")
        calibration = self.calibration
        if min_confidence is not None and calibration is None:
            raise StoreError(f"There is no confidence to compare with. {self.without_bank}")
        with self._running:
            query = self.encode(text)
            hits = self.search_words(query, k, candidates, exact, filters, lexical.matches(text, self.store))
        if calibration is None:
            return hits
        hits = [replace(hit, confidence=calibration.confidence(hit.score)) for hit in hits]
        return [hit for hit in hits if min_confidence is None or (hit.confidence or 0.0) >= min_confidence]

    def search_words(
        self,
        query: TextFeatures | Query,
        k: int,
        candidates: int,
        exact: bool = False,
        filters: Filters | None = None,
        found: Matches = lexical.NONE,
    ) -> list[Hit]:
        """As `search`, for one encoded query and what was `found` of its words, without confidences."""
        vector = self._pool.submit(self.search_vector, query).result()
        return self._find(query, vector, k, candidates, exact, filters, True, found)

    @property
    def calibration(self) -> Calibration | None:
        """What scores are worth in this gallery, where the store knows it."""
        return Calibration.from_dict(self.store.settings.calibration)

    @property
    def without_bank(self) -> str:
        """A sentence on what a store of our models lacks that has no bank of background queries; else empty."""
        settings = self.store.settings
        if settings.bank or isinstance(self.model, ZeroShotModel):
            return ""
        return NO_BANK.format(self.store.location, settings.root, self.store.location)

    def encode(self, text: str) -> TextFeatures | Query:
        """One query as the model sees it."""
        if isinstance(self.model, ZeroShotModel):
            return self._pool.submit(self.model.query, [text.strip()]).result()
        return self._pool.submit(self.model.encode_texts, [text.strip()]).result()

    def search_vector(self, query: TextFeatures | Query) -> torch.Tensor:
        """The vector that finds the candidates of an encoded sentence."""
        if isinstance(self.model, ZeroShotModel):
            return self.model.search_vector(cast(Query, query))
        return text_vectors(cast(TextFeatures, query))[0]

    def note(self, text: str) -> str:
        """A sentence where the model does not read the whole query; else an empty text."""
        if isinstance(self.model, ZeroShotModel):
            cut = self.model.embedder.cut(text.strip())
        else:
            count = int(self.model.text.tokenize([text.strip()]).mask.sum())
            most = self.model.config.max_words
            cut = (count, most) if count > most else None
        if cut is None:
            return ""
        return f"The model reads the first {cut[1]} tokens of a query, and this one has more: its end was not used."

    @property
    def nat(self) -> float:
        """What a score changes by when a match becomes e times likelier."""
        return nat_of(self.model)

    def search_image(
        self,
        picture: str | os.PathLike[str] | bytes,
        k: int = 10,
        *,
        candidates: int = CANDIDATES,
        exact: bool = False,
        filters: Filters | None = None,
    ) -> list[Hit]:
        """The `k` images most like a picture (a file, or its bytes): its patches are the words of the query.

        Its pixels are made as the store's were (`StoreSettings.pixels`). Descriptions are not used.
        Raises UnreadableImage.
        """
        query, vector = self.encode_image(picture)
        return self.search_encoded_image(query, vector, k, candidates, exact, filters)

    def encode_image(self, picture: str | os.PathLike[str] | bytes) -> tuple[TextFeatures | Query, torch.Tensor]:
        """A picture as a query, and the vector that finds its candidates. Raises UnreadableImage."""
        source = ImageSource(Path("upload") if isinstance(picture, bytes) else Path(picture))
        data = picture if isinstance(picture, bytes) else read_source(source)
        if isinstance(self.model, ZeroShotModel):
            prepared = decode_image(data, source, self.model.image_size, self.model.embedder.prepare)
            with self._running:
                query = Query(self._pool.submit(self.model.images, [prepared]).result(), None)
                return query, self.model.search_vector(query)
        pixels = decode_image(data, source, self.model.image_size, self.store.settings.pixels)
        with self._running:
            tokens = self._pool.submit(self._encode_pixels, pixels).result()
            patches = tokens[:, self.model.vision.num_prefix_tokens :]
            mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
            return TextFeatures(patches, mask), image_vectors(self.model, ImageFeatures(tokens))[0]

    def search_encoded_image(
        self,
        query: TextFeatures | Query,
        vector: torch.Tensor,
        k: int,
        candidates: int,
        exact: bool = False,
        filters: Filters | None = None,
    ) -> list[Hit]:
        """As `search_image`, for what `encode_image` made of the picture."""
        with self._running:
            return self._find(query, vector, k, candidates, exact, filters, described=False)

    @torch.no_grad()
    def _encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        model = cast(RetrievalModel, self.model)
        return model.encode_pixels(pixels[None].to(self.model.device).float() / 255)

    def _find(
        self,
        query: TextFeatures | Query,
        vector: torch.Tensor,
        k: int,
        candidates: int,
        exact: bool,
        filters: Filters | None,
        described: bool,
        found: Matches = lexical.NONE,
    ) -> list[Hit]:
        if k < 1 or candidates < 1:
            raise ValueError(f"k is {k} and candidates {candidates}; both must be at least 1.")
        columns = [*SHOWN, *self.columns]
        parts: Iterable[Columns]
        if exact:
            parts = self.store.scan(columns, filters)
        else:
            parts = self._candidates(vector.cpu().numpy(), max(k, candidates), columns, filters, found)
        best: list[tuple[float, str, Mapping[str, Any], Mapping[str, float]]] = []
        for images in parts:
            rows = images.rows(SHOWN)
            scored = [
                (-score - sum(terms.values()), row["id"], row, terms)
                for score, row, terms in zip(
                    self.scores(images, query, described), rows, self.terms(images, found, described), strict=True
                )
            ]
            best = heapq.nsmallest(k, [*best, *scored], key=lambda entry: entry[:2])
        return [Hit(rank, -score, **row, terms=terms) for rank, (score, _, row, terms) in enumerate(best, 1)]

    @property
    def columns(self) -> tuple[str, ...]:
        """What the store holds of an image that its score needs."""
        settings = self.store.settings
        columns = ("vector", "words") if isinstance(self.model, ZeroShotModel) else settings.state
        return (*columns, "bank") if settings.bank else columns

    def _candidates(
        self, vector: Any, count: int, columns: Sequence[str], filters: Filters | None, found: Matches
    ) -> Iterable[Columns]:
        """The images nearest by vector, then those among the rest whose descriptions have most of the query's words."""
        near = self.store.nearest(vector, count, columns, filters)
        yield near
        if found.found:
            known = set(near.values("id"))
            more = [identity for identity in found.best(len(found.found)) if identity not in known]
            more = self.store.among(more, filters)[:count]
            if more:
                yield self.store.select(more, columns)

    def terms(self, images: Columns, found: Matches, described: bool = True) -> list[dict[str, float]]:
        """Per image what is added to the model's score, by name: for rare words `found`, and its level over the bank.

        Without `described` (a picture was searched by) the bank, whose queries are sentences, adds nothing.
        """
        added = [self.nat * found.of(identity) for identity in images.values("id")]
        terms = [{"lexical": value} if value else {} for value in added]
        if described and self.store.settings.bank:
            for own, level in zip(terms, background(images.values("bank")), strict=True):
                own["background"] = level
        return terms

    def scores(self, images: Columns, query: TextFeatures | Query, described: bool = True) -> list[float]:
        """Exact scores of the model, of images read with `columns`, a few at a time on each core."""

        def part(start: int) -> list[float]:
            some: list[float] = self._scores(images.part(start, step), query, described)[:, 0].tolist()
            return some

        step = SCORED_AT_ONCE if self.model.device.type == "cpu" else max(1, len(images))
        return [score for some in self._pool.map(part, range(0, len(images), step)) for score in some]

    def _scores(self, images: Columns, query: TextFeatures | Query, described: bool) -> torch.Tensor:
        settings, device = self.store.settings, self.model.device
        if isinstance(self.model, ZeroShotModel):
            words, mask = unpack_padded(images.values("words"), settings.words_width or settings.width)
            vectors = torch.from_numpy(np.array(images.vectors()[:, : settings.width]))
            return self.model.scores(vectors.to(device), words.to(device), mask.to(device), cast(Query, query))
        stored = restore(images, settings, device)
        scorer = cast(StoredScorer, self.scorer)
        return scorer.score(stored if described else stored.without_description(), cast(TextFeatures, query))

    def image_source(self, row: Mapping[str, Any]) -> ImageSource:
        """Where the original of a row with `path` and `member` is. Raises StoreError for a path out of the folder."""
        root = Path(os.path.realpath(self.store.settings.root))
        path = Path(os.path.realpath(root / str(row["path"])))
        if not path.is_relative_to(root):
            raise StoreError(f"The path {row['path']!r} leads out of the indexed folder; it is not read.")
        return ImageSource(path, row["member"])
