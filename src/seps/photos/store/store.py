"""The store: one table with a vector, the packed state and the facts of every image.

Every write is one commit of the table: a process that is killed leaves the last whole one. Readers see the newest
commit within seconds. SQL is written in this folder alone; `tables.Table` is what a store asks of its database.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from seps.extras import MissingPackage, is_installed, require
from seps.images.formats import is_video
from seps.locks import FileInUse
from seps.photos.store.filters import Filters
from seps.photos.store.rows import (
    ERRORS,
    TABLE,
    IndexedFile,
    MissingStoreError,
    Row,
    StoreError,
    StoreSettings,
    column_names,
    first_line,
    is_remote,
    newest_settings,
)
from seps.photos.store.tables import CandidateEstimate, Columns, Table
from seps.photos.store.writing import REMOTE_LOCKS, writer_lock
from seps.retrieval.config import VECTOR

if TYPE_CHECKING:
    from seps.photos.store.lance.table import LanceTable

__all__ = ["IDS_AT_ONCE", "Store", "is_remote", "writer_lock"]

RESTARTS = 8
"""How often reading the whole table starts again because a writer removed what was being read."""
IDS_AT_ONCE = 1000
"""Ids in one condition."""
_ID = re.compile(r"[0-9a-f]{20}")
_PLAIN_WORD = re.compile(r"\w+")
"""Letters and digits alone may reach the SQL."""
_FRESH = timedelta(seconds=2)
"""After so long a reader looks for a newer commit."""
Answer = TypeVar("Answer")


class Store:
    """The images of one folder. `Store.open` and `Store.create` make one."""

    def __init__(self, location: str, table: Table, settings: StoreSettings) -> None:
        self.location = location
        self.settings = settings
        self.table, self._looked = table, time.monotonic()
        self._described: tuple[int | None, int] = (None, 0)

    @classmethod
    def open(cls, location: str | os.PathLike[str]) -> Store:
        """Open a store. Raises MissingStoreError where there is none, StoreError for one of a newer release."""
        place = str(location)
        if not is_remote(place) and not Path(place).is_dir():
            raise MissingStoreError(f"There is no store {place}. Make one: seps index FOLDER --store {place}")
        try:
            table = open_table(place)
            found = table.settings
        except MissingPackage as error:
            raise StoreError(str(error)) from error
        except (KeyError, *ERRORS) as error:
            raise MissingStoreError(
                f"{place} holds no store that can be read ({first_line(error)}). Restore it, or make one in an empty "
                f"folder: seps index FOLDER --store OTHER"
            ) from error
        return cls(place, table, StoreSettings.from_json(found, place))

    @classmethod
    def create(cls, location: str | os.PathLike[str], settings: StoreSettings) -> Store:
        """Make an empty store. Raises StoreError if there is one already or the place cannot be written."""
        place = str(location)
        try:
            if not is_remote(place):
                Path(place).mkdir(parents=True, exist_ok=True)
            return cls(place, create_table(place, settings), settings)
        except MissingPackage as error:
            raise StoreError(str(error)) from error
        except ERRORS as error:
            raise StoreError(
                f"A store cannot be made at {place}: {first_line(error)}. Name an empty folder with --store."
            ) from error

    def __len__(self) -> int:
        return self.count()

    def count(self, filters: Filters | None = None) -> int:
        """How many images the filters let through."""
        where = None if filters is None else filters.clause()
        return int(self._read(lambda table: table.count(where)))

    def known(self) -> dict[str, IndexedFile]:
        """The files of all images, by id."""
        columns = ["dense", *(field.name for field in fields(IndexedFile) if field.name != "description")]
        rows = (row for some in self.scan(columns, batch_size=8192) for row in some.rows())
        return {row["id"]: IndexedFile(description=row.pop("dense"), **row) for row in rows}

    def put(self, rows: Sequence[Row]) -> None:
        """Add the rows, or take the place of those with the same id: all or none."""
        if not rows:
            return
        with self._failing("added"):
            self.table.put(rows, self.settings)

    def set_bank(self, name: str, text_hash: str = "") -> None:
        """Make room for the levels of another bank of background queries, or text side; no image has one then."""
        with self._failing("changed"):
            self.table.clear_levels()
        self.set_settings(replace(self.settings, bank=name, text_hash=text_hash, calibration={}, calibrated=""))

    def without_level(self) -> list[str]:
        """Ids of the images that have no level of the bank yet, sorted."""
        return sorted(self._read(lambda table: table.read(["id"], "bank IS NULL")).values("id"))

    def put_levels(self, levels: Mapping[str, float]) -> None:
        """Set the level of some images, by id."""
        self._set_column("bank", levels)

    def unread(self) -> list[str]:
        """Ids of the images that can be found and in which no text was looked for yet, by path."""
        where = "ocr IS NULL AND excluded IS NOT TRUE"
        rows = self._read(lambda table: table.read(["id", "path", "member"], where)).rows()
        return [row["id"] for row in sorted(rows, key=lambda row: (row["path"], row["member"] or ""))]

    def put_texts(self, texts: Mapping[str, str]) -> None:
        """Set the text in some pictures, by id; empty: there is none."""
        self._set_column("ocr", texts)

    def put_excluded(self, excluded: Mapping[str, bool]) -> None:
        """Set which images are excluded, by id, and count them in the settings."""
        self._set_column("excluded", excluded)
        count = self._read(lambda table: table.count("excluded"))
        if count != self.settings.excluded:
            self.set_settings(replace(self.settings, excluded=count))

    def _set_column(self, name: str, by_id: Mapping[str, Any]) -> None:
        if by_id:
            with self._failing("changed"):
                self.table.set_column(name, by_id)

    def delete(self, ids: Sequence[str]) -> None:
        """Take images out."""
        for start in range(0, len(ids), IDS_AT_ONCE):
            with self._failing("removed"):
                self.table.delete(_among(ids[start : start + IDS_AT_ONCE]))

    def select(self, ids: Sequence[str], columns: Sequence[str], filters: Filters | None = None) -> Columns:
        """Some columns of the images with these ids, in any order; ids that are not there are left out."""
        more = None if filters is None else filters.clause()
        where = _among(ids) if more is None else f"{_among(ids)} AND {more}"
        return self._read(lambda table: table.read(columns, where))

    def parts(self, ids: Sequence[str], columns: Sequence[str]) -> Iterator[Columns]:
        """`select` of any number of ids, some at a time."""
        for start in range(0, len(ids), IDS_AT_ONCE):
            yield self.select(ids[start : start + IDS_AT_ONCE], columns)

    def among(self, ids: Sequence[str], filters: Filters | None, most: int | None = None) -> list[str]:
        """Those of the ids whose images the filters let through, in their order; at most the first `most`."""
        if filters is None or filters.clause() is None:
            return list(ids[:most])
        found: list[str] = []
        for start in range(0, len(ids), IDS_AT_ONCE):
            some = ids[start : start + IDS_AT_ONCE]
            allowed = set(self.select(some, ["id"], filters).values("id"))
            found += [identity for identity in some if identity in allowed]
            if most is not None and len(found) >= most:
                break
        return found[:most]

    def allowed(self, filters: Filters | None) -> Filters:
        """The filters as this store needs them now; what is excluded is not found."""
        self.version()
        settings, filters = self.settings, filters or Filters()
        folder = None if filters.folder is None else settings.stored_folder(filters.folder)
        first = folder == "." and filters.folder != "." and bool(settings.more_roots)
        return replace(filters, folder=folder, all_rows=not settings.excluded, first_root=first)

    def described(self) -> int:
        """Images with a description or with text in them. Counted once per commit."""

        def count(table: Table) -> int:
            version, found = self._described
            if version != table.version:
                found = table.described()
                self._described = (table.version, found)
            return found

        return self._read(count)

    def version(self) -> int:
        """The number of the newest commit; what is read changes only with it."""
        return self._read(lambda table: table.version)

    def containing(self, word: str, limit: int) -> list[str]:
        """Ids of at most `limit` images with the word (`languages.words_of`) in their description or in them, by id."""
        if not _PLAIN_WORD.fullmatch(word):
            return []
        return sorted(self._read(lambda table: table.containing(word, limit)))[:limit]

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """Whole rows by id; ids that are not there are left out."""
        there = set(column_names(self.settings))
        names = [field.name for field in fields(Row) if field.name in there]
        return {row["id"]: Row(**row) for some in self.parts(ids, names) for row in some.rows(names)}

    def get(self, identity: str, columns: Sequence[str]) -> dict[str, Any] | None:
        """Some columns of one image; None where there is none of that id, or it is no id."""
        return next(iter(self.select([identity], columns).rows()), None)

    def nearest(
        self,
        vector: Any,
        count: int,
        columns: Sequence[str],
        filters: Filters | None = None,
        estimate: CandidateEstimate | None = None,
    ) -> Columns:
        """The `count` images whose vectors have the largest product with `vector`, best first; with `estimate`, of a
        store with levels, those with the best estimate, of several times as many that are near."""
        where = None if filters is None else filters.clause()
        query = np.asarray(vector, np.float32)
        return self._read(lambda table: table.nearest(query, count, columns, where, estimate))

    def scan(self, columns: Sequence[str], filters: Filters | None = None, batch_size: int = 256) -> Iterator[Columns]:
        """Some columns of all images, in batches, each image once.

        A writer that joins the table's parts removes the version that is being read: reading then continues in the
        newest, without the images that were read already.
        """
        where = None if filters is None else filters.clause()
        asked = list(columns) if "id" in columns else [*columns, "id"]
        seen: list[str] = []  # one text per batch: a set of a million ids takes a hundred megabytes

        for attempt in range(RESTARTS + 1):
            batches = self._read(lambda table: table.batches(asked, where, batch_size))
            known = set(" ".join(seen).split())
            try:
                for batch in batches:
                    ids = batch.values("id")
                    if known:
                        batch = batch.chosen([identity not in known for identity in ids])
                    seen.append(" ".join(ids))
                    if len(batch):
                        yield batch.only(columns)
                return
            except ERRORS as error:
                if attempt == RESTARTS:
                    raise self._unreadable(error) from error
                self.refresh()

    def folders(self) -> list[str]:
        """Folders and shards at the top of the indexed folder that hold images, and further folders, sorted."""
        found = set()
        for some in self.scan(["path", "member"], Filters(all_rows=False), 8192):
            for row in some.rows():
                top, below, _ = row["path"].partition("/")
                if below or (row["member"] is not None and not is_video(row["path"])):
                    found.add(self.settings.base_of(row["path"]) or top)
        return sorted(found)

    def set_settings(self, settings: StoreSettings) -> None:
        """Change the settings that the table holds."""
        with self._failing("changed"):
            self.table.write_settings(settings.to_json())
        self.settings = settings

    def tidy(self, *, always: bool = False) -> None:
        """Upkeep of the table and its indexes after pictures came or went; with `always` all that can be done."""
        with self._failing("changed"):
            self.table.tidy(always=always)

    def indexed(self, column: str = "vector") -> bool:
        """Whether a column has an index; that of the vectors is an approximate one."""
        return self._read(lambda table: table.indexed(column))

    def disk_bytes(self) -> int:
        """Bytes on disk; in object storage those of the newest version."""
        if is_remote(self.location):
            return self._read(lambda table: table.disk_bytes())
        return sum(path.stat().st_size for path in Path(self.location).rglob("*") if path.is_file())

    def _read(self, work: Callable[[Table], Answer]) -> Answer:
        if time.monotonic() - self._looked >= _FRESH.total_seconds():
            self.refresh()
        try:
            return work(self.table)
        except ERRORS:
            self.refresh()  # a writer may have removed the version that this process was reading
        try:
            return work(self.table)
        except ERRORS as error:
            raise self._unreadable(error) from error

    def refresh(self) -> None:
        """Read the newest version from now on, and its settings. Raises StoreError where there is none any more."""
        before = self.table.version
        try:  # another object: a thread may be reading the one that was
            self.table = self.table.again()
            self._looked = time.monotonic()
            if self.table.version != before:
                self.settings = newest_settings(self.table, self.settings, self.location)
        except ERRORS as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> StoreError:
        return StoreError(f"The store {self.location} cannot be read: {first_line(error)}.")

    @contextlib.contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            if self.location in REMOTE_LOCKS:
                REMOTE_LOCKS[self.location].check()
            yield
        except FileInUse as error:
            raise StoreError(f"The store {error}") from error
        except ERRORS as error:
            raise StoreError(
                f"Nothing was {verb}: the store {self.location} cannot be written ({first_line(error)}). Existing "
                "data is intact. Free disk space or fix the permissions, then retry."
            ) from error
        finally:
            self._looked = float("-inf")


def _among(ids: Sequence[str]) -> str:
    """A condition in SQL: an id that is one of these. What is no id cannot be there, and must not reach the SQL."""
    return f"id IN ({', '.join(repr(identity) for identity in ids if _ID.fullmatch(identity)) or 'NULL'})"


def has_table(location: str) -> bool:
    """Whether a folder holds a table of a store."""
    return Path(location, f"{TABLE}.lance").is_dir() or _is_sqlite(location)


def open_table(location: str) -> Table:
    """The table of a store. Raises MissingPackage for one of Lance without it, and what the database raises."""
    if _is_sqlite(location):
        from seps.photos.store.sqlite.table import SQLiteTable

        return SQLiteTable.open(location)
    if not is_remote(location) and not has_table(location):
        raise FileNotFoundError(f"it has no table {TABLE}.lance or {TABLE}.sqlite")
    return _lance(f"The store {location}").open(location)


def create_table(location: str, settings: StoreSettings) -> Table:
    """An empty table. Raises MissingPackage where only Lance would do, and what the database raises if there is one."""
    if is_remote(location):
        return _lance("A store in object storage").create(location, settings)
    if _is_sqlite(location) and settings.layout.size != VECTOR:
        raise FileExistsError(f"it has a file {TABLE}.sqlite already")
    if prefers_lance() and not _is_sqlite(location):
        return _lance("").create(location, settings)
    if settings.layout.size != VECTOR:
        return _lance(f"A store of the size {settings.layout.size!r}").create(location, settings)
    from seps.photos.store.sqlite.table import SQLiteTable

    return SQLiteTable.create(location, settings)


def prefers_lance() -> bool:
    """Whether new stores in a folder are of Lance."""
    return is_installed("lance") and is_installed("pyarrow")


def _is_sqlite(location: str) -> bool:
    return not is_remote(location) and Path(location, f"{TABLE}.sqlite").is_file()


def _lance(what: str) -> type[LanceTable]:
    for module in ("lance", "pyarrow"):
        require(module, what)
    from seps.photos.store.lance.table import LanceTable

    return LanceTable
