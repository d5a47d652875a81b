"""One Lance table with a vector, the packed state and the facts of every image.

Every write is one commit of the table. Reading is of one version of it, which a writer may remove.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from seps.photos.store.lance import upkeep, vector_index
from seps.photos.store.rows import (
    DESCRIBED,
    TABLE,
    WORD_COLUMNS,
    Row,
    StoreSettings,
    column_names,
    is_remote,
    word_condition,
)
from seps.photos.store.tables import CandidateEstimate, Columns
from seps.retrieval.engine.packing import Array
from seps.retrieval.languages import is_unspaced

INDEX_ABOVE = 50_000
"""Rows from which an approximate index is worth it; below, comparing with every vector takes milliseconds."""
_KINDS = {
    "id": pa.string(),
    "path": pa.string(),
    "member": pa.string(),
    "size": pa.int64(),
    "mtime": pa.int64(),
    "sha256": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "thumbnail": pa.large_binary(),
    "tokens": pa.large_binary(),
    "positions": pa.binary(),
    "mean": pa.binary(),
    "words": pa.large_binary(),
    "dense": pa.string(),
    "bank": pa.float32(),
    "taken": pa.int64(),
    "excluded": pa.bool_(),
    "written": pa.string(),
    "sources": pa.string(),
    "sidecar": pa.int64(),
    "latitude": pa.float64(),
    "longitude": pa.float64(),
    "ocr": pa.string(),
}
"""Types of the columns but that of `vector`, which has the store's width."""


def schema(settings: StoreSettings) -> pa.Schema:
    """Columns of the table, the settings in its metadata."""
    # Rounded values use 7.4 of their 8 bits on average, codes of 4 bits 3.8: coding them takes 6 % off, without loss.
    coded = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "1"}
    packed = ("tokens", "words") if settings.layout.precision.startswith("int") else ()
    kinds = {**_KINDS, "vector": pa.list_(pa.float16(), settings.layout.vector_width)}
    fields = [
        pa.field(name, kinds[name], metadata=coded if name in packed else None) for name in column_names(settings)
    ]
    return pa.schema(fields, metadata={"seps": settings.to_json().encode()})


def to_table(rows: Sequence[Row], settings: StoreSettings) -> pa.Table:
    """Rows as one Arrow table."""
    kinds = schema(settings)
    columns = []
    for column in kinds:
        values = [getattr(row, column.name) for row in rows]
        if column.name == "vector":
            flat = np.stack([np.asarray(value, np.float16) for value in values]).ravel()
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(flat), column.type.list_size))
        else:
            columns.append(pa.array(values, column.type))
    return pa.Table.from_arrays(columns, schema=kinds)


class ArrowColumns(Columns):
    """Columns as Arrow has them."""

    def __init__(self, arrow: pa.Table | pa.RecordBatch) -> None:
        self._arrow = arrow

    def __len__(self) -> int:
        return int(self._arrow.num_rows)

    def part(self, start: int, count: int) -> Columns:
        """See `Columns`."""
        return ArrowColumns(self._arrow.slice(start, count))

    def chosen(self, wanted: Sequence[bool]) -> Columns:
        """See `Columns`."""
        return ArrowColumns(self._arrow.filter(pa.array(wanted)))

    def only(self, names: Sequence[str]) -> Columns:
        """See `Columns`."""
        return ArrowColumns(self._arrow.select(list(names)))

    def values(self, name: str) -> list[Any]:
        """See `Columns`."""
        found: list[Any] = self._arrow.column(name).to_pylist()
        return found

    def rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """See `Columns`."""
        found: list[dict[str, Any]] = (self._arrow if names is None else self._arrow.select(list(names))).to_pylist()
        return found

    def _whole(self, name: str) -> pa.Array:
        column = self._arrow.column(name)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def vectors(self, name: str = "vector") -> Array:
        """See `Columns`."""
        column = self._whole(name)
        found: Array = np.array(column.flatten(), np.float32).reshape(len(column), column.type.list_size)
        return found

    def blobs(self, name: str) -> Array | list[bytes]:
        """See `Columns`; without a copy."""
        column = self._whole(name)
        count = len(column)
        offsets = np.frombuffer(column.buffers()[1], "<i8", count + 1, 8 * column.offset)
        size = int(offsets[1] - offsets[0]) if count else 0
        if not size or column.null_count or (np.diff(offsets) != size).any():
            return self.values(name)
        return np.frombuffer(column.buffers()[2], np.uint8, count * size, int(offsets[0])).reshape(count, size)


