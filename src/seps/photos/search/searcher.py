"""Search a store: candidates by their vectors and by words of their descriptions, then the exact score of each."""

from __future__ import annotations

import heapq
import os
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from seps.images.decoding import decode_image
from seps.images.shards import read_source
from seps.images.sources import ImageSource
from seps.photos.search.hits import SHOWN, Hit, Part, check_text, confidences
from seps.photos.search.query import CANDIDATES
from seps.photos.store.filters import Filters
from seps.photos.store.rows import Columns, OtherModelError, OutdatedStoreError, StoreError
from seps.photos.store.store import Store
from seps.photos.store.vector_index import Prior
from seps.photos.threads import computing_threads
from seps.retrieval.engine.codec import StoredScorer, image_vectors, model_hash, restore, text_hash, unpack_padded
from seps.retrieval.engine.zeroshot import Query, ZeroShotModel, load_search_model, nat_of, other_words, words_digest
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.languages import language_note
from seps.retrieval.model import RetrievalModel
from seps.retrieval.ranking import lexical
from seps.retrieval.ranking.bank import NO_BANK, OUTDATED, is_outdated, search_vectors, stored_background
from seps.retrieval.ranking.confidence import STRENGTH, Calibration, ranked
from seps.retrieval.ranking.lexical import Matches
from seps.retrieval.sentences import AbsentVision, sentence_side

SCORED_AT_ONCE = 32
"""Images that one core scores at a time: what fits its cache is much faster."""
OTHER_TEXTS = (
    "This search reads queries by the text side {}, and the confidences of the store {} are of the text side {}. To "
    "bring them up to date, run once more: seps index --store {}"
)


