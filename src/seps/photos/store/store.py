"""The store: one Lance table with a vector, the packed state and the facts of every image.

Every write is one commit of the table: a process that is killed leaves the last whole one. Readers see the newest
commit a few seconds later and never wait for the writer. SQL and Arrow stay in this file and in `rows`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from seps.images.formats import is_video
from seps.locks import FileInUse
from seps.photos.store import upkeep, vector_index
from seps.photos.store.filters import Filters
from seps.photos.store.rows import (
    ERRORS,
    Columns,
    IndexedFile,
    MissingStoreError,
    Row,
    StoreError,
    StoreSettings,
    create_dataset,
    first_line,
    is_remote,
    newest_settings,
    open_dataset,
    schema,
    to_table,
)
from seps.photos.store.vector_index import Prior
from seps.photos.store.writing import REMOTE_LOCKS, writer_lock
from seps.retrieval.languages import is_unspaced

__all__ = ["AT_ONCE", "Store", "is_remote", "open_dataset", "writer_lock"]

INDEX_ABOVE = 50_000
"""Rows from which an approximate index is worth it; below, comparing with every vector takes milliseconds."""
RESTARTS = 8
"""How often reading the whole table starts again because a writer removed what was being read."""
WORD_COLUMNS = ("dense", "ocr")
"""Where words of queries are looked up: descriptions, and text in pictures."""
AT_ONCE = 1000
"""Ids in one condition."""
_ID = re.compile(r"[0-9a-f]{20}")
_PLAIN_WORD = re.compile(r"\w+")
"""Letters and digits alone may reach the SQL."""
_FRESH = timedelta(seconds=2)
"""After so long a reader looks for a newer commit."""
Answer = TypeVar("Answer")


class Store:
    """The images of one folder. `Store.open` and `Store.create` make one."""

    def __init__(self, location: str, dataset: Any, settings: StoreSettings) -> None:
        self.location = location
        self.settings = settings
        self._dataset, self._looked = dataset, time.monotonic()
        self._described: tuple[int | None, dict[tuple[Any, ...], int]] = (None, {})

    @property
    def _newest(self) -> Any:
        """The newest commit, for writing by Lance; what is read next is what was written."""
        self._looked = float("-inf")
        return open_dataset(self.location)

    @classmethod
    def open(cls, location: str | os.PathLike[str]) -> Store:
        """Open a store. Raises MissingStoreError where there is none, StoreError for one of a newer release."""
        place = str(location)
        if not is_remote(place) and not Path(place).is_dir():
            raise MissingStoreError(f"There is no store {place}. Make one: seps index FOLDER --store {place}")
        try:
            dataset = open_dataset(place)
            found = (dataset.schema.metadata or {})[b"seps"]
        except (KeyError, *ERRORS) as error:
            raise MissingStoreError(
                f"{place} holds no store that can be read ({first_line(error)}). Make one: seps index FOLDER "
                f"--store {place}"
            ) from error
        return cls(place, dataset, StoreSettings.from_json(found.decode("utf-8", "replace"), place))

    @classmethod
    def create(cls, location: str | os.PathLike[str], settings: StoreSettings) -> Store:
        """Make an empty store. Raises StoreError if there is one already or the place cannot be written."""
        place = str(location)
        try:
            if not is_remote(place):
                Path(place).mkdir(parents=True, exist_ok=True)
            return cls(place, create_dataset(place, schema(settings)), settings)
        except ERRORS as error:
            raise StoreError(f"A store cannot be made at {place}: {first_line(error)}.") from error

    def __len__(self) -> int:
        return self.count()

    def count(self, filters: Filters | None = None) -> int:
        """How many images the filters let through."""
        where = None if filters is None else filters.clause()
        return int(self._read(lambda data: data.count_rows(where)))

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
            # With the index of ids Lance reads whole rows of every part that it does not cover yet; without, ids alone.
            merge = self._newest.merge_insert("id").use_index(False)
            merge.when_matched_update_all().when_not_matched_insert_all().execute(to_table(rows, self.settings))

    def set_bank(self, name: str, text_hash: str = "") -> None:
        """Make room for the levels of another bank of background queries, or text side; no image has one then."""
        with self._failing("changed"):
            if self.settings.bank:
                self._newest.update({"bank": "NULL"})
            elif "bank" not in self._newest.schema.names:
                self._newest.add_columns(pa.field("bank", pa.float32()))
        self.set_settings(replace(self.settings, bank=name, text_hash=text_hash, calibration={}, calibrated=""))

    def without_level(self) -> list[str]:
        """Ids of the images that have no level of the bank yet, sorted."""
        found = self._read(lambda data: data.to_table(columns=["id"], filter="bank IS NULL"))
        return sorted(Columns(found).values("id"))

    def put_levels(self, levels: Mapping[str, float]) -> None:
        """Set the level of some images, by id."""
        self._set_column("bank", levels, pa.float32())

    def unread(self) -> list[str]:
        """Ids of the images that can be found and in which no text was looked for yet, by path."""
        where = "ocr IS NULL AND excluded IS NOT TRUE"
        found = self._read(lambda data: data.to_table(columns=["id", "path", "member"], filter=where))
        rows = Columns(found).rows()
        return [row["id"] for row in sorted(rows, key=lambda row: (row["path"], row["member"] or ""))]

    def put_texts(self, texts: Mapping[str, str]) -> None:
        """Set the text in some pictures, by id; empty: there is none."""
        self._set_column("ocr", texts, pa.string())

    def put_excluded(self, excluded: Mapping[str, bool]) -> None:
        """Set which images are excluded, by id, and count them in the settings."""
        self._set_column("excluded", excluded, pa.bool_())
        count = int(self._read(lambda table: table.count_rows("excluded")))
        if count != self.settings.excluded:
            self.set_settings(replace(self.settings, excluded=count))

    def _set_column(self, name: str, by_id: Mapping[str, Any], kind: pa.DataType) -> None:
        if by_id:
            with self._failing("changed"):
                # With an index of ids Lance writes this column alone; without, it reads all and copies whole rows.
                if self.indexed("id"):
                    upkeep.extend(self._newest, few=True)
                else:
                    self._index_ids()
                values = {"id": pa.array(list(by_id)), name: pa.array(list(by_id.values()), kind)}
                self._newest.merge_insert("id").when_matched_update_all().execute(pa.table(values))

    def delete(self, ids: Sequence[str]) -> None:
        """Take images out."""
        for start in range(0, len(ids), AT_ONCE):
            with self._failing("removed"):
                self._newest.delete(_among(ids[start : start + AT_ONCE]))

    def select(self, ids: Sequence[str], columns: Sequence[str], filters: Filters | None = None) -> Columns:
        """Some columns of the images with these ids, in any order; ids that are not there are left out."""
        more = None if filters is None else filters.clause()
        where = _among(ids) if more is None else f"{_among(ids)} AND {more}"
        return Columns(self._read(lambda data: data.to_table(columns=list(columns), filter=where)))

    def parts(self, ids: Sequence[str], columns: Sequence[str]) -> Iterator[Columns]:
        """`select` of any number of ids, some at a time."""
        for start in range(0, len(ids), AT_ONCE):
            yield self.select(ids[start : start + AT_ONCE], columns)

    def among(self, ids: Sequence[str], filters: Filters | None, most: int | None = None) -> list[str]:
        """Those of the ids whose images the filters let through, in their order; at most the first `most`."""
        if filters is None or filters.clause() is None:
            return list(ids[:most])
        found: list[str] = []
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
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
        """Images with a description or with text in them.

        Counted once per part of the table: all take longer than a search at a million.
        """

        def count(data: Any) -> int:
            version, found = self._described
            if version != data.version:
                before, found = found, {}
                for part in data.get_fragments():
                    state = (part.fragment_id, part.num_deletions, *(file.path for file in part.data_files()))
                    found[state] = (
                        before[state] if state in before else part.count_rows("dense IS NOT NULL OR ocr <> ''")
                    )
                self._described = (data.version, found)
            return sum(found.values())

        return self._read(count)

    def version(self) -> int:
        """The number of the newest commit; what is read changes only with it."""
        return int(self._read(lambda data: data.version))

    def containing(self, word: str, limit: int) -> list[str]:
        """Ids of at most `limit` images with the word (`languages.words_of`) in their description or in them, by id."""
        if not _PLAIN_WORD.fullmatch(word):
            return []
        pattern = "|".join(dict.fromkeys(unicodedata.normalize(form, word) for form in ("NFC", "NFD")))
        edge = "" if is_unspaced(word) else r"\b"
        indexed = [column for column in WORD_COLUMNS if edge and self.indexed(column)]
        read = [f"regexp_like({each}, '{edge}({pattern}){edge}', 'i')" for each in WORD_COLUMNS if each not in indexed]
        asked: list[dict[str, Any]] = [{"columns": ["id"], "filter": " OR ".join(read)}] if read else []
        if indexed:
            from lance.query import MatchQuery

            asked += [{"columns": ["id", "_score"], "full_text_query": MatchQuery(word, each)} for each in indexed]
        found: set[str] = set()
        for how in asked:
            read_so = functools.partial(_table, limit=limit, **how)
            found |= set(Columns(self._read(read_so)).values("id"))
        return sorted(found)[:limit]

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """Whole rows by id; ids that are not there are left out."""
        there = set(schema(self.settings).names)
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
        prior: Prior | None = None,
    ) -> Columns:
        """The `count` images whose vectors have the largest dot product with `vector`, best first; with `prior`, of a
        store with levels, those with the best prior, of several times as many that are near."""
        where = None if filters is None else filters.clause()
        query = np.asarray(vector, np.float32)
        return Columns(self._read(lambda data: vector_index.nearest(data, query, count, columns, where, prior)))

    def scan(self, columns: Sequence[str], filters: Filters | None = None, batch_size: int = 256) -> Iterator[Columns]:
        """Some columns of all images, in batches, each image once.

        A writer that joins the table's parts removes the version that is being read: reading then continues in the
        newest, without the images that were read already.
        """
        where = None if filters is None else filters.clause()
        asked = list(columns) if "id" in columns else [*columns, "id"]
        seen: list[str] = []  # one text per batch: a set of a million ids takes a hundred megabytes

        def start(data: Any) -> Any:
            return iter(data.to_batches(columns=asked, filter=where, batch_size=batch_size))

        for attempt in range(RESTARTS + 1):
            batches, known = self._read(start), set(" ".join(seen).split())
            try:
                for batch in batches:
                    ids = batch.column("id").to_pylist()
                    if known:
                        batch = batch.filter(pa.array([identity not in known for identity in ids]))
                    seen.append(" ".join(ids))
                    if batch.num_rows:
                        yield Columns(batch.select(list(columns)))
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
        """Change what the table says of itself."""
        with self._failing("changed"):
            self._newest.update_schema_metadata({"seps": settings.to_json()})
        self.settings = settings

    def tidy(self, *, always: bool = False) -> None:
        """Join the table's small parts, index a large store, bring new rows into its indexes and drop old versions."""
        with self._failing("changed"):
            joined = upkeep.join(self._newest, always=always)
            made = len(self) >= INDEX_ABOVE and self._index()
            extended = upkeep.extend(self._newest, few=always or joined)
            newest = self._newest
            if always or joined or made or extended or len(newest.versions()) > upkeep.VERSIONS:
                # Readers open the newest version again when theirs is gone.
                newest.cleanup_old_versions(timedelta(0), delete_unverified=True)

    def _index(self) -> bool:
        """Index vectors, words of texts and ids where they are not; whether anything was done."""
        missing = [column for column in ("vector", *WORD_COLUMNS, "id") if not self.indexed(column)]
        anew = "vector" in missing or self._read(vector_index.is_outdated)
        if anew:
            vector_index.build(self._newest, len(self))
        for column in WORD_COLUMNS:
            if column in missing:
                self._index_words(column)
        if "id" in missing:  # every thumbnail of the page is read by its id
            self._index_ids()
        return bool(missing) or anew

    def _index_ids(self) -> None:
        self._newest.create_scalar_index("id", "BTREE", name="id_idx")

    def _index_words(self, column: str) -> None:
        """Index the words of texts as they are written: no stemming, no words left out."""
        options = {"with_position": False, "stem": False, "remove_stop_words": False, "ascii_folding": False}
        self._newest.create_scalar_index(column, "INVERTED", name=f"{column}_idx", max_token_length=None, **options)

    def indexed(self, column: str = "vector") -> bool:
        """Whether a column has an index; that of the vectors is an approximate one."""
        return bool(self._read(lambda data: any(column in index.field_names for index in data.describe_indices())))

    def disk_bytes(self) -> int:
        """Bytes on disk; in object storage those of the newest version."""
        if is_remote(self.location):
            parts = self._newest.get_fragments()
            return sum(file.file_size_bytes or 0 for part in parts for file in part.data_files())
        return sum(path.stat().st_size for path in Path(self.location).rglob("*") if path.is_file())

    def _read(self, work: Callable[[Any], Answer]) -> Answer:
        if time.monotonic() - self._looked >= _FRESH.total_seconds():
            self.refresh()
        try:
            return work(self._dataset)
        except ERRORS:
            self.refresh()  # a writer may have removed the version that this process was reading
        try:
            return work(self._dataset)
        except ERRORS as error:
            raise self._unreadable(error) from error

    def refresh(self) -> None:
        """Read the newest version from now on, and its settings. Raises StoreError where there is none any more."""
        before = self._dataset.version
        try:  # another object: a thread may be reading the one that was
            self._dataset = self._dataset.checkout_version(self._dataset.latest_version)
            self._looked = time.monotonic()
            if self._dataset.version != before:
                self.settings = newest_settings(self._dataset, self.settings, self.location)
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


def _table(data: Any, **how: Any) -> pa.Table:
    return data.to_table(**how)


def _among(ids: Sequence[str]) -> str:
    """A condition in SQL: an id that is one of these. What is no id cannot be there, and must not reach the SQL."""
    return f"id IN ({', '.join(repr(identity) for identity in ids if _ID.fullmatch(identity)) or 'NULL'})"
