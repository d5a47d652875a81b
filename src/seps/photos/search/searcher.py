"""Search a store: candidates by their vectors and by words of their descriptions, then the exact score of each."""

from __future__ import annotations

import heapq
import os
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from seps.images.decoding import decode_image
from seps.images.shards import read_source
from seps.images.sources import ImageSource
from seps.photos.search.query import CANDIDATES, check_text
from seps.photos.search.results import SHOWN, Hit
from seps.photos.store.filters import Filters
from seps.photos.store.rows import OTHER_WORDS, OtherModelError, OutdatedStoreError, StoreError
from seps.photos.store.store import Store
from seps.photos.store.tables import CandidateEstimate, Columns
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.loading import engine_of, load_engine
from seps.retrieval.engine.queries import Array, Queries, as_array
from seps.retrieval.languages import is_short, language_note
from seps.retrieval.ranking.bank import NO_BANK, OUTDATED, has_article, is_outdated, level, noun_vectors
from seps.retrieval.ranking.confidence import Calibration, falling, ranked, sentence_share, word_confidence
from seps.retrieval.ranking.terms import (
    NO_MATCHES,
    GalleryFacts,
    ImageFacts,
    Matches,
    add_to_scores,
    added_terms,
    matches_of,
)
from seps.threads import computing_threads, cores_used

if TYPE_CHECKING:
    import torch

SCORED_AT_ONCE = 32
"""Images that one core scores at a time: what fits its cache is much faster."""
CUT = "The model reads the first {} tokens of a query, and this one has more: its end was not used."
OTHER_TEXTS = (
    "This search reads queries by the text side {}, and the confidences of the store {} are of the text side {}. To "
    "bring them up to date, run once more: seps index --store {}"
)