class Searcher:
    """Search one store, from any number of threads.

        searcher = Searcher("store")
        for hit in searcher.search("a dog on the beach", k=10): ...

    Raises StoreError for a store that is not there, was made with other weights than `model` has, or was scored by
    another version of seps.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        model: RetrievalModel | ZeroShotModel | str | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.store = store if isinstance(store, Store) else Store.open(store)
        if is_outdated(self.store.settings):
            raise OutdatedStoreError(OUTDATED.format(self.store.location, shlex.quote(self.store.location)))
        self._device, self._loading = device, threading.Lock()
        self._name = model if isinstance(model, str) else self.store.settings.model
        side = sentence_side(self._name, device) if model is None or isinstance(model, str) else None
        if side is not None:
            self._check(side[1])
        self.model: RetrievalModel | ZeroShotModel = self._whole(model) if side is None else side[0]
        """It reads sentences and scores images; an embedded one has no vision encoder before `load_vision`."""
        self.text_hash = text_hash(self.model) if isinstance(self.model, RetrievalModel) else ""
        """Digest of the text side that reads queries; of a dual encoder it is empty."""
        scores = isinstance(self.model, RetrievalModel)
        self.scorer = StoredScorer(cast(RetrievalModel, self.model), self.store.settings) if scores else None
        # One query already uses every core; more than two at a time only use memory.
        self.running = threading.BoundedSemaphore(2)
        self._pool = computing_threads(max(1, torch.get_num_threads()), "seps-search")

    def close(self) -> None:
        """End its threads; it cannot search any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def load_vision(self) -> None:
        """Read the vision encoder of an embedded model, which sentences do not need; once.

        Raises StoreError for weights that are not those of the store.
        """
        with self._loading:
            if isinstance(self.model, RetrievalModel) and isinstance(self.model.vision, AbsentVision):
                self.model.vision = cast(RetrievalModel, self._whole(self._name)).vision

    def _whole(self, model: RetrievalModel | ZeroShotModel | str | None) -> RetrievalModel | ZeroShotModel:
        """The model with all of its weights, checked."""
        if model is None or isinstance(model, str):
            model = load_search_model(self._name, device=self._device)
        model.eval()
        digest = model.embedder.digest() if isinstance(model, ZeroShotModel) else model_hash(model)
        self._check(digest, words_digest(model.describer) if isinstance(model, ZeroShotModel) else None)
        return model

    def _check(self, digest: str, words: str | None = None) -> None:
        """Raise StoreError unless the store was made with a model of this digest, and words of that one."""
        settings = self.store.settings
        if digest != settings.model_hash:
            raise OtherModelError(
                f"The store {self.store.location} was made with {settings.model} ({settings.model_hash[:8]}), whose "
                "weights are not those of the model given here. Use that model, or index again into another store."
            )
        if words is not None and words != settings.words_hash:
            raise OtherModelError(other_words(self.store.location))

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
        check_text(text)
        if min_confidence is not None and not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence is {min_confidence}; it must lie between 0 and 1.")
        self.store.version()  # looks for a newer commit: another process may have excluded pictures, or calibrated
        calibration = self.calibration
        if min_confidence is not None and calibration is None:
            raise StoreError(f"There is no confidence to compare with. {self.without_bank}")
        with self.running:
            depth = k if calibration is None else ranked(k, None if exact else max(k, candidates))
            part = self.part_of_text(text)
            hits = self.search_parts([part], depth, max(k, candidates), exact, filters)
            sure = confidences(self, text, part, hits)
        if sure is not None:
            hits = [replace(hit, confidence=value) for hit, value in zip(hits, sure, strict=True)]
        return [hit for hit in hits[:k] if min_confidence is None or (hit.confidence or 0.0) >= min_confidence]

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
        return self.search_parts([self._sentence(query, found)], k, candidates, exact, filters)

    def part_of_text(self, text: str, sign: int = 1) -> Part:
        """A sentence as one part of a query."""
        return self._sentence(self.encode(text), lexical.matches(text, self.store), sign)

    def _sentence(self, query: TextFeatures | Query, found: Matches, sign: int = 1) -> Part:
        return Part(query, self._pool.submit(self.search_vector, query).result(), True, found, sign)

    def search_vector(self, query: TextFeatures | Query) -> torch.Tensor:
        """The vector that finds the candidates of an encoded sentence."""
        return search_vectors(self.model, query)[0]

    @property
    def calibration(self) -> Calibration | None:
        """What scores are worth in this gallery, where the store knows it."""
        return Calibration.from_dict(self.store.settings.calibration)

    @property
    def strength(self) -> float:
        """Part of an image's level over the bank that is taken off its scores."""
        # A dual encoder's is made of the whole gallery: until that is done, its scores stay plain.
        usual = 0.0 if isinstance(self.model, ZeroShotModel) else STRENGTH
        return self.store.settings.calibration.get("strength", usual)

    @property
    def other_texts(self) -> str:
        """A sentence where the store's confidences are of another text side than the model's; else empty."""
        settings, place = self.store.settings, self.store.location
        if not settings.bank or settings.text_hash == self.text_hash:
            return ""
        return OTHER_TEXTS.format(self.text_hash[:8], place, settings.text_hash[:8], shlex.quote(place))

    @property
    def without_bank(self) -> str:
        """A sentence on what a store lacks that has no bank of background queries; else empty."""
        place, settings = self.store.location, self.store.settings
        return "" if settings.bank else NO_BANK.format(place, settings.root, place)

    def encode(self, text: str) -> TextFeatures | Query:
        """One query as the model sees it."""
        if isinstance(self.model, ZeroShotModel):
            return self._pool.submit(self.model.query, [text.strip()]).result()
        return self._pool.submit(self.model.encode_texts, [text.strip()]).result()

    def note(self, text: str) -> str:
        """Sentences where the model does not read the whole of the query, or by another text side than the store's."""
        return " ".join(filter(None, (self._unread(text), self.other_texts)))

    def _unread(self, text: str) -> str:
        cut, other = self.model.cut(text.strip()), language_note(self.model, text, self.store.settings)
        if cut is None or other:
            return other
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

        Descriptions are not used.
        Raises UnreadableImage.
        """
        with self.running:
            return self.search_parts([self.part_of_image(picture)], k, candidates, exact, filters)

    def part_of_image(self, picture: str | os.PathLike[str] | bytes, sign: int = 1) -> Part:
        """A picture as one part of a query. Raises UnreadableImage."""
        source = ImageSource(Path("upload") if isinstance(picture, bytes) else Path(picture))
        data = picture if isinstance(picture, bytes) else read_source(source)
        if isinstance(self.model, ZeroShotModel):
            prepared = decode_image(data, source, self.model.image_size, self.model.embedder.prepare)
            query = Query(self._pool.submit(self.model.images, [prepared]).result(), None)
            return Part(query, self.model.search_vectors(query)[0], False, sign=sign)
        pixels = decode_image(data, source, self.model.image_size)
        tokens = self._pool.submit(self._encode_pixels, pixels).result()
        patches = tokens[:, self.model.vision.num_prefix_tokens :]
        mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        vector = image_vectors(self.model, ImageFeatures(tokens))[0]
        return Part(TextFeatures(patches, mask), vector, False, sign=sign)

    @torch.no_grad()
    def _encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        self.load_vision()
        model = cast(RetrievalModel, self.model)
        return model.encode_pixels(pixels[None].to(model.device).float() / 255)

    def search_parts(
        self,
        parts: Sequence[Part],
        k: int,
        candidates: int = CANDIDATES,
        exact: bool = False,
        filters: Filters | None = None,
    ) -> list[Hit]:
        """The `k` images with the highest sum of the parts' scores, each with its sign and scale; no confidences.

        S(v) = sum over parts p of sign_p scale_p (model(p, v) + lexical(p, v) + background(v) - mean_p), where
        `lexical` and `background` are of sentences alone. The search vector is the same sum of the parts' vectors,
        since a product with it is the sum of the products.
        """
        if k < 1 or candidates < 1:
            raise ValueError(f"k is {k} and candidates {candidates}; both must be at least 1.")
        filters = self.store.allowed(filters)
        columns = [*SHOWN, *self.columns]
        images: Iterable[Columns]
        if exact:
            images = self.store.scan(columns, filters)
        else:
            images = self._candidates(parts, max(k, candidates), columns, filters)
        best: list[tuple[float, str, dict[str, Any]]] = []
        for some in images:
            scored = [
                (-sum(facts["values"]), row["id"], {**row, **facts})
                for row, facts in zip(some.rows(SHOWN), self._values(some, parts), strict=True)
            ]
            best = heapq.nsmallest(k, [*best, *scored], key=lambda entry: entry[:2])
        hits = []
        for rank, (score, _, row) in enumerate(best, 1):
            values = row.pop("values")
            hits.append(Hit(rank, -score, **row, parts=values if len(values) > 1 else ()))
        return hits

    def _values(self, images: Columns, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Per image what each part adds to its score (`values`), and the sums of what the model does not (`terms`)."""
        facts: list[dict[str, Any]] = [{"values": [], "terms": {}} for _ in range(len(images))]
        for part in parts:
            scores = self.scores(images, part.query, part.described)
            added = self.terms(images, part.found, part.described)
            for own, score, terms in zip(facts, scores, added, strict=True):
                own["values"].append(part.factor * (score + sum(terms.values()) - part.mean))
                for name, value in terms.items():
                    own["terms"][name] = own["terms"].get(name, 0.0) + part.factor * value
        return facts

    @property
    def columns(self) -> tuple[str, ...]:
        """What the store holds of an image that its score needs."""
        settings = self.store.settings
        columns = ("vector", "words") if isinstance(self.model, ZeroShotModel) else settings.state
        return (*columns, "bank") if settings.bank else columns

    def prior(self, sentences: float = 1) -> Prior | None:
        """The estimate of a score by which candidates are chosen; None without a bank, where the vectors decide alone.

        The product of vectors times twice the weight of the pooled cosine (the alignment of words grows about as fast
        with it), minus the level over the bank times `sentences`, the sum of their factors."""
        if not sentences or not self.store.settings.bank:
            return None
        return Prior(self.slope, -self.strength * sentences)

    @property
    def slope(self) -> float:
        """About what a score gains where the product of the vectors gains 1."""
        net = None if self.scorer is None else self.scorer.net
        return 1.0 if net is None else 2 * net.config.pooled or 1.0

    def _candidates(
        self, parts: Sequence[Part], count: int, columns: Sequence[str], filters: Filters
    ) -> Iterable[Columns]:
        """The images nearest by vector, then those among the rest whose descriptions have most of the query's words."""
        vector = cast(torch.Tensor, sum(part.factor * part.vector for part in parts)).cpu().numpy()
        prior = self.prior(sum(part.factor for part in parts if part.described))
        near = self.store.nearest(vector, count, columns, filters, prior)
        yield near
        known = set(near.values("id"))
        for found in (part.found for part in parts if part.factor > 0):
            more = [identity for identity in found.best(len(found.found)) if identity not in known]
            if more := self.store.among(more, filters, count):
                known.update(more)
                yield self.store.select(more, columns)

    def terms(self, images: Columns, found: Matches, described: bool = True) -> list[dict[str, float]]:
        """Per image what is added to the model's score, by name: for rare words `found`, and its level over the bank.

        Without `described` (a picture was searched by) the bank, whose queries are sentences, adds nothing.
        """
        added = [self.nat * found.of(identity) for identity in images.values("id")]
        terms = [{"lexical": value} if value else {} for value in added]
        if described and self.store.settings.bank:
            gap = self.store.settings.calibration.get("gap", 0.0)
            for own, level in zip(terms, stored_background(images, self.strength, gap), strict=True):
                own["background"] = level
        return terms

    def scores(self, images: Columns, query: TextFeatures | Query, described: bool = True) -> list[float]:
        """Exact scores of the model, of images read with `columns`, a few at a time on each core."""

        def part(start: int) -> list[float]:
            some: list[float] = self._scores(images.part(start, step), query, described)[:, 0].tolist()
            return some

        step = SCORED_AT_ONCE if self.model.device.type == "cpu" else max(1, len(images))
        return [score for some in self._pool.map(part, range(0, len(images), step)) for score in some]

    def query_scores(self, images: Columns, queries: TextFeatures | Query) -> torch.Tensor:
        """(B, T) what searches for several encoded queries give images read with `columns` and `id`."""
        added = torch.tensor([sum(terms.values()) for terms in self.terms(images, lexical.NONE)])
        return self._scores(images, queries, True).cpu() + added[:, None]

    def _scores(self, images: Columns, query: TextFeatures | Query, described: bool) -> torch.Tensor:
        settings, device = self.store.settings, self.model.device
        if isinstance(self.model, ZeroShotModel):
            words, mask = unpack_padded(images.values("words"), settings.words_width or settings.width)
            vectors = torch.from_numpy(images.vectors()[:, : settings.width])
            return self.model.scores(vectors.to(device), words.to(device), mask.to(device), cast(Query, query))
        stored = restore(images, settings, device)
        scorer = cast(StoredScorer, self.scorer)
        return scorer.score(stored if described else stored.without_description(), cast(TextFeatures, query))

    def image_source(self, row: Mapping[str, Any]) -> ImageSource:
        """Where the original of a row with `path` and `member` is. Raises StoreError for a path out of the folder."""
        root = Path(os.path.realpath(self.store.settings.root_of(str(row["path"]))))
        path = Path(os.path.realpath(root / str(row["path"])))
        if not path.is_relative_to(root):
            raise StoreError(f"The path {row['path']!r} leads out of the indexed folder; it is not read.")
        return ImageSource(path, row["member"])
