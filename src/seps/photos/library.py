"""A person's pictures as one object: the model, the store and the search of a folder.

library = seps.Library("photos")
hits = library.search("a dog")
hits[0].explain().show()
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from seps.extras import install_command, require
from seps.images.dates import nanoseconds
from seps.images.decoding import as_file
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource
from seps.photos.search.query import CANDIDATES, Query, Sort, Term, check_text, how_read, terms_of
from seps.photos.search.ranking import rank
from seps.photos.search.results import Explained, Result, Results
from seps.photos.search.searcher import Part, Searcher
from seps.photos.store.filters import Filters, place_of
from seps.photos.store.places import check_folder, data_folder, default_store
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from seps.retrieval.config import DEFAULT_MODEL
from seps.retrieval.engine.loading import engine_of, load_engine, size_without_torch, with_torch
from seps.retrieval.engine.queries import as_array

if TYPE_CHECKING:
    from PIL import Image

    from seps.photos.duplicates.duplicates import Group
    from seps.photos.indexing.build import IndexReport
    from seps.photos.indexing.opening import IndexOptions
    from seps.photos.indexing.reading import ReadingReport
    from seps.photos.search.explaining import StoredExplainer
    from seps.photos.store.exporting import Target
    from seps.retrieval.engine.engine import Engine

CountProgress = Callable[[int, int], None]
Day = str | date | datetime
"""2024-05-31, with a time if one matters; local time."""
WITHOUT_TORCH = (
    "Without torch the store keeps one vector per picture (--size vector); for patches and explanations: "
    + install_command("torch")
)
_PICTURE = "picture"
"""What names the picture in a query that `Library.similar` makes of an encoded one."""


class Library:
    """The pictures of a folder, searched by a sentence or a picture.

    Args:
        folder: the pictures; of a store of several folders those of this one. Without it `store` must be there
            already, and all of its folders are searched.
        model: "mini", "base", a dual encoder's name, a model folder, or a model; default: the store's, else "base".
        store: where the index is kept; default: a place of this folder and model in the user's data folder.
        update: index what is new or changed before the first search; False takes the store as it is.
        device: "cpu", "cuda", ...; or a function that names it, called where a model is loaded to index.
        options: how to index (`seps.photos.indexing.opening.IndexOptions`).
        plugins: files of custom components, which the model needs.
        first: called before a store is made.
        progress: called with (done, total) pictures while it indexes.

    Raises ValueError (DataError, StoreError, ModelError), a sentence each, for a folder, store or model that cannot be
    used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        model: object = None,
        store: str | os.PathLike[str] | None = None,
        update: bool = True,
        device: str | Callable[[], str] = "cpu",
        options: IndexOptions | None = None,
        plugins: Sequence[str] = (),
        first: Callable[[], None] = lambda: None,
        progress: CountProgress | None = None,
    ) -> None:
        if folder is None and store is None:
            raise ValueError('Name a folder of pictures, Library("photos"), or a store, Library(store="store").')
        self._device = "cpu"
        self._device_to_index: Callable[[], str]
        if isinstance(device, str):
            _check_device(device)
            self._device, self._device_to_index = device, lambda: device
        else:
            self._device_to_index = device
        self._model, self._options, self._plugins = model, options, plugins
        self._first, self.progress = first, progress
        name = model if isinstance(model, str) else DEFAULT_MODEL
        if model is not None and name is not model and store is None:
            raise ValueError("A model that comes as an object has no name to find its store by; give store=.")
        self.location = str(store) if store is not None else str(_default_store(folder or ".", name))
        """Where the store is."""
        self._store: Store | None = None
        self._searcher: Searcher | None = None
        self._engine: Engine | None = None
        """All of it, once pictures were indexed."""
        self._named = None if folder is None else str(Path(folder).expanduser())
        if update and self._named is not None:
            self.update()

    @classmethod
    def over(cls, searcher: Searcher) -> Library:
        """All pictures of a store that is open already."""
        library = cls(store=searcher.store.location, update=False)
        library._searcher = searcher
        return library

    @property
    def store(self) -> Store:
        """The store, opened when it is first needed."""
        if self._searcher is not None:
            return self._searcher.store
        if self._store is None:
            self._store = Store.open(self.location)
        return self._store

    @property
    def searcher(self) -> Searcher:
        """The search over the store, opened when it is first needed."""
        if self._searcher is None:
            engine = self._model if self._engine is None else self._engine
            self._searcher = Searcher(self.store, engine, device=self._device)
        return self._searcher

    @functools.cached_property
    def explainer(self) -> StoredExplainer:
        """What explains its results. Raises ValueError for a model whose scores cannot be split among patches."""
        from seps.photos.search.explaining import StoredExplainer

        return StoredExplainer(self.searcher)

    @property
    def folder(self) -> Path:
        """The folder of the pictures."""
        return Path(self.store.settings.root) if self._named is None else Path(self._named).absolute()

    @property
    def engine(self) -> Engine:
        """What encodes and scores."""
        return self.searcher.engine if self._engine is None else self._engine

    def scope(self, filters: Filters | None = None) -> Filters:
        """Filters with the library's folder, unless they name one; all of the store where the library has none."""
        filters = filters or Filters()
        if filters.folder is not None or self._named is None:
            return filters
        return replace(filters, folder=os.path.realpath(self._named))  # as the store has it

    def update(self, folders: Sequence[str] = (), *, always: bool = False) -> IndexReport:
        """Index what is new, changed or gone below the folder (without one: `folders`, or all of the store's).

        Where nothing is new no model is loaded, and a store without background queries stays without, unless `always`.
        Raises as `seps.photos.indexing.build.index_folder`.
        """
        from seps.photos.indexing.build import index_folder, report_if_current
        from seps.photos.indexing.opening import IndexOptions, roots_to_read, settings_at

        places = list(folders) if self._named is None else [self._named]
        known, options = settings_at(self.location), self._options or IndexOptions()
        roots_to_read(known, self.location, places, options)  # raises for the folders before anything is loaded
        if known is not None and not always:
            report = report_if_current(places, self.location, options=options)
            if report is not None:
                return report
            options = replace(options, bank=bool(known.bank))
        if isinstance(self._model, str):
            name = self._model
        else:
            name = known.model if known is not None else DEFAULT_MODEL if self._model is None else "custom model"
        if self._engine is None:
            if self._model is None or name == self._model:
                if known is None and options.size is None and (size_without_torch(name) is not None):
                    options = replace(options, size=size_without_torch(name))
                    warnings.warn(WITHOUT_TORCH, stacklevel=2)
                size = options.size if known is None else known.layout.size
                self._engine = load_engine(
                    name,
                    device=self._device_to_index(),
                    plugins=self._plugins,
                    sentences=True,
                    size=None if options.ray is not None else size,  # machines of a cluster may have GPUs
                )
            else:
                self._engine = engine_of(self._model)
        if known is None:
            self._first()
        report = index_folder(places, self.location, self._engine, name, options=options, progress=self.progress)
        self.close()
        return report

    def read_texts(self) -> ReadingReport:
        """Look for text in the pictures of the store in which it was not looked for (extra `ocr`), a second per photo.

        Its words are found as those of descriptions. Safe to interrupt and to call again. Raises DataError where the
        extra is not installed, and StoreError.
        """
        from seps.photos.indexing.reading import read_texts

        return read_texts(self.location, progress=self.progress)

    def add(self, path: str | os.PathLike[str]) -> IndexReport:
        """Index a file or folder that came to the library's folder.

        Raises ValueError for one that is not there, or outside of the folder.
        """
        place = Path(path).expanduser().absolute()
        if not place.exists():
            raise ValueError(f"There is no file or folder {place}.")
        if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(self.folder)):
            raise ValueError(
                f"{place} is outside of {self.folder}, the folder of this library. Move it there, or make a Library of "
                "its own."
            )
        return self.update()

    def search(
        self,
        text: str | Query,
        k: int = 10,
        *,
        folder: str | os.PathLike[str] | None = None,
        since: Day | None = None,
        until: Day | None = None,
        min_size: int | None = None,
        near: str | tuple[float, float] | None = None,
        within: float | None = None,
        min_confidence: float | None = None,
        candidates: int = CANDIDATES,
        exact: bool = False,
        sort: Sort = "score",
        fold: bool = False,
        pictures: Mapping[str, Part] | None = None,
    ) -> Results:
        """The `k` pictures that fit a sentence, or a sum like "horse + stripes - grass", best.

        Args:
            text: the query; of a `Query` the settings are its own, and the other arguments are not read.
            folder: only below this folder (or in this shard) of the library's; ValueError where it holds no picture.
            since, until: only files of this date or later, and of an earlier one.
            min_size: least pixels of the shorter side.
            near, within: only photos taken at most so many kilometres (10) from (latitude, longitude).
            min_confidence: only pictures of this confidence, 0 to 1; none at all where nothing fits.
            candidates: how many are scored exactly; with `exact` all are.
            sort: "score", "newest" or "oldest" first.
            fold: put near-duplicates among the results behind the best of them.
            pictures: encoded pictures, by the names that parts of a `Query` give them.
        """
        if isinstance(text, Query):
            query = text
        else:
            filters = _filters(folder, since, until, min_size, near, within)
            query = Query(_terms(text), filters, k, candidates, exact, sort, fold, min_confidence, text)
        hits = rank(self.searcher, replace(query, filters=self.scope(query.filters)), pictures or {})
        if not hits and query.filters.folder is not None:
            check_folder(self.store, query.filters.folder)
        notes = dict.fromkeys([how_read(query.text), *map(self.searcher.note, query.sentences)])
        return Results(self, query, hits, [note for note in notes if note])

    def similar(
        self,
        picture: str | os.PathLike[str] | bytes | Image.Image | Result,
        k: int = 10,
        *,
        folder: str | os.PathLike[str] | None = None,
        since: Day | None = None,
        until: Day | None = None,
        min_size: int | None = None,
        near: str | tuple[float, float] | None = None,
        within: float | None = None,
        exact: bool = False,
    ) -> Results:
        """The `k` pictures most like a picture: a file, its bytes, a Pillow image, or a result.

        Raises TypeError for anything else.
        """
        if isinstance(picture, Result):
            picture = self.content(picture.id)
        elif hasattr(picture, "getexif"):
            picture = as_file(picture)
        elif not isinstance(picture, (str, bytes, os.PathLike)):
            raise TypeError(
                f"A picture is a file, its bytes, a Pillow image or a hit, not {type(picture).__name__}. Of an array "
                "of bytes (height, width, 3) PIL.Image.fromarray(array) makes one."
            )
        filters = _filters(folder, since, until, min_size, near, within)
        query = Query((Term(_PICTURE, True),), filters, k, exact=exact)
        return self.search(query, pictures={_PICTURE: self.searcher.part_of_image(picture)})

    def duplicates(self, **options: Any) -> list[Group]:
        """Groups of pictures that are the same file, the same picture or nearly so; nothing is ever deleted.

        `options` are those of `seps.photos.duplicates.duplicates.find_duplicates`.
        """
        from seps.photos.duplicates.duplicates import find_duplicates

        return find_duplicates(self.store, filters=self.scope(), **options)

    def export(self, to: Target, folder: str | os.PathLike[str], *, tokens: int | None = None) -> int:
        """Write all pictures into a new folder for another vector store (`export_vectors`); returns how many."""
        from seps.photos.store.exporting import export_vectors

        return export_vectors(self.store, to, folder, tokens=tokens, filters=self.scope())

    def vector(self, text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(C,) of a sentence: its dot product with the vector of a picture is about the score."""
        check_text(text)
        return np.asarray(self.searcher.part_of_query(self.searcher.encode(text)).vector, np.float32)

    def word_vectors(self, text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(words, C) of length one: the words of a sentence, for late interaction with the tokens of an export.

        Raises ValueError where the model has none.
        """
        check_text(text)
        engine = with_torch(self.searcher.engine)
        own = engine is self.searcher.engine
        features = (self.searcher.encode(text) if own else engine.encode_texts([text.strip()])).text_features
        words = as_array(features.words[0][features.mask[0]]).astype(np.float32)
        unit: np.ndarray[Any, np.dtype[np.float32]] = words / np.maximum(
            np.linalg.norm(words, axis=1, keepdims=True), 1e-12
        )
        return unit

    def source(self, path: str, member: str | None = None) -> ImageSource:
        """Where a picture's bytes are, by its path in the store. Raises StoreError for a path out of its folders."""
        return self.searcher.image_source({"path": path, "member": member})

    def thumbnail(self, identity: str) -> bytes:
        """The small JPEG of a picture, by its id. Raises StoreError where the store has none."""
        return bytes(self._row(identity, "thumbnail")["thumbnail"])

    def thumbnails(self, ids: Sequence[str]) -> dict[str, bytes]:
        """The small JPEGs of pictures, by their ids, without those of pictures that the store has not."""
        parts = self.store.parts(ids, ["id", "thumbnail"])
        return {row["id"]: bytes(row["thumbnail"]) for part in parts for row in part.rows()}

    def image(self, identity: str) -> Image.Image:
        """A picture by its id, upright, at most 1600 pixels wide; its thumbnail where the file cannot be read."""
        from PIL import Image

        from seps.images.decoding import resized_jpeg

        row = self._row(identity, "path", "member", "thumbnail")
        source = self.source(row["path"], row["member"])
        try:
            data = resized_jpeg(read_source(source), source, 1600)
        except UnreadableImage:
            data = bytes(row["thumbnail"])
        return Image.open(io.BytesIO(data))

    def content(self, identity: str) -> bytes:
        """The bytes of a picture's file by its id, or its thumbnail where the file cannot be read."""
        row = self._row(identity, "path", "member", "thumbnail")
        with contextlib.suppress(UnreadableImage):
            return read_source(self.source(row["path"], row["member"]))
        return bytes(row["thumbnail"])

    def find(self, name: str) -> str:
        """The id of the picture that `name` means: its id, its path, or its file. Raises StoreError where none is."""
        from seps.photos.search.explaining import find_image

        return find_image(self.store, name)

    def explain(self, identity: str, text: str, score: float | None = None, longest: int = 1600) -> Explained:
        """Why a picture, by its id, has its score for a sentence; `score` is what a search has shown.

        Without it the search is made, whose scores differ in the last digit with the pictures that are scored together.
        The photo of it has at most `longest` pixels. Raises ValueError for a model whose scores cannot be split,
        StoreError where the store has no such picture.
        """
        from PIL import Image

        from seps.photos.search.explaining import photo_to_draw

        explainer = self.explainer
        if score is None:
            score = {hit.id: hit.score for hit in self.searcher.search(text, CANDIDATES)}.get(identity)
        answer = explainer.explain(identity, text, score)
        if answer is None:
            raise self._gone(identity)
        row = self._row(identity, "path", "member", "sha256", "thumbnail")
        photo, note = photo_to_draw(self.searcher, row, longest)
        return Explained(answer[0], Image.open(io.BytesIO(photo)), self.source(row["path"], row["member"]).path, note)

    def close(self) -> None:
        """Let go of the threads of the search; the next call opens it again."""
        if self._searcher is not None:
            self._searcher.close()
        self._searcher = self._store = None
        self.__dict__.pop("explainer", None)

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self.store.count(self.store.allowed(self.scope()))

    def __repr__(self) -> str:
        return f"<Library of {len(self)} pictures in {self.folder}, model {self.store.settings.model}>"

    def _row(self, identity: str, *columns: str) -> dict[str, Any]:
        row = self.store.get(identity, list(columns))
        if row is None:
            raise self._gone(identity)
        return row

    def _gone(self, identity: str) -> StoreError:
        return StoreError(f"The store {self.location} has no picture {identity}; it may have been taken out.")


def _check_device(name: str) -> None:
    """Raise ValueError for a device that is not here."""
    if name == "cpu":
        return
    require("torch", f"The device {name!r}")
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"There is no device {name!r}; choose 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} needs a GPU, and torch sees none here: choose 'cpu' (see seps doctor).")


def _default_store(folder: str | os.PathLike[str], model: str) -> Path:
    """The store of `seps find` for this folder and model: the command and the object share one."""
    return default_store(data_folder(os.environ, sys.platform, Path.home()), Path(folder).expanduser(), model)


def _terms(text: object) -> tuple[Term, ...]:
    """The parts of a query that is a text. Raises ValueError for what is none."""
    check_text(text)
    return terms_of(cast(str, text))


def _filters(
    folder: str | os.PathLike[str] | None,
    since: Day | None,
    until: Day | None,
    min_size: int | None,
    near: str | tuple[float, float] | None,
    within: float | None,
) -> Filters:
    first, last = (None if day is None else nanoseconds(str(day)) for day in (since, until))
    place = place_of(near) if isinstance(near, str) else near
    return Filters(None if folder is None else os.fspath(folder), first, last, min_size, place, within)
