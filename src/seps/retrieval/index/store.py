"""The store: one LanceDB table with a vector, the image-only state and the facts of every image.

Every write is one commit of the table: a process killed at any moment leaves the last whole one. Readers see the
newest commit a few seconds later and are never in the writer's way.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from seps.file_lock import FileInUse, FileLock
from seps.retrieval.index.remote_lock import RemoteLock, RemoteLockHeld
from seps.retrieval.index.rows import TABLE, Row, StoreError, StoreSettings, from_table, schema, to_table

INDEX_ABOVE = 50_000
"""Rows from which an approximate index pays; below, comparing with every vector takes milliseconds."""
PROBES = 64
"""Partitions of the approximate index that a query looks into."""
RESTARTS = 8
"""How often reading the whole table starts again because a writer removed what was being read."""
FRAGMENTS = 32
"""Parts of the table beyond which they are joined after indexing."""
_ID = re.compile(r"[0-9a-f]{20}")
_FRESH = timedelta(seconds=2)
Result = TypeVar("Result")
_HELD: dict[str, RemoteLock] = {}
"""Locks of this process, by store."""


@dataclass(frozen=True)
class Known:
    """What tells whether an image of the store is still the one on disk."""

    id: str
    path: str
    member: str | None
    size: int
    mtime: int
    sha256: str
    dense: str | None


class Store:
    """The images of one folder. `Store.open` and `Store.create` make one."""

    def __init__(self, location: str, table: Any, settings: StoreSettings) -> None:
        self.location = location
        self.settings = settings
        self._table = table

    @classmethod
    def open(cls, location: str | os.PathLike[str]) -> Store:
        """Open a store. Raises StoreError where there is none, or one of a newer release."""
        place = str(location)
        if not is_remote(place) and not Path(place).is_dir():
            raise StoreError(f"There is no store {place}. Make one: seps index FOLDER --store {place}")
        try:
            table = connect(place).open_table(TABLE)
            found = (table.schema.metadata or {})[b"seps"]
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            raise StoreError(
                f"{place} holds no store that can be read ({first_line(error)}). Make one: seps index FOLDER --store "
                f"{place}"
            ) from error
        return cls(place, table, StoreSettings.from_json(found.decode("utf-8", "replace"), place))

    @classmethod
    def create(cls, location: str | os.PathLike[str], settings: StoreSettings) -> Store:
        """Make an empty store. Raises StoreError if there is one already or the place cannot be written."""
        place = str(location)
        try:
            if not is_remote(place):
                Path(place).mkdir(parents=True, exist_ok=True)
            table = connect(place).create_table(TABLE, schema=schema(settings))
        except (ValueError, RuntimeError, OSError) as error:
            raise StoreError(f"A store cannot be made at {place}: {first_line(error)}.") from error
        return cls(place, table, settings)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store for writing. Raises StoreError while another process writes it."""
        with writer_lock(self.location):
            yield

    def __len__(self) -> int:
        return int(self._read(lambda table: table.count_rows()))

    def known(self) -> dict[str, Known]:
        """By id, the facts that tell whether an image has changed."""
        columns = ["id", "path", "member", "size", "mtime", "sha256", "dense"]
        return {
            value["id"]: Known(**value) for batch in self.scan(columns, batch_size=8192) for value in batch.to_pylist()
        }

    def put(self, rows: Sequence[Row]) -> None:
        """Add the rows, or take the place of those with the same id: all or none."""
        if not rows:
            return
        with self._failing("added"):
            merge = self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merge.execute(to_table(rows, self.settings))

    def delete(self, ids: Sequence[str]) -> None:
        """Take images out."""
        for start in range(0, len(ids), 1000):
            with self._failing("removed"):
                self._table.delete(_among(ids[start : start + 1000]))

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """Whole rows by id; ids that are not there are left out."""
        found: dict[str, Row] = {}
        for start in range(0, len(ids), 1000):
            table = self._where(_among(ids[start : start + 1000]))
            found |= {row.id: row for row in from_table(table)}
        return found

    def table(self, identity: str, columns: Sequence[str]) -> pa.Table:
        """Some columns of one image, as a table of one row; of none where there is no such id."""
        return self._where(_among([identity]) if _ID.fullmatch(identity) else "false", columns)

    def table_of(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Some columns of the images with these ids, in any order."""
        return self._where(_among(ids), columns)

    def _where(self, condition: str, columns: Sequence[str] | None = None) -> pa.Table:
        def search(table: Any) -> pa.Table:
            query = table.search().where(condition)
            return (query.select(list(columns)) if columns else query).to_arrow()

        return self._read(search)

    def get(self, identity: str, columns: Sequence[str]) -> dict[str, Any] | None:
        """Some columns of one image; None where there is none of that id, or it is no id."""
        found = self.table(identity, columns).to_pylist()
        return dict(found[0]) if found else None

    def nearest(self, vector: Any, count: int, columns: Sequence[str], where: str | None = None) -> pa.Table:
        """The `count` images whose vectors have the largest dot product with `vector`, best first."""

        def search(table: Any) -> pa.Table:
            query = table.search(np.asarray(vector, np.float32), vector_column_name="vector").distance_type("dot")
            # Enough partitions that an approximate index misses next to nothing; without one it has no effect.
            query = query.nprobes(PROBES)
            if where:
                query = query.where(where, prefilter=True)
            return query.select([*columns, "_distance"]).limit(count).to_arrow()

        return self._read(search)

    def scan(self, columns: Sequence[str], where: str | None = None, batch_size: int = 256) -> Iterator[pa.RecordBatch]:
        """Some columns of all images, in batches, each image once.

        A writer that joins the table's parts removes the version that is being read: reading then goes on in the
        newest, without the images that came already.
        """
        asked = list(columns) if "id" in columns else [*columns, "id"]
        seen: set[str] = set()

        def start(table: Any) -> Any:
            query = table.search().select(asked)
            return iter((query.where(where) if where else query).to_batches(batch_size))

        for attempt in range(RESTARTS + 1):
            batches = self._read(start)
            try:
                for batch in batches:
                    ids = batch.column("id").to_pylist()
                    if attempt:
                        fresh = [identity not in seen for identity in ids]
                        batch = batch.filter(pa.array(fresh))
                    seen.update(ids)
                    if batch.num_rows:
                        yield batch.select(list(columns))
                return
            except (ValueError, RuntimeError, OSError) as error:
                if attempt == RESTARTS:
                    raise StoreError(f"The store {self.location} cannot be read: {first_line(error)}.") from error
                self._refresh()

    def folders(self) -> list[str]:
        """Folders and shards at the top of the indexed folder that hold images, sorted."""
        found = set()
        for batch in self.scan(["path", "member"], batch_size=8192):
            for row in batch.to_pylist():
                top, below, _ = row["path"].partition("/")
                if below or row["member"] is not None:
                    found.add(top)
        return sorted(found)

    def set_settings(self, settings: StoreSettings) -> None:
        """Change what the table says of itself."""
        with self._failing("changed"):
            self._table.to_lance().update_schema_metadata({"seps": settings.to_json()})
            self._table.checkout_latest()
        self.settings = settings

    def move_root(self, root: str) -> None:
        """The folder is now at `root`."""
        self.set_settings(replace(self.settings, root=root))

    def tidy(self, *, always: bool = False) -> None:
        """Join the table's small parts, drop old versions and index the vectors of a large store."""
        with self._failing("changed"):
            rows = len(self)
            joined = always or len(self._table.to_lance().get_fragments()) > FRAGMENTS
            if joined:
                self._optimize()
            if rows >= INDEX_ABOVE and not self._table.list_indices():
                from lancedb.index import IvfFlat

                self._table.create_index("vector", config=IvfFlat(distance_type="dot", num_partitions=int(rows**0.5)))
            elif joined and self._table.list_indices():
                self._optimize()  # the index of the parts that were joined is an old version only now

    def _optimize(self) -> None:
        with warnings.catch_warnings():
            # Readers open the newest version again when theirs is gone.
            warnings.simplefilter("ignore", UserWarning)
            self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)

    def indexed(self) -> bool:
        """Whether there is an approximate index of the vectors."""
        return bool(self._read(lambda table: table.list_indices()))

    def disk_bytes(self) -> int:
        """Bytes on disk; in object storage those of the newest version."""
        if is_remote(self.location):
            return int(self._read(lambda table: table.stats())["total_bytes"])
        return sum(path.stat().st_size for path in Path(self.location).rglob("*") if path.is_file())

    def _read(self, work: Callable[[Any], Result]) -> Result:
        try:
            return work(self._table)
        except (ValueError, RuntimeError, OSError):
            # A writer that tidied up may have removed the version this process was reading.
            self._refresh()
        try:
            return work(self._table)
        except (ValueError, RuntimeError, OSError) as error:
            raise StoreError(f"The store {self.location} cannot be read: {first_line(error)}.") from error

    def _refresh(self) -> None:
        """Read the newest version from now on. Raises StoreError where there is none any more."""
        try:
            self._table.checkout_latest()
        except (ValueError, RuntimeError, OSError) as error:
            raise StoreError(f"The store {self.location} cannot be read: {first_line(error)}.") from error

    @contextlib.contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        if self.location in _HELD:
            _HELD[self.location].check()
        try:
            yield
        except (ValueError, RuntimeError, OSError) as error:
            raise StoreError(
                f"Nothing was {verb}: the store {self.location} cannot be written ({first_line(error)}). What it held "
                "before is whole; make room or look at the permissions, and run again."
            ) from error