def open_dataset(location: str) -> Any:
    """The dataset of a store at its newest commit."""
    return _lance().dataset(_place(location))


class LanceTable:
    """See `seps.photos.store.tables.Table`."""

    def __init__(self, location: str, dataset: Any, counted: dict[tuple[Any, ...], int] | None = None) -> None:
        self.location, self.dataset = location, dataset
        self._counted: dict[tuple[Any, ...], int] = {} if counted is None else counted
        """Images with words, by part of the table: all take longer to count than a search at a million."""

    @classmethod
    def open(cls, location: str) -> LanceTable:
        """The table of a store at its newest commit."""
        return cls(location, open_dataset(location))

    @classmethod
    def create(cls, location: str, settings: StoreSettings) -> LanceTable:
        """An empty table. Raises what Lance raises where there is one."""
        made = _lance().write_dataset(schema(settings).empty_table(), _place(location), mode="create")
        return cls(location, made)

    @property
    def newest(self) -> Any:
        """The dataset at its newest commit, for writing."""
        return open_dataset(self.location)

    def again(self) -> LanceTable:
        """See `Table`."""
        dataset = self.dataset.checkout_version(self.dataset.latest_version)
        return LanceTable(self.location, dataset, self._counted)

    @property
    def version(self) -> int:
        """See `Table`."""
        return int(self.dataset.version)

    @property
    def settings(self) -> str:
        """See `Table`."""
        return str((self.dataset.schema.metadata or {})[b"seps"].decode("utf-8", "replace"))

    def count(self, where: str | None = None) -> int:
        """See `Table`."""
        return int(self.dataset.count_rows(where))

    def read(self, columns: Sequence[str], where: str | None, limit: int | None = None) -> Columns:
        """See `Table`."""
        return ArrowColumns(self.dataset.to_table(columns=list(columns), filter=where, limit=limit))

    def batches(self, columns: Sequence[str], where: str | None, size: int) -> Iterator[Columns]:
        """See `Table`."""
        found = iter(self.dataset.to_batches(columns=list(columns), filter=where, batch_size=size))
        return map(ArrowColumns, found)

    def nearest(
        self, query: Array, count: int, columns: Sequence[str], where: str | None, estimate: CandidateEstimate | None
    ) -> Columns:
        """See `Table`."""
        return ArrowColumns(vector_index.nearest(self.dataset, query, count, columns, where, estimate))

    def containing(self, word: str, limit: int) -> set[str]:
        """See `Table`; words of an indexed column are looked up, others are read."""
        indexed = [column for column in WORD_COLUMNS if not is_unspaced(word) and self.indexed(column)]
        unread = [column for column in WORD_COLUMNS if column not in indexed]
        asked: list[dict[str, Any]] = []
        if unread:
            asked.append({"columns": ["id"], "filter": word_condition(word, unread)})
        if indexed:
            from lance.query import MatchQuery

            asked += [{"columns": ["id", "_score"], "full_text_query": MatchQuery(word, each)} for each in indexed]
        found: set[str] = set()
        for how in asked:
            found |= set(self.dataset.to_table(limit=limit, **how).column("id").to_pylist())
        return found

    def described(self) -> int:
        """See `Table`."""
        before, found = self._counted, {}
        for part in self.dataset.get_fragments():
            state = (part.fragment_id, part.num_deletions, *(file.path for file in part.data_files()))
            found[state] = before[state] if state in before else part.count_rows(DESCRIBED)
        self._counted = found
        return sum(found.values())

    def indexed(self, column: str) -> bool:
        """See `Table`."""
        return any(column in index.field_names for index in self.dataset.describe_indices())

    def disk_bytes(self) -> int:
        """See `Table`."""
        return sum(file.file_size_bytes or 0 for part in self.newest.get_fragments() for file in part.data_files())

    def put(self, rows: Sequence[Row], settings: StoreSettings) -> None:
        """See `Table`."""
        # With the index of ids Lance reads whole rows of every part that it does not cover yet; without, ids alone.
        merge = self.newest.merge_insert("id").use_index(False)
        merge.when_matched_update_all().when_not_matched_insert_all().execute(to_table(rows, settings))

    def set_column(self, name: str, by_id: Mapping[str, Any]) -> None:
        """See `Table`."""
        # With an index of ids Lance writes this column alone; without, it reads all and copies whole rows.
        if LanceTable(self.location, self.newest).indexed("id"):
            upkeep.extend(self.newest, few=True)
        else:
            self._index_ids()
        values = {"id": pa.array(list(by_id)), name: pa.array(list(by_id.values()), _KINDS[name])}
        self.newest.merge_insert("id").when_matched_update_all().execute(pa.table(values))

    def clear_levels(self) -> None:
        """See `Table`."""
        if "bank" in self.newest.schema.names:
            self.newest.update({"bank": "NULL"})
        else:
            self.newest.add_columns(pa.field("bank", pa.float32()))

    def delete(self, where: str) -> None:
        """See `Table`."""
        self.newest.delete(where)

    def write_settings(self, text: str) -> None:
        """See `Table`."""
        self.newest.update_schema_metadata({"seps": text})

    def tidy(self, *, always: bool) -> None:
        """See `Table`: join small parts, index a large table, bring new rows into its indexes, drop old versions."""
        joined = upkeep.join(self.newest, always=always)
        made = self.newest.count_rows() >= INDEX_ABOVE and self._index()
        extended = upkeep.extend(self.newest, few=always or joined)
        newest = self.newest
        if always or joined or made or extended or len(newest.versions()) > upkeep.VERSIONS:
            # Readers open the newest version again when theirs is gone.
            newest.cleanup_old_versions(timedelta(0), delete_unverified=True)

    def _index(self) -> bool:
        """Index vectors, words of texts and ids where they are not; whether anything was done."""
        now = LanceTable(self.location, self.newest)
        missing = [column for column in ("vector", *WORD_COLUMNS, "id") if not now.indexed(column)]
        anew = "vector" in missing or vector_index.is_outdated(now.dataset)
        if anew:
            vector_index.build(self.newest, now.count())
        for column in WORD_COLUMNS:
            if column in missing:
                self._index_words(column)
        if "id" in missing:  # every thumbnail of the page is read by its id
            self._index_ids()
        return bool(missing) or anew

    def _index_ids(self) -> None:
        self.newest.create_scalar_index("id", "BTREE", name="id_idx")

    def _index_words(self, column: str) -> None:
        """Index the words of texts as they are written: no stemming, no words left out."""
        options = {"with_position": False, "stem": False, "remove_stop_words": False, "ascii_folding": False}
        self.newest.create_scalar_index(column, "INVERTED", name=f"{column}_idx", max_token_length=None, **options)


def _place(location: str) -> str:
    # By its whole path, since a name may hold a colon.
    place = location.rstrip("/") if is_remote(location) else os.path.abspath(location)
    return f"{place}/{TABLE}.lance"


def _lance() -> Any:
    os.environ.setdefault("LANCE_LOG", "error")
    return importlib.import_module("lance")
