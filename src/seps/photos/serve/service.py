"""The work behind the endpoints: a few requests at a time, images by address, and what is wrong with their files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import HTTPException
from fastapi.responses import Response

from seps.images.dates import local_time
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource
from seps.photos.library import Library
from seps.photos.search.explaining import StoredExplainer, kept_patches
from seps.photos.search.query import Query, Sort, explained_sentence, parse
from seps.photos.search.ranking import COMPARED
from seps.photos.search.results import Hit, Results
from seps.photos.search.searcher import Part
from seps.photos.serve import browse, places
from seps.photos.serve.guard import AwayError
from seps.photos.serve.originals import NoPictureError, original
from seps.photos.serve.uploads import UPLOADED, Sent, Uploads, encode_upload
from seps.photos.store.filters import Filters
from seps.photos.store.places import EmptyFolderError, check_folder
from seps.photos.store.rows import StoreError, fixed_settings
from seps.photos.store.store import Store, has_table, is_remote
from seps.recent import Recent
from seps.retrieval.explain.explanation import Explanation

WAITING = 200
OVERVIEW_SECONDS = 30.0
"""How long the folders, dates and examples of a store are taken to stay the same."""
NAMED_FOLDERS = 10
"""Folders that an error names."""
REMEMBERED = 64
"""Searches whose scores are kept, so that an explanation shows the same digits."""
KEPT_ROWS = 50_000
"""Results that are kept over all rankings, about 25 MB."""
EMPTY_ROWS = 10
"""What a ranking takes beside its rows: above all the query, of at most 2,000 letters."""
KEPT_PICTURES = 64
"""Uploaded pictures that are remembered, as the model sees them (about 100 KB each)."""
_ROW = 20
_CHANGED = (
    "The file was written again after it was indexed: the thumbnail and the scores are those of what was indexed. "
    "Index the folder again to search for it as it is now."
)
log = logging.getLogger("seps.photos.serve")
Answer = TypeVar("Answer")


class Service:
    """One store, a few requests at a time on threads of its own."""

    def __init__(self, library: Library, *, local: bool = False, root_path: str = "") -> None:
        self.library = library
        self.searcher = library.searcher
        self.local = local
        """Only this machine can ask: it may see where the files are."""
        self.root_path = root_path
        """What stands before the addresses of this API, behind a proxy."""
        self.explainer = _explainer_of(library)
        # Each thread that computes keeps memory of its own: few threads bound it, whatever the clients do.
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="seps-serve")
        self.quick = ThreadPoolExecutor(2, thread_name_prefix="seps-files")
        self.uploads = Uploads()
        self._waiting = 0
        self._lock = threading.Lock()
        self._shown: Recent[dict[str, float]] = Recent(REMEMBERED)
        self._uploaded: Recent[Sent] = Recent(KEPT_PICTURES)
        self._rankings: Recent[Results] = Recent(KEPT_ROWS)
        self._lists: Recent[Sequence[str]] = Recent(KEPT_ROWS)
        self._overview: tuple[float, int, dict[str, Any]] | None = None

    async def run(self, work: Callable[[], Answer], *, quick: bool = False) -> Answer:
        """Do `work` on a pool; pictures (`quick`) do not wait for searches.

        Raises HTTPException 503 when too many wait, StoreError when the store is gone.
        """
        with self._lock:
            if self._waiting >= WAITING:
                raise HTTPException(503, "Too many requests are waiting. Try again in a moment.")
            self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self.quick if quick else self.pool, lambda: self._on_store(work)
            )
        finally:
            with self._lock:
                self._waiting -= 1

    def _on_store(self, work: Callable[[], Answer]) -> Answer:
        """`work`; if the store fails, once more on the store as it is on disk now."""
        place = self.searcher.store.location
        # An open table answers from its caches, long after its files were deleted.
        if not is_remote(place) and not has_table(place):
            raise StoreError(
                f"The store {Path(place).name} is gone: it was deleted, moved or unmounted. Put it back, or index the "
                "pictures again."
            )
        try:
            return work()
        except StoreError as error:
            self._reopen(place, error)
        return work()

    def _reopen(self, place: str, reason: Exception) -> None:
        """Continue with the store as it is on disk. Raises StoreError where there is none, or another one."""
        name = Path(place).name
        try:
            fresh = Store.open(place)
        except StoreError as error:
            log.warning("The store cannot be read (%s): %s", reason, error)
            raise StoreError(f"The store {name} cannot be read any more: its files are damaged or gone.") from error
        if fixed_settings(fresh.settings) != fixed_settings(self.searcher.store.settings):
            raise StoreError(f"The store {name} was rebuilt with other settings. Restart the service.")
        self.searcher.store = fresh

    def address(self, identity: str, sha256: str) -> str:
        """The id that the API gives an image: its row, and a tag of the store and the file's content.

        Another store, or another file under the same name, has another address; caches cannot mix them up.
        """
        settings = self.searcher.store.settings
        text = "\0".join((settings.root, settings.model_hash, identity, sha256))
        return f"{identity}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def thumbnail_address(self, row: dict[str, Any]) -> str:
        """Where the thumbnail of a row is."""
        return f"{self.root_path}/api/thumb/{self.address(row['id'], row['sha256'])}"

    def shown_path(self, path: str) -> str:
        """The path of a row as clients see it."""
        return places.shown_path(self.searcher.store.settings, path)

    def without_places(self, text: str) -> str:
        """A message without the paths of this machine."""
        store = self.searcher.store
        return places.without_places(store.settings, store.location, text)

    def _below(self, filters: Filters) -> Filters:
        """The filters with the folder as the store has it. Raises HTTPException 404 for a folder that it has not."""
        if filters.folder is None:
            return filters
        folder = places.stored_folder(self.searcher.store.settings, filters.folder)
        if folder is None:
            raise self._no_folder(filters.folder)
        return replace(filters, folder=folder)

    @contextlib.contextmanager
    def _folder_shown(self, filters: Filters) -> Iterator[None]:
        """Raise HTTPException 404 with the folder's name as it was given, where the folder has no pictures."""
        try:
            yield
        except EmptyFolderError as error:
            raise self._no_folder(filters.folder or "") from error

    def _no_folder(self, name: str) -> HTTPException:
        names = [folder["path"] for folder in self.overview()["folders"]]
        names.sort(key=lambda path: (path.count("/"), path))
        more = " and others" if len(names) > NAMED_FOLDERS else ""
        there = f"Its folders are {', '.join(names[:NAMED_FOLDERS])}{more}." if names else "It has no folders."
        return HTTPException(404, f"No picture of this store is in the folder {name!r}. {there}")

    def row(self, address: str, columns: Sequence[str] = ()) -> dict[str, Any]:
        """`id`, `sha256` and some more columns of an image, by its address or its bare row id.

        Raises HTTPException 404 where there is none, 410 where the address is that of another store or content.
        """
        row = self.searcher.store.get(address[:_ROW], ["id", "sha256", *columns])
        if row is None:
            raise HTTPException(404, f"There is no image {address} in this store; it may have been removed.")
        if len(address) > _ROW and address != self.address(row["id"], row["sha256"]):
            raise HTTPException(410, f"The image {address} has changed since, or is of another store. Search again.")
        return row

    def search(self, query: Query, offset: int, count: int) -> dict[str, Any]:
        """One page of a search.

        The first page looks at the store as it is now; further ones are parts of the same ranking while it is kept.
        """
        results = self._rankings.get(query) if offset else None
        if results is None:
            results = self._ranking(query)
        good = [hit.good for hit in results.every]
        page = results.hits[offset : offset + count]
        return {
            "query": query.text,
            "good": None if None in good else sum(map(bool, good)),
            "total": len(results),
            "pictures": len(good),
            "offset": offset,
            "next": offset + count if offset + count < len(results) else None,
            "results": [
                {**self._found(hit, query), "folded": [self._found(copy, query) for copy in hit.folded]} for hit in page
            ],
            "note": results.note,
        }

    def _ranking(self, query: Query) -> Results:
        """The ranking of a query as the store is now, which is kept."""
        below = self._below(query.filters)
        pictures = {part.text: self._picture(part.text) for part in query.parts if part.is_image}
        with self._folder_shown(query.filters):
            results = self.library.search(replace(query, filters=below), pictures=pictures)
        if query.sentence is not None:
            self._shown.put(query.sentence, {hit.id: hit.score for hit in results.every[:COMPARED]})
        self._rankings.put(query, results, len(results.every) + EMPTY_ROWS)
        return results

    def upload(self, data: bytes) -> str:
        """Encode a picture and remember it for a while; its id. Raises UnreadableImage."""
        identity, picture = encode_upload(data, self.searcher)
        self._uploaded.put(identity, picture)
        return identity

    def uploaded(self, identity: str) -> Sent:
        """An uploaded picture. Raises HTTPException 404 where it was never sent, or others have taken its place."""
        kept = self._uploaded.get(identity)
        if kept is None:
            raise HTTPException(404, "That picture is not kept any more: the service remembers a few. Send it again.")
        return kept

    def _picture(self, name: str) -> Part:
        """A picture of a query: one that was sent, or one of the store by its address.

        Raises HTTPException 404 where it is not there.
        """
        if name.startswith(UPLOADED):
            return self.uploaded(name.removeprefix(UPLOADED)).part
        return self.searcher.part_of_image(self.original(name)[0])

    def _found(self, hit: Hit, query: Query | None = None) -> dict[str, Any]:
        """A hit as the API answers it; `query` is what was looked for."""
        address = self.address(hit.id, hit.sha256)
        thumbnail = f"{self.root_path}/api/thumb/{address}"
        more: dict[str, Any] = {
            "id": address,
            "path": self.shown_path(hit.path),
            "thumbnail": thumbnail,
            "good": hit.good,
        }
        terms = () if query is None else query.parts
        names = ["picture" if term.is_image else str(term) for term in terms]
        parts = [{"part": name, "score": round(score, 6)} for name, score in zip(names, hit.parts, strict=False)]
        if hit.parts and terms and terms[-1].is_image:
            more["terms"] = {"sentence": round(sum(hit.parts[:-1]), 6), "picture": round(hit.parts[-1], 6)}
        return {**replace(hit, folded=()).as_dict(), **more, "parts": parts}

    def listing(self, filters: Filters, sort: Sort, offset: int, count: int) -> dict[str, Any]:
        """One page of the pictures by date, without a query; pages of one order, as in `search`."""
        key = (filters, sort)
        ids = self._lists.get(key) if offset else None
        if ids is None:
            below = self._below(filters)
            ids = browse.listed(self.searcher, below, sort)
            if not ids and below.folder is not None:
                with self._folder_shown(filters):
                    check_folder(self.searcher.store, below.folder)
            self._lists.put(key, ids, len(ids) + EMPTY_ROWS)
        page = browse.shown(self.searcher, list(ids[offset : offset + count]), offset + 1)
        return {
            "total": len(ids),
            "offset": offset,
            "next": offset + count if offset + count < len(ids) else None,
            "results": [self._found(hit) for hit in page],
        }

    def overview(self) -> dict[str, Any]:
        """What `seps.photos.serve.browse.overview` says, which reads all rows: again after a while, if they changed."""
        now, version = time.monotonic(), self.searcher.store.version()
        if self._overview is None or (version != self._overview[1] and now - self._overview[0] > OVERVIEW_SECONDS):
            self._overview = (now, version, browse.overview(self.searcher))
        return self._overview[2]

    def kept(self, address: str, text: str) -> dict[str, Any]:
        """Which patches of an image a sentence keeps. Raises HTTPException 501 where the model selects none."""
        if not self.searcher.engine.traits.selects_patches:
            raise HTTPException(501, "The model of this store selects no patches: there are none to show.")
        patches = kept_patches(self.searcher, self.row(address)["id"], _explained(text))
        if patches is None:
            raise HTTPException(404, f"There is no image {address} in this store; it may have been removed.")
        return patches

    def download(self, address: str, *, attached: bool) -> Response:
        """The file of an image, to open or, with `attached`, to save.

        Raises AwayError where the file is gone or no image any more, HTTPException 400 for a path outside its folder.
        """
        row = self.row(address, ("path", "member", "size", "mtime"))
        source = self.source(row)
        try:
            return original(source, changed=_has_changed(source, row), download=attached)
        except NoPictureError as error:
            why = "The file is not an image any more. Only the thumbnail can be shown."
            raise AwayError(why, self.thumbnail_address(row)) from error
        except (OSError, UnreadableImage) as error:
            raise AwayError(self._why_away(row), self.thumbnail_address(row)) from error

    def source(self, row: dict[str, Any]) -> ImageSource:
        """Where the file of a row is. Raises HTTPException 400 for a path out of the folder."""
        try:
            return self.searcher.image_source(row)
        except StoreError as error:
            raise HTTPException(400, self.without_places(str(error))) from error

    def original(self, address: str) -> tuple[bytes, ImageSource, dict[str, Any]]:
        """The bytes of an image's file, where they came from, and its row.

        An address with a tag means the content that was indexed; a bare row id whatever is at that path now. Raises
        AwayError where the file cannot be read, or holds another content than the address means.
        """
        row = self.row(address, ("path", "member"))
        source = self.source(row)
        try:
            data = read_source(source)
        except UnreadableImage as error:
            raise AwayError(self._why_away(row), self.thumbnail_address(row)) from error
        if len(address) > _ROW and hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise AwayError(_CHANGED, self.thumbnail_address(row))
        return data, source, row

    def _why_away(self, row: dict[str, Any]) -> str:
        root = Path(self.searcher.store.settings.root_of(row["path"]))
        if not root.is_dir():
            return f"The folder {root.name} is away: not mounted, renamed or moved. Only the thumbnail can be shown."
        return "The file is gone or cannot be read. Only the thumbnail can be shown."

    def picture(self, address: str, *, local: bool) -> dict[str, Any]:
        """The facts of an image, and whether its file is still the one that was indexed.

        With `local` the client is on this machine, and gets the whole path of the file.
        """
        row = self.row(address, ("path", "member", "width", "height", "size", "mtime", "taken"))
        source = self.source(row)
        state, note = "present", ""
        try:
            # Copying a folder changes the time of its files, not their content.
            if _has_changed(source, row) and hashlib.sha256(read_source(source)).hexdigest() != row["sha256"]:
                state, note = "changed", _CHANGED
        except (OSError, UnreadableImage):
            state, note = "missing", self._why_away(row)
        return {
            "id": self.address(row["id"], row["sha256"]),
            "path": self.shown_path(row["path"]),
            **{name: row[name] for name in ("member", "width", "height")},
            "full_path": self._full_path(source, row, local),
            "date": local_time(browse.when(row)),
            "date_source": "file" if row.get("taken") is None else "exif",
            "original": state,
            "note": note,
            "thumbnail": self.thumbnail_address(row),
        }

    def _full_path(self, source: ImageSource, row: dict[str, Any], local: bool) -> str:
        """Where the file is; for a client elsewhere from the indexed folder's name on."""
        settings = self.searcher.store.settings
        path = self.shown_path(row["path"])
        if local and self.local:
            path = str(source.path)
        elif not settings.more_roots:
            path = f"{places.folder_names(settings)[settings.root]}/{path}"
        return f"{path}:{source.member}" if source.member is not None else path

    def explain(self, address: str, text: str) -> dict[str, Any]:
        """The explanation of one image and one sentence, or the first that a sum looks for."""
        if self.explainer is None:
            raise HTTPException(
                501,
                "The model of this store has no patch selection, or an embedder that does not split its vectors: there "
                "is nothing to explain.",
            )
        identity, text = self.row(address)["id"], _explained(text)
        shown = self._shown.get(text) or {}
        answer = self.explainer.explain(identity, text, shown.get(identity))
        if answer is None:
            raise HTTPException(404, f"There is no image {address} in this store; it may have been removed.")
        explanation, row = answer
        facts = {name: row[name] for name in ("member", "width", "height")}
        facts["path"] = self.shown_path(row["path"])
        # The same digits as in the results of a search.
        address = self.address(row["id"], row["sha256"])
        return {"id": address, **facts, **_rounded(explanation), "score": round(explanation.score, 6)}


def _explained(text: str) -> str:
    """The sentence that is explained of a query's text. Raises ValueError for one that cannot be read."""
    return explained_sentence(parse(text)) or text


def _explainer_of(library: Library) -> StoredExplainer | None:
    """The explainer of a store; None where its model's scores cannot be split among patches."""
    try:
        return library.explainer
    except ValueError:
        return None


def _has_changed(source: ImageSource, row: dict[str, Any]) -> bool:
    """Whether the file is another than the one that was indexed, by size and time. Raises OSError."""
    status = os.stat(source.path)
    return (status.st_size, status.st_mtime_ns) != (row["size"], row["mtime"])


def _rounded(explanation: Explanation) -> dict[str, Any]:
    def shorten(value: Any) -> Any:
        match value:
            case float():
                return round(value, 7)
            case dict():
                return {name: shorten(inner) for name, inner in value.items()}
            case list() | tuple():
                return [shorten(inner) for inner in value]
        return value

    plain: dict[str, Any] = shorten(explanation.as_dict())
    return plain