def connect(location: str) -> Any:
    """A connection to the database at a folder or URI. Raises StoreError without the packages."""
    os.environ.setdefault("LANCE_LOG", "error")
    try:
        import lancedb
    except ImportError as error:
        raise StoreError("The store needs LanceDB: pip install 'seps[store]'") from error
    try:
        return lancedb.connect(location, read_consistency_interval=_FRESH)
    except (ValueError, RuntimeError, OSError) as error:
        raise StoreError(f"The place {location} cannot be used: {first_line(error)[:300]}.") from error


def is_remote(location: str) -> bool:
    """Whether the location is a URI (object storage) and not a folder."""
    return "://" in location


@contextlib.contextmanager
def writer_lock(location: str) -> Iterator[None]:
    """One writer a store: a lock of the system for a folder, a table that names the writer in object storage."""
    if is_remote(location):
        with _remote_writer(location):
            yield
        return
    folder = Path(location)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(folder / "writer.lock", folder))
        except FileInUse as error:
            raise StoreError(f"The store {error} What was written is kept.") from error
        except OSError as error:
            raise StoreError(
                f"The store {folder} cannot be written ({error.strerror or error}). Look at its permissions and at the "
                "disk, or name another folder with --store. Nothing was changed."
            ) from error
        yield


@contextlib.contextmanager
def _remote_writer(location: str) -> Iterator[None]:
    try:
        with RemoteLock(connect(location)) as lock:
            _HELD[location] = lock
            try:
                yield
            finally:
                del _HELD[location]
    except RemoteLockHeld as error:
        raise StoreError(f"The store {location} {error}") from error


def where_clause(
    *, folder: str | None = None, after: int | None = None, before: int | None = None, min_size: int | None = None
) -> str | None:
    """A filter on paths, times (nanoseconds) and the shorter side in pixels; None without any."""
    parts = []
    prefix = posixpath.normpath((folder or "").strip("/") or ".").replace("'", "''")
    if prefix != ".":
        parts.append(f"(starts_with(path, '{prefix}/') OR path = '{prefix}')")
    if after is not None:
        parts.append(f"mtime >= {int(after)}")
    if before is not None:
        parts.append(f"mtime < {int(before)}")
    if min_size:
        parts.append(f"(width >= {int(min_size)} AND height >= {int(min_size)})")
    return " AND ".join(parts) or None


def _among(ids: Sequence[str]) -> str:
    wrong = [identity for identity in ids if not _ID.fullmatch(identity)]
    if wrong:
        raise StoreError(f"{wrong[0]!r} is no image id (20 hex digits).")
    return f"id IN ({', '.join(repr(identity) for identity in ids)})"


def first_line(error: Exception) -> str:
    """The first line of an error, without the place in a library's source."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.split(r", (?:/|rust/)\S+\.rs:", text)[0].rstrip(".")
