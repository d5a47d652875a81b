"""The work behind the endpoints: a few requests at a time, images by address, and what is wrong with their files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import HTTPException

from seps.retrieval.data import ImageSource, UnreadableImage, read_source
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.explain.stored import explainer_of
from seps.retrieval.index.rows import TABLE, StoreError, StoreSettings
from seps.retrieval.index.search import Hit, Searcher
from seps.retrieval.index.store import Store, is_remote
from seps.serve.guard import AwayError
from seps.serve.uploads import Uploads

WAITING = 200
REMEMBERED = 64
"""Searches whose scores are kept, so that an explanation shows the same digits."""
_ROW = 20
log = logging.getLogger("seps.serve")
Answer = TypeVar("Answer")


class Service:
    """One store, a few requests at a time on threads of its own."""

    def __init__(self, searcher: Searcher, workers: int = 2) -> None:
        self.searcher = searcher
        self.explainer = explainer_of(searcher)
        # Each thread that computes keeps memory of its own: few threads bound it, whatever the clients do.
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="seps-serve")
        self.quick = ThreadPoolExecutor(2, thread_name_prefix="seps-files")
        self.uploads = Uploads()
        self._waiting = 0
        self._lock = threading.Lock()
        self._shown: OrderedDict[str, dict[str, float]] = OrderedDict()

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
        if not is_remote(place) and not Path(place, f"{TABLE}.lance").is_dir():
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
        if made_by(fresh.settings) != made_by(self.searcher.store.settings):
            raise StoreError(f"The store {name} was made anew in another way. Start the service again.")
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
        return f"/api/thumb/{self.address(row['id'], row['sha256'])}"

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

    def results(self, query: str, hits: Sequence[Hit]) -> dict[str, Any]:
        """The answer of a search; its scores are kept for explanations."""
        if query:
            with self._lock:
                self._shown[query.strip()] = {hit.id: hit.score for hit in hits}
                self._shown.move_to_end(query.strip())
                while len(self._shown) > REMEMBERED:
                    self._shown.popitem(last=False)
        found = [{**hit.as_dict(), "id": self.address(hit.id, hit.sha256)} for hit in hits]
        good = None if any(hit.good is None for hit in hits) else sum(bool(hit.good) for hit in hits)
        shown = [{**one, "thumbnail": f"/api/thumb/{one['id']}"} for one in found]
        return {"query": query, "good": good, "results": shown, "note": self.searcher.note(query) if query else ""}

    def source(self, row: dict[str, Any]) -> ImageSource:
        """Where the file of a row is. Raises HTTPException 400 for a path out of the folder."""
        try:
            return self.searcher.image_source(row)
        except StoreError as error:
            raise HTTPException(400, str(error)) from error

    def original(self, address: str) -> tuple[bytes, ImageSource, dict[str, Any]]:
        """The bytes of an image's file, where they came from, and its row. Raises AwayError."""
        row = self.row(address, ("path", "member"))
        source = self.source(row)
        try:
            return read_source(source), source, row
        except UnreadableImage as error:
            raise AwayError(self._why_away(), self.thumbnail_address(row)) from error

    def _why_away(self) -> str:
        root = Path(self.searcher.store.settings.root)
        if not root.is_dir():
            return f"The folder {root.name} is away: not mounted, renamed or moved. Only the thumbnail can be shown."
        return "The file is gone or cannot be read. Only the thumbnail can be shown."

    def picture(self, address: str) -> dict[str, Any]:
        """The facts of an image, and whether its file is still the one that was indexed."""
        row = self.row(address, ("path", "member", "width", "height", "size", "mtime"))
        source = self.source(row)
        state, note = "present", ""
        try:
            status = os.stat(source.path)
        except OSError:
            state, note = "missing", self._why_away()
        else:
            if (status.st_size, status.st_mtime_ns) != (row["size"], row["mtime"]):
                state = "changed"
                note = "The file was written again after it was indexed: scores are those of what was indexed."
        return {
            "id": self.address(row["id"], row["sha256"]),
            **{name: row[name] for name in ("path", "member", "width", "height")},
            "original": state,
            "note": note,
            "thumbnail": self.thumbnail_address(row),
        }

    def explain(self, address: str, text: str) -> dict[str, Any]:
        """The explanation of one image and one sentence."""
        if self.explainer is None:
            raise HTTPException(
                501,
                "The model of this store has no patch selection, or an embedder that does not split its vectors: there "
                "is nothing to explain.",
            )
        identity = self.row(address)["id"]
        with self._lock:
            shown = self._shown.get(text.strip(), {}).get(identity)
        answer = self.explainer.explain(identity, text, shown)
        if answer is None:
            raise HTTPException(404, f"There is no image {address} in this store; it may have been removed.")
        found, row = answer
        facts = {name: row[name] for name in ("path", "member", "width", "height")}
        # The same digits as in the results of a search.
        address = self.address(row["id"], row["sha256"])
        return {"id": address, **facts, **_rounded(found), "score": round(found.score, 6)}


def made_by(settings: StoreSettings) -> StoreSettings:
    """What must stay the same while a store is served; its folders, levels, exclusions and calibration may change."""
    return replace(
        settings,
        root="",
        bank="",
        calibration={},
        format=0,
        more_roots=(),
        removed_roots=(),
        dated=False,
        excluded=0,
        unreadable={},
    )


def _rounded(found: Explanation) -> dict[str, Any]:
    def shorten(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 7)
        if isinstance(value, dict):
            return {name: shorten(inner) for name, inner in value.items()}
        return [shorten(inner) for inner in value] if isinstance(value, list | tuple) else value

    plain: dict[str, Any] = shorten(found.as_dict())
    return plain
