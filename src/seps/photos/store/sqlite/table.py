"""One SQLite file with a vector, the packed state and the facts of every image.

Every call opens the file: nothing is held between them, so that a file that was deleted or replaced is seen, and a
reader does not keep a writer waiting. Vectors are read once per commit and compared with the query one by one.

A row is in three tables, so that a search reads neither thumbnails nor, for its conditions, vectors.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seps.photos.store.rows import DESCRIBED, TABLE, Row, StoreSettings, word_condition
from seps.photos.store.tables import CandidateEstimate, Columns, pool
from seps.retrieval.engine.layout import PACKED
from seps.retrieval.engine.packing import Array

WAITS = 60.0
"""Seconds that a call waits for another process to finish its commit."""
EMPTY_SHARE = 0.25
"""Pages without content, of all, from which the file is written anew without them."""
_FACTS = {
    "id": "TEXT NOT NULL UNIQUE",
    "path": "TEXT",
    "member": "TEXT",
    "size": "INTEGER",
    "mtime": "INTEGER",
    "sha256": "TEXT",
    "width": "INTEGER",
    "height": "INTEGER",
    "dense": "TEXT",
    "bank": "REAL",
    "taken": "INTEGER",
    "excluded": "INTEGER",
    "written": "TEXT",
    "sources": "TEXT",
    "sidecar": "INTEGER",
    "latitude": "REAL",
    "longitude": "REAL",
    "ocr": "TEXT",
}
_BLOBS = {"vectors": ("vector", *PACKED), "thumbnails": ("thumbnail",)}
"""The other tables, and their columns."""
_IDS_AT_ONCE = 1000
_BLOCK = 8192
"""Vectors that are made float32 at a time."""


class SQLiteTable:
    """See `seps.photos.store.tables.Table`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        with self._reading() as database:
            self._version, settings = database.execute("SELECT version, settings FROM store").fetchone()
        self._settings = str(settings)
        self._loading = threading.Lock()
        self._loaded: tuple[Array, Array, Array] | None = None

    @classmethod
    def open(cls, location: str) -> SQLiteTable:
        """The table of a store at its newest commit."""
        return cls(_place(location))

    @classmethod
    def create(cls, location: str, settings: StoreSettings) -> SQLiteTable:
        """An empty table. Raises sqlite3.Error where there is one."""
        place = _place(location)
        facts = ", ".join(f"{name} {kind}" for name, kind in _FACTS.items())
        with _connected(place, "rwc") as database, _transaction(database):
            database.execute("CREATE TABLE store (version INTEGER, settings TEXT)")
            database.execute("INSERT INTO store VALUES (1, ?)", (settings.to_json(),))
            database.execute(f"CREATE TABLE images (key INTEGER PRIMARY KEY, {facts})")
            for table, names in _BLOBS.items():
                database.execute(f"CREATE TABLE {table} (key INTEGER PRIMARY KEY, {', '.join(names)})")
        return cls(place)

    def again(self) -> SQLiteTable:
        """See `Table`."""
        found = SQLiteTable(self.place)
        if found.version == self.version:
            found._loaded = self._loaded
        return found

    @property
    def version(self) -> int:
        """See `Table`."""
        return int(self._version)

    @property
    def settings(self) -> str:
        """See `Table`."""
        return self._settings

    def count(self, where: str | None = None) -> int:
        """See `Table`."""
        with self._reading() as database:
            return int(database.execute(f"SELECT count(*) FROM images WHERE {where or 'TRUE'}").fetchone()[0])

    def read(self, columns: Sequence[str], where: str | None, limit: int | None = None) -> Columns:
        """See `Table`."""
        with self._reading() as database:
            return _columns(columns, database.execute(_select(columns, where, limit)).fetchall())

    def batches(self, columns: Sequence[str], where: str | None, size: int) -> Iterator[Columns]:
        """See `Table`; a writer may commit between two of them."""
        last = -1
        while True:
            after = f"images.key > {last} AND ({where or 'TRUE'}) ORDER BY images.key"
            with self._reading() as database:
                rows = database.execute(_select([*columns, "key"], after, size)).fetchall()
            if not rows:
                return
            last = rows[-1][-1]
            yield _columns(columns, [row[:-1] for row in rows])

    def nearest(
        self, query: Array, count: int, columns: Sequence[str], where: str | None, estimate: CandidateEstimate | None
    ) -> Columns:
        """See `Table`: compares all vectors."""
        keys, vectors, levels = self._vectors()
        if where is not None:
            with self._reading() as database:
                found = [key for (key,) in database.execute(f"SELECT key FROM images WHERE {where}")]
            there = np.isin(keys, np.array(found, np.int64), assume_unique=True)
            keys, vectors, levels = keys[there], vectors[there], levels[there]
        asked = np.asarray(query, np.float32)
        blocks = [vectors[start : start + _BLOCK].astype(np.float32) for start in range(0, len(vectors), _BLOCK)]
        products = np.concatenate([block @ asked for block in blocks] or [np.empty(0, np.float32)])
        order = np.argsort(-products, kind="stable")[: count if estimate is None else pool(count, len(products))]
        if estimate is not None:
            order = order[estimate.best(1 - products[order], levels[order], count)]
        chosen = keys[order].tolist()
        rows: dict[int, tuple[Any, ...]] = {}
        with self._reading() as database:
            for start in range(0, len(chosen), _IDS_AT_ONCE):
                named = f"images.key IN ({', '.join(map(str, chosen[start : start + _IDS_AT_ONCE]))})"
                rows |= {row[-1]: row[:-1] for row in database.execute(_select([*columns, "key"], named))}
        return _columns(columns, [rows[key] for key in chosen if key in rows])

    def containing(self, word: str, limit: int) -> set[str]:
        """See `Table`."""
        return set(self.read(["id"], word_condition(word), limit).values("id"))

    def described(self) -> int:
        """See `Table`."""
        return self.count(DESCRIBED)

    def indexed(self, column: str) -> bool:
        """See `Table`: the vectors have none."""
        return False

    def disk_bytes(self) -> int:
        """See `Table`."""
        return self.place.stat().st_size

    def put(self, rows: Sequence[Row], settings: StoreSettings) -> None:
        """See `Table`."""
        names = ", ".join(_FACTS)
        kept = ", ".join(f"{name} = excluded.{name}" for name in _FACTS)
        with self._writing() as database:
            database.executemany(
                f"INSERT INTO images ({names}) VALUES ({_marks(len(_FACTS))}) ON CONFLICT (id) DO UPDATE SET {kept}",
                ([_plain(name, getattr(row, name)) for name in _FACTS] for row in rows),
            )
            for table, columns in _BLOBS.items():
                database.executemany(
                    f"INSERT OR REPLACE INTO {table} (key, {', '.join(columns)}) "
                    f"SELECT key, {_marks(len(columns))} FROM images WHERE id = ?",
                    ([*(_plain(name, getattr(row, name)) for name in columns), row.id] for row in rows),
                )

    def set_column(self, name: str, by_id: Mapping[str, Any]) -> None:
        """See `Table`."""
        values = ((_plain(name, value), identity) for identity, value in by_id.items())
        with self._writing() as database:
            database.executemany(f"UPDATE images SET {name} = ? WHERE id = ?", values)

    def clear_levels(self) -> None:
        """See `Table`."""
        with self._writing() as database:
            database.execute("UPDATE images SET bank = NULL")

    def delete(self, where: str) -> None:
        """See `Table`."""
        with self._writing() as database:
            for table in _BLOBS:
                database.execute(f"DELETE FROM {table} WHERE key IN (SELECT key FROM images WHERE {where})")
            database.execute(f"DELETE FROM images WHERE {where}")

    def write_settings(self, text: str) -> None:
        """See `Table`."""
        with self._writing() as database:
            database.execute("UPDATE store SET settings = ?", (text,))

    def tidy(self, *, always: bool) -> None:
        """See `Table`: takes out the room of deleted rows."""
        with _connected(self.place, "rw") as database:
            pages, empty = (
                database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
            )
            if always or empty > EMPTY_SHARE * pages:
                database.execute("VACUUM")

    def _vectors(self) -> tuple[Array, Array, Array]:
        """Of all rows the keys, the vectors (B, C) float16 and the levels, NaN where there is none."""
        with self._loading:
            if self._loaded is None:
                with self._reading() as database:
                    asked = "SELECT key, vector, bank FROM images JOIN vectors USING (key) ORDER BY key"
                    rows = database.execute(asked).fetchall()
                keys = np.array([row[0] for row in rows], np.int64)
                vectors = np.frombuffer(b"".join(row[1] for row in rows), "<f2").reshape(len(rows), -1 if rows else 0)
                levels = np.array([math.nan if row[2] is None else row[2] for row in rows], np.float32)
                self._loaded = keys, vectors, levels
            return self._loaded

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        # What a writer that was killed left behind is taken back by the next reader, where it may write.
        with _connected(self.place, "rw" if os.access(self.place, os.W_OK) else "ro") as database:
            yield database

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One commit."""
        with _connected(self.place, "rw") as database, _transaction(database):
            yield database
            database.execute("UPDATE store SET version = version + 1")


def _place(location: str) -> Path:
    return Path(os.path.abspath(location), f"{TABLE}.sqlite")


@contextlib.contextmanager
def _connected(place: Path, mode: str) -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(f"{place.as_uri()}?mode={mode}", WAITS, isolation_level=None, uri=True)
    with contextlib.closing(database):
        for name, count, function in _FUNCTIONS:
            database.create_function(name, count, function, deterministic=True)
        yield database


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _select(columns: Sequence[str], where: str | None, limit: int | None = None) -> str:
    names = ", ".join("images.key" if name == "key" else name for name in columns)
    joined = [table for table, its in _BLOBS.items() if any(name in its for name in columns)]
    tables = "".join(f" JOIN {table} USING (key)" for table in joined)
    return f"SELECT {names} FROM images{tables} WHERE {where or 'TRUE'} LIMIT {-1 if limit is None else limit}"


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Columns:
    found: dict[str, list[Any]] = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    if "vector" in found:
        found["vector"] = [np.frombuffer(value, "<f2") for value in found["vector"]]
    if "excluded" in found:
        found["excluded"] = [None if value is None else bool(value) for value in found["excluded"]]
    return Columns(found)


def _plain(name: str, value: Any) -> Any:
    """A value as SQLite keeps it."""
    if name == "vector":
        return np.asarray(value, "<f2").tobytes()
    if name == "bank" and value is not None:
        return float(np.float32(value))  # as precise as it is computed
    return value


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _regexp_like(text: str | None, pattern: str, flags: str) -> bool | None:
    return None if text is None else re.search(pattern, text, re.IGNORECASE if "i" in flags else 0) is not None


def _numeric(function: Any) -> Any:
    """A function of numbers that gives NULL of NULL."""
    return lambda *values: None if None in values else function(*values)


_FUNCTIONS = (
    ("starts_with", 2, lambda text, start: None if text is None else text.startswith(start)),
    ("regexp_like", 3, _regexp_like),
    ("power", 2, _numeric(math.pow)),
    ("sin", 1, _numeric(math.sin)),
    ("cos", 1, _numeric(math.cos)),
    ("asin", 1, _numeric(lambda value: math.asin(min(1.0, value)))),
    ("sqrt", 1, _numeric(math.sqrt)),
    ("radians", 1, _numeric(math.radians)),
)
"""What conditions use and not every SQLite has."""