@dataclass(frozen=True)
class Part:
    """One part of a query, a sentence or a picture, as the model sees it."""

    query: Queries
    vector: Array
    """(C,) its product with an image's vector is about the score."""
    described: bool
    """A sentence: descriptions and the bank of background queries take part."""
    matches: Matches = NO_MATCHES
    sign: int = 1
    """-1: the score of this part is taken off."""
    apart: bool = False
    """A short query that the engine reads in another way than sentences."""
    strength: float = 1.0
    """What of the store's strength takes a picture's level off: less where it is read apart."""
    scale: float = 1.0
    mean: float = 0.0
    """Beside other parts its score s counts as `scale (s - mean)`; see `seps.photos.search.sums`."""

    @property
    def factor(self) -> float:
        """What the score is multiplied by, with its sign."""
        return self.sign * self.scale


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
        model: object = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """`model`: its name, a model or an engine; None: that of the store."""
        self.store = store if isinstance(store, Store) else Store.open(store)
        settings = self.store.settings
        if is_outdated(settings.bank, settings.calibration_tag):
            raise OutdatedStoreError(OUTDATED.format(self.store.location, shlex.quote(self.store.location)))
        name = settings.model if model is None else model
        self.engine: Engine = (
            load_engine(name, device=device, sentences=True, size=settings.layout.size)
            if isinstance(name, str)
            else engine_of(name)
        )
        """It reads sentences and scores stored pictures."""
        digests = self.engine.digests()
        if digests.pictures != settings.model_hash:
            raise OtherModelError(
                f"The store {self.store.location} was made with {settings.model} ({settings.model_hash[:8]}), whose "
                "weights are not those of the model given here. Use that model, or index again into another store."
            )
        if digests.words != settings.words_hash:
            raise OtherModelError(OTHER_WORDS.format(self.store.location))
        self.text_hash = digests.texts
        """Digest of the text side that reads queries; of a dual encoder it is empty."""
        # One query already uses every core; more than two at a time only use memory.
        self.running = threading.BoundedSemaphore(2)
        self._pool = computing_threads(cores_used(), "seps-search")

    def close(self) -> None:
        """End its threads; it cannot search any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

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
            sure = None if calibration is None else self._confidences(calibration, text, part, hits)
        if sure is not None:
            hits = [replace(hit, confidence=value) for hit, value in zip(hits, sure, strict=True)]
        return [hit for hit in hits[:k] if min_confidence is None or (hit.confidence or 0.0) >= min_confidence]

    def part_of_text(self, text: str, sign: int = 1) -> Part:
        """A sentence as one part of a query."""
        part, less = self.part_of_query(self.encode(text), sign), self.engine.traits.short_background
        part = replace(part, matches=matches_of(text, self.store))
        return part if less is None or not is_short(text) else replace(part, apart=True, strength=less)

    def part_of_query(self, query: Queries, sign: int = 1) -> Part:
        """An encoded sentence as one part of a query; its words are not looked up."""
        return Part(query, as_array(self._pool.submit(self.engine.vectors, query).result())[0], True, sign=sign)

    @property
    def calibration(self) -> Calibration | None:
        """What scores are worth in this gallery, where the store knows it."""
        return Calibration.from_dict(self.store.settings.calibration)

    @property
    def strength(self) -> float:
        """Part of an image's level over the bank that is taken off its scores."""
        # Where it is found for each gallery: until that is done, scores stay plain.
        usual = self.engine.traits.background_weight or 0.0
        return self.store.settings.calibration.get("strength", usual)

    @property
    def without_bank(self) -> str:
        """A sentence on what a store lacks that has no bank of background queries; else empty."""
        place, settings = self.store.location, self.store.settings
        return "" if settings.bank else NO_BANK.format(place, settings.root, place)

    def encode(self, text: str) -> Queries:
        """One query as the engine sees it."""
        return self._pool.submit(self.engine.encode_texts, [text.strip()]).result()

    def note(self, text: str) -> str:
        """Sentences where the model does not read the whole of the query, or by another text side than the store's."""
        unread, settings, notes = self.engine.unread(text.strip()), self.store.settings, []
        if unread.foreign:
            notes.append(language_note(settings))
        elif unread.cut is not None:
            notes.append(CUT.format(unread.cut[1]))
        if settings.bank and settings.text_hash != self.text_hash:
            place = self.store.location
            notes.append(OTHER_TEXTS.format(self.text_hash[:8], place, settings.text_hash[:8], shlex.quote(place)))
        return " ".join(notes)

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
        if isinstance(picture, bytes):
            source, data = ImageSource(Path("upload")), picture
        else:
            source = ImageSource(Path(picture))
            data = read_source(source)
        decoded = decode_image(data, source, self.engine.traits.image_size, self.engine.decoding)
        encoded = self._pool.submit(self.engine.encode_pixels, [decoded]).result()
        pictures = self.engine.pictures(encoded)
        return Part(pictures.as_queries(), as_array(self.engine.vectors(pictures))[0], False, sign=sign)

    def _confidences(self, calibration: Calibration, text: str, part: Part, hits: Sequence[Hit]) -> list[float]:
        """Of the best hits for one sentence, in the order of ranks, which they fall with."""
        # The calibration is of sentences, and so of their projection and of their strength of the background.
        share = 0.0 if part.apart else sentence_share(text)
        if share == 1 or not hits:
            return [calibration.confidence(hit.score) for hit in hits]
        traits, digests = self.engine.traits, self.store.settings.digests._replace(texts=self.text_hash)
        vectors = self._vectors([hit.id for hit in hits])
        others = noun_vectors(self.engine, digests)[0 if has_article(text) else 1]
        better = (vectors @ part.vector - level(vectors @ others.T)) * self.slope
        pairs = zip(better.tolist(), hits, strict=True)
        fits = falling([(value + hit.terms.get("lexical", 0.0)) / traits.score_unit for value, hit in pairs])
        return [
            share * calibration.confidence(hit.score) + (1 - share) * word_confidence(fit, traits.word_fit)
            for fit, hit in zip(fits, hits, strict=True)
        ]

    def _vectors(self, ids: Sequence[str]) -> Array:
        """(B, C) search vectors of pictures; zeros for one that is gone."""
        rows = dict.fromkeys(ids, np.zeros(self.store.settings.layout.vector_width, np.float32))
        for images in self.store.parts(ids, ["id", "vector"]):
            rows.update(zip(images.values("id"), images.vectors(), strict=True))
        return np.stack([rows[identity] for identity in ids])

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
            best = heapq.nsmallest(k, [*best, *scored], key=itemgetter(0, 1))
        hits = []
        for rank, (score, _, row) in enumerate(best, 1):
            values = row.pop("values")
            hits.append(Hit(rank, -score, **row, parts=values if len(values) > 1 else ()))
        return hits

    def _values(self, images: Columns, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Per image what each part adds to its score (`values`), and the sums of what the model does not (`terms`)."""
        facts: list[dict[str, Any]] = [{"values": [], "terms": {}} for _ in range(len(images))]
        for part in parts:
            for own, (score, terms) in zip(facts, self.scored(images, part), strict=True):
                own["values"].append(part.factor * (score + sum(terms.values()) - part.mean))
                for name, value in terms.items():
                    own["terms"][name] = own["terms"].get(name, 0.0) + part.factor * value
        return facts

    @property
    def columns(self) -> tuple[str, ...]:
        """What the store holds of an image that its score needs."""
        settings = self.store.settings
        return (*settings.layout.columns, "bank") if settings.bank else settings.layout.columns

    def estimate(self, sentences: float = 1) -> CandidateEstimate | None:
        """The estimate of a score by which candidates are chosen; None without a bank, where the vectors decide alone.

        The product of vectors times twice the weight of the pooled cosine (the alignment of words grows about as fast
        with it), minus the level over the bank times `sentences`, the sum of their factors and strengths."""
        if not sentences or not self.store.settings.bank:
            return None
        return CandidateEstimate(self.slope, -self.strength * sentences)

    @property
    def slope(self) -> float:
        """About what a score gains where the product of the vectors gains 1."""
        return self.store.settings.layout.slope or self.engine.traits.vector_slope

    def _candidates(
        self, parts: Sequence[Part], count: int, columns: Sequence[str], filters: Filters
    ) -> Iterable[Columns]:
        """The images nearest by vector, then those among the rest whose descriptions have most of the query's words."""
        vector = cast(Array, sum(part.factor * part.vector for part in parts))
        estimate = self.estimate(sum(part.factor * part.strength for part in parts if part.described))
        near = self.store.nearest(vector, count, columns, filters, estimate)
        yield near
        known = set(near.values("id"))
        for part in parts:
            matches = part.matches if part.factor > 0 else NO_MATCHES
            more = [identity for identity in matches.best(len(matches.found)) if identity not in known]
            if more := self.store.among(more, filters, count):
                known.update(more)
                yield self.store.select(more, columns)

    def _facts(self, images: Columns, strength: float = 1.0) -> tuple[ImageFacts, GalleryFacts]:
        settings = self.store.settings
        described = [value is not None for value in images.values(settings.layout.described_column)]
        levels = images.values("bank") if settings.bank else None
        gallery = GalleryFacts(
            self.engine.traits.score_unit, strength * self.strength, settings.calibration.get("gap", 0.0)
        )
        return ImageFacts(images.values("id"), described, levels), gallery

    def scored(self, images: Columns, part: Part) -> Iterator[tuple[float, dict[str, float]]]:
        """Per image read with `columns` the exact score of the model, and what is added to it, by name.

        A few are scored at a time on each core. Where a picture is searched by, neither descriptions nor the bank,
        whose queries are sentences, take part.
        """

        def scores(start: int) -> list[float]:
            pictures = self.pictures(images.part(start, step))
            pictures = pictures if part.described else pictures.without_descriptions()
            some: list[float] = as_array(self.engine.score(pictures, part.query))[:, 0].tolist()
            return some

        step = SCORED_AT_ONCE if self.engine.device.type == "cpu" else max(1, len(images))
        exact = chain.from_iterable(self._pool.map(scores, range(0, len(images), step)))
        facts, gallery = self._facts(images, part.strength)
        return zip(exact, added_terms(facts, part.matches, gallery, is_sentence=part.described), strict=True)

    def query_scores(self, images: Columns, queries: Queries, strength: float = 1.0) -> Array:
        """(B, T) what searches for several encoded queries of one `Part.strength` give images read with `columns`."""
        facts, gallery = self._facts(images, strength)
        return add_to_scores(as_array(self.engine.score(self.pictures(images), queries)), facts, None, gallery)

    def pictures(self, images: Columns) -> Any:
        """Images read with `columns`, as the engine scores them."""
        return self.store.settings.layout.unpack(images, self.engine.device)

    def image_source(self, row: Mapping[str, Any]) -> ImageSource:
        """Where the original of a row with `path` and `member` is. Raises StoreError for a path out of the folder."""
        return self.store.settings.source(row)
