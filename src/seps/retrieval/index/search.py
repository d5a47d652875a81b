"""Search a store: candidates by their vectors, then the exact score of each."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from seps.retrieval.data import ImageSource
from seps.retrieval.data.images import decode_image
from seps.retrieval.data.shards import read_source
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.index.bank import GOOD, NO_BANK, Calibration, background
from seps.retrieval.index.codec import StoredScorer, image_vectors, model_hash, restore, text_vectors
from seps.retrieval.index.embedding import computing_threads
from seps.retrieval.index.rows import Columns, StoreError
from seps.retrieval.index.store import Filters, Store
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

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
        model: RetrievalModel | str | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.store = store if isinstance(store, Store) else Store.open(store)
        settings = self.store.settings
        name = model if isinstance(model, str) else settings.model
        self.model = model if isinstance(model, RetrievalModel) else from_pretrained(name, device=device)
        self.model.eval()
        if model_hash(self.model) != settings.model_hash:
            raise StoreError(
                f"The store {self.store.location} was made with {settings.model} ({settings.model_hash[:8]}), whose "
                "weights are not those of the model that came. Use that model, or index again into another store."
            )
        self.scorer = StoredScorer(self.model, settings)
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
            hits = self.search_words(self.encode(text), k, candidates, exact, filters)
        if calibration is None:
            return hits
        hits = [replace(hit, confidence=calibration.confidence(hit.score)) for hit in hits]
        return [hit for hit in hits if min_confidence is None or (hit.confidence or 0.0) >= min_confidence]

    def search_words(
        self, words: TextFeatures, k: int, candidates: int, exact: bool = False, filters: Filters | None = None
    ) -> list[Hit]:
        """As `search`, for one encoded query, without confidences."""
        return self._find(words, text_vectors(words)[0], k, candidates, exact, filters, described=True)

    @property
    def calibration(self) -> Calibration | None:
        """What scores are worth in this gallery, where the store knows it."""
        return Calibration.from_dict(self.store.settings.calibration)

    @property
    def without_bank(self) -> str:
        """A sentence on what a store lacks that has no bank of background queries; empty where it has one."""
        settings = self.store.settings
        return "" if settings.bank else NO_BANK.format(self.store.location, settings.root, self.store.location)

    def encode(self, text: str) -> TextFeatures:
        """The words of one query."""
        return self._pool.submit(self.model.encode_texts, [text.strip()]).result()

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
        source = ImageSource(Path("upload") if isinstance(picture, bytes) else Path(picture))
        data = picture if isinstance(picture, bytes) else read_source(source)
        pixels = decode_image(data, source, self.model.image_size, self.store.settings.pixels)
        with self._running:
            tokens = self._pool.submit(self._encode_pixels, pixels).result()
            patches = tokens[:, self.model.vision.num_prefix_tokens :]
            mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
            vector = image_vectors(self.model, ImageFeatures(tokens))[0]
            words = TextFeatures(patches, mask)
            return self._find(words, vector, k, candidates, exact, filters, described=False)

    @torch.no_grad()
    def _encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model.encode_pixels(pixels[None].to(self.model.device).float() / 255)

    def _find(
        self,
        words: TextFeatures,
        vector: torch.Tensor,
        k: int,
        candidates: int,
        exact: bool,
        filters: Filters | None,
        described: bool,
    ) -> list[Hit]:
        if k < 1 or candidates < 1:
            raise ValueError(f"k is {k} and candidates {candidates}; both must be at least 1.")
        columns = [*SHOWN, *self.columns]
        parts: Iterable[Columns]
        if exact:
            parts = self.store.scan(columns, filters)
        else:
            parts = [self.store.nearest(vector.cpu().numpy(), max(k, candidates), columns, filters)]
        best: list[tuple[float, str, Mapping[str, Any]]] = []
        for images in parts:
            scores, rows = self.scores(images, words, described), images.rows(SHOWN)
            if described:
                scores = [score + added for score, added in zip(scores, self.background(images), strict=True)]
            scored = [(-score, row["id"], row) for score, row in zip(scores, rows, strict=True)]
            best = heapq.nsmallest(k, [*best, *scored], key=lambda entry: entry[:2])
        return [Hit(rank, -score, **row) for rank, (score, _, row) in enumerate(best, 1)]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `scores` and `background` read."""
        settings = self.store.settings
        return (*settings.state, "bank") if settings.bank else settings.state

    def background(self, images: Columns) -> list[float]:
        """What the bank of background queries adds to the score of each image, read with `columns`, for any text."""
        return background(images.values("bank")) if self.store.settings.bank else [0.0] * len(images)

    def scores(self, images: Columns, words: TextFeatures, described: bool = True) -> list[float]:
        """Exact scores, without the bank, of images read with `StoreSettings.state`, a few at a time on each core."""

        def part(start: int) -> list[float]:
            stored = restore(images.part(start, step), self.store.settings, self.model.device)
            stored = stored if described else stored.without_description()
            return self.scorer.score(stored, words)[:, 0].tolist()

        step = SCORED_AT_ONCE if self.model.device.type == "cpu" else max(1, len(images))
        return [score for some in self._pool.map(part, range(0, len(images), step)) for score in some]

    def image_source(self, row: Mapping[str, Any]) -> ImageSource:
        """Where the original of a row with `path` and `member` is. Raises StoreError for a path out of the folder."""
        root = Path(os.path.realpath(self.store.settings.root))
        path = Path(os.path.realpath(root / str(row["path"])))
        if not path.is_relative_to(root):
            raise StoreError(f"The path {row['path']!r} leads out of the indexed folder; it is not read.")
        return ImageSource(path, row["member"])
