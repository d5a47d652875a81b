"""A person's pictures as one object: the model, the store and the search of a folder.

library = seps.Library("photos")
hits = library.search("a dog")
hits[0].explain().show()
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from seps.files import replacing
from seps.images.decoding import as_file
from seps.images.shards import UnreadableImage, read_source
from seps.photos.search.searcher import CANDIDATES, Filters, Hit, Searcher, nanoseconds
from seps.photos.search.shown import Explained, Found, Hits
from seps.photos.store.places import check_folder, data_folder, default_store
from seps.photos.store.rows import StoreError
from seps.retrieval.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from PIL import Image

    from seps.photos.indexing.build import IndexReport
    from seps.photos.indexing.opening import IndexOptions
    from seps.retrieval.engine.zeroshot import ZeroShotModel
    from seps.retrieval.model import RetrievalModel

CountProgress = Callable[[int, int], None]
Day = str | date | datetime
"""2024-05-31, with a time if one matters; local time."""
_EXPORTED = ("id", "path", "member", "width", "height", "vector")


class Library:
    """The pictures of a folder, searched by a sentence or a picture.

    Args:
        folder: the pictures; of a store of several folders those of this one. Without it `store` must be there
            already, and all of its folders are searched.
        model: "mini", "base", a dual encoder's name, a model folder, or a model; default: the store's, else "base".
        store: where the index is kept; default: a place of this folder and model in the user's data folder.
        update: index what is new or changed before the first search; False takes the store as it is.
        device: "cpu", "cuda", ...
        options: how to index (`seps.photos.indexing.opening.IndexOptions`).
        progress: called with (done, total) pictures while it indexes.

    Raises ValueError (DataError, StoreError, ModelError), a sentence each, for a folder, store or model that cannot be
    used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        model: str | RetrievalModel | ZeroShotModel | None = None,
        store: str | os.PathLike[str] | None = None,
        update: bool = True,
        device: str = "cpu",
        options: IndexOptions | None = None,
        progress: CountProgress | None = None,
    ) -> None:
        if folder is None and store is None:
            raise ValueError('Name a folder of pictures, Library("photos"), or a store, Library(store="store").')
        _check_device(device)
        self._model, self._device, self._options, self._progress = model, device, options, progress
        name = model if isinstance(model, str) else DEFAULT_MODEL
        if model is not None and not isinstance(model, str) and store is None:
            raise ValueError("A model that comes as an object has no name to find its store by; give store=.")
        self.store = str(store) if store is not None else str(_default_store(folder or ".", name))
        """Where the index is kept."""
        self._searcher: Searcher | None = None
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        if update and self._folder is not None:
            self.update()

    @property
    def searcher(self) -> Searcher:
        """The search over the store, opened when it is first needed."""
        if self._searcher is None:
            self._searcher = Searcher(self.store, self._model, device=self._device)
        return self._searcher

    @property
    def folder(self) -> Path:
        """The folder of the pictures."""
        return self._folder if self._folder is not None else Path(self.searcher.store.settings.root)

    @property
    def model(self) -> RetrievalModel | ZeroShotModel:
        """The model, whole."""
        self.searcher.load_vision()
        return self.searcher.model

    def scope(self, folder: str | os.PathLike[str] | None = None, **filters: Any) -> Filters:
        """Filters of the pictures below a folder; default: the library's, all of the store where none was named."""
        chosen = folder if folder is not None else self._folder
        if chosen is not None and folder is None:
            chosen = os.path.realpath(chosen)  # as the store has it
        return Filters(None if chosen is None else os.fspath(chosen), **filters)

    def update(self) -> IndexReport:
        """Index what is new, changed or gone below the folder; says what was done."""
        from seps.photos.indexing.updating import update_store

        done = update_store(
            [str(self.folder)],
            self.store,
            self._model,
            options=self._options,
            device=self._device,
            progress=self._progress,
        )
        if done.model is not None:
            self.close()
            self._searcher = Searcher(self.store, done.model, device=self._device)
        return done.report

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
        text: str,
        k: int = 10,
        *,
        folder: str | os.PathLike[str] | None = None,
        after: Day | None = None,
        before: Day | None = None,
        min_size: int | None = None,
        min_confidence: float | None = None,
        candidates: int = CANDIDATES,
        exact: bool = False,
    ) -> Hits:
        """The `k` pictures that fit a sentence best.

        Args:
            folder: only below this folder (or in this shard) of the library's; ValueError where it holds no picture.
            after, before: only files of this date or later, and of an earlier one.
            min_size: least pixels of the shorter side.
            min_confidence: only pictures of this confidence, 0 to 1; none at all where nothing fits.
            candidates: how many are scored exactly; with `exact` all are.
        """
        chosen = self.scope(folder, **_facts(after, before, min_size))
        hits = self.searcher.search(
            text, k, candidates=candidates, exact=exact, filters=chosen, min_confidence=min_confidence
        )
        self._check_found(hits, folder)
        return self._found(hits, text, self.searcher.note(text))

    def similar(
        self,
        picture: str | os.PathLike[str] | bytes | Image.Image | Found,
        k: int = 10,
        *,
        folder: str | os.PathLike[str] | None = None,
        after: Day | None = None,
        before: Day | None = None,
        min_size: int | None = None,
        exact: bool = False,
    ) -> Hits:
        """The `k` pictures most like a picture: a file, its bytes, a Pillow image, or one that was found.

        Raises TypeError for anything else.
        """
        if isinstance(picture, Found):
            picture = self._bytes(picture.id)
        elif hasattr(picture, "getexif"):
            picture = as_file(picture)
        elif not isinstance(picture, (str, bytes, os.PathLike)):
            raise TypeError(
                f"A picture is a file, its bytes, a Pillow image or a hit, not {type(picture).__name__}. Of an array "
                "of bytes (height, width, 3) PIL.Image.fromarray(array) makes one."
            )
        chosen = self.scope(folder, **_facts(after, before, min_size))
        hits = self.searcher.search_image(picture, k, exact=exact, filters=chosen)
        self._check_found(hits, folder)
        return self._found(hits, "", "")

    def _check_found(self, hits: list[Hit], folder: str | os.PathLike[str] | None) -> None:
        """Raise ValueError where nothing was found because no picture is in the folder."""
        if not hits and folder is not None:
            check_folder(self.searcher.store, os.fspath(folder))

    def duplicates(self, **options: Any) -> list[Any]:
        """Groups of pictures that are the same file, the same picture or nearly so; nothing is ever deleted."""
        found: list[Any] = importlib.import_module("seps.photos.duplicates.duplicates").find_duplicates(
            self.searcher.store, filters=self.scope(), **options
        )
        return found

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write ids, absolute paths, sizes and vectors of all pictures to a .npz or .parquet file; returns how many.

        `member` is an empty text in a .npz where there is none. Raises ValueError for another kind of file.
        """
        target = Path(path)
        if target.suffix not in (".npz", ".parquet"):
            raise ValueError(f"{target} must end in .npz or .parquet: vectors are written as one of these.")
        rows: dict[str, list[Any]] = {name: [] for name in _EXPORTED}
        store = self.searcher.store
        for some in store.scan(_EXPORTED, store.allowed(self.scope()), batch_size=1024):
            for name in _EXPORTED[:-1]:
                rows[name] += some.values(name)
            rows["vector"] += list(some.vectors())
        rows["path"] = [str(store.settings.file(name)) for name in rows["path"]]
        with replacing(target) as part:
            _write(part, rows, target.suffix)
        return len(rows["id"])

    def file(self, path: str) -> Path:
        """The file of a picture, absolute, by its path in the store."""
        return self.searcher.store.settings.file(path)

    def thumbnail(self, identity: str) -> bytes:
        """The small JPEG of a picture, by its id. Raises StoreError where the store has none."""
        return bytes(self._row(identity, "thumbnail")["thumbnail"])

    def image(self, identity: str) -> Image.Image:
        """A picture by its id, upright, at most 1600 pixels wide; its thumbnail where the file cannot be read."""
        from PIL import Image

        from seps.images.decoding import resized_jpeg

        row = self._row(identity, "path", "member", "thumbnail")
        source = self.searcher.image_source(row)
        try:
            data = resized_jpeg(read_source(source), source, 1600)
        except UnreadableImage:
            data = bytes(row["thumbnail"])
        return Image.open(io.BytesIO(data))

    def explain(self, identity: str, text: str, score: float | None = None) -> Explained:
        """Why a picture, by its id, has its score for a sentence; `score` is what a search has shown.

        Raises ValueError for a model whose scores cannot be split, StoreError where the store has no such picture.
        """
        from PIL import Image

        from seps.photos.search.explained import StoredExplainer, photo_to_draw

        found = StoredExplainer(self.searcher).explain(identity, text, score)
        if found is None:
            raise StoreError(f"The store {self.store} has no picture {identity}; it may have been taken out.")
        row = self._row(identity, "path", "member", "sha256", "thumbnail")
        picture, note = photo_to_draw(self.searcher, row, 1600)
        explanation = replace(found[0], note=" ".join(filter(None, (found[0].note, note))))
        return Explained(explanation, Image.open(io.BytesIO(picture)), self.file(found[1]["path"]))

    def close(self) -> None:
        """Let go of the threads of the search; the next call opens it again."""
        if self._searcher is not None:
            self._searcher.close()
            self._searcher = None

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        store = self.searcher.store
        return store.count(store.allowed(self.scope()))

    def __repr__(self) -> str:
        return f"<Library of {len(self)} pictures in {self.folder}, model {self.searcher.store.settings.model}>"

    def _found(self, hits: list[Hit], query: str, note: str) -> Hits:
        return Hits([Found(self, hit, query) for hit in hits], query, note)

    def _row(self, identity: str, *columns: str) -> dict[str, Any]:
        row = self.searcher.store.get(identity, list(columns))
        if row is None:
            raise StoreError(f"The store {self.store} has no picture {identity}; it may have been taken out.")
        return row

    def _bytes(self, identity: str) -> bytes:
        """The content of a picture's file, or its thumbnail where the file cannot be read."""
        row = self._row(identity, "path", "member", "thumbnail")
        with contextlib.suppress(UnreadableImage):
            return read_source(self.searcher.image_source(row))
        return bytes(row["thumbnail"])


def _check_device(name: str) -> None:
    """Raise ValueError for a device that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"There is no device {name!r}; choose 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} needs a GPU, and torch sees none here: choose 'cpu' (see seps doctor).")


def _default_store(folder: str | os.PathLike[str], model: str) -> Path:
    """The store of `seps find` for this folder and model: the command and the object share one."""
    return default_store(data_folder(os.environ, sys.platform, Path.home()), Path(folder).expanduser(), model)


def _facts(after: Day | None, before: Day | None, min_size: int | None) -> dict[str, int | None]:
    first, last = (None if day is None else nanoseconds(str(day)) for day in (after, before))
    return {"after": first, "before": last, "min_size": min_size}


def _write(path: Path, rows: dict[str, list[Any]], kind: str) -> None:
    if kind == ".npz":
        with path.open("wb") as file:
            vectors = np.stack(rows["vector"]) if rows["vector"] else np.zeros((0, 0), np.float32)
            texts = {
                name: np.array([value or "" for value in rows[name]], np.str_) for name in ("id", "path", "member")
            }
            sizes = {name: np.array(rows[name], np.int32) for name in ("width", "height")}
            np.savez(file, allow_pickle=False, vector=vectors, **texts, **sizes)
        return
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(rows), path)
