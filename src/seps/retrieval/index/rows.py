"""What the store keeps of one image, and the settings of a whole store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from seps.retrieval.data import Mode
from seps.retrieval.data.gallery import row_id as row_id
from seps.retrieval.index.codec import Precision

FORMAT = 1
TABLE = "images"
STATE = ("tokens", "positions", "mean", "words")


class StoreError(ValueError):
    """A store that cannot be opened, read or written; the message says why and what to do."""


class NewerStoreError(StoreError):
    """A store that a newer release has written."""


class DamagedStoreError(StoreError):
    """A store whose settings cannot be read."""


@dataclass(frozen=True)
class StoreSettings:
    """What every image of a store has in common; kept with the table."""

    root: str
    """Folder that the paths are relative to."""
    model: str
    model_hash: str
    width: int
    """C of tokens, words and vectors."""
    grid: tuple[int, int]
    """Patches down and across."""
    num_prefix_tokens: int
    precision: Precision = "float16"
    keep_patches: int | None = None
    """Patches kept of each image; None: all."""
    keep_words: int | None = None
    """Words a description is merged to; None: all are kept."""
    pixels: Mode = "model"
    """How the pixels of its images were made; a store without this note was made by "resize"."""
    format: int = FORMAT

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, where: str) -> StoreSettings:
        """Read `to_json`'s line. Raises NewerStoreError for a newer release's, DamagedStoreError for anything else."""
        try:
            values = json.loads(text)
            if int(values.get("format", 0)) > FORMAT:
                raise NewerStoreError(
                    f"The store {where} was written by a newer release of seps (format {values['format']}; this one "
                    f"reads up to {FORMAT}). Update seps, or index the folder into another store."
                )
            known = {field.name for field in dataclasses.fields(cls)}
            values = {name: value for name, value in values.items() if name in known}
            rows, columns = map(int, values["grid"])
            settings = cls(**{"pixels": "resize", **values, "grid": (rows, columns)})
            settings._check()
        except NewerStoreError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedStoreError(
                f"The settings of the store {where} are damaged ({error}). Copy the store again from where it is "
                "whole, or index the folder into another store."
            ) from error
        return settings

    def _check(self) -> None:
        texts = (self.root, self.model, self.model_hash)
        numbers = (self.width, *self.grid, self.keep_patches or 1, self.keep_words or 1)
        if not all(isinstance(value, str) for value in texts):
            raise ValueError("root, model and model_hash must be texts")
        if not all(isinstance(value, int) and value > 0 for value in numbers) or self.num_prefix_tokens < 0:
            raise ValueError("width, grid and counts must be positive numbers")
        if self.precision not in get_args(Precision):
            raise ValueError(f"the precision is {self.precision!r}")


@dataclass(frozen=True)
class Row:
    """One image of the store. The fields of `STATE` are its image-only state, packed."""

    id: str
    path: str
    """Relative to the root, with forward slashes."""
    member: str | None
    """Member of the tar shard `path`."""
    size: int
    mtime: int
    """Nanoseconds."""
    sha256: str
    width: int
    height: int
    thumbnail: bytes
    vector: Any
    """(C,) float16."""
    tokens: bytes
    """(P + N or M, C) prefix tokens and patches."""
    positions: bytes | None
    """(M,) uint16: which patches the tokens are; None: all, in order."""
    mean: bytes | None
    """(1, C) the mean of all patches, where some were left out."""
    words: bytes | None
    """(L, C) words of the description."""
    dense: str | None
    """The description."""


def schema(settings: StoreSettings) -> pa.Schema:
    """Columns of the table, the settings in its metadata."""
    kinds = {
        "id": pa.string(),
        "path": pa.string(),
        "member": pa.string(),
        "size": pa.int64(),
        "mtime": pa.int64(),
        "sha256": pa.string(),
        "width": pa.int32(),
        "height": pa.int32(),
        "thumbnail": pa.large_binary(),
        "vector": pa.list_(pa.float16(), settings.width),
        "tokens": pa.large_binary(),
        "positions": pa.binary(),
        "mean": pa.binary(),
        "words": pa.large_binary(),
        "dense": pa.string(),
    }
    # Rounded values use 7.4 of their 8 bits on average: coding them takes 6 % off, without loss.
    coded = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "1"}
    packed = ("tokens", "words") if settings.precision == "int8" else ()
    fields = [pa.field(name, kind, metadata=coded if name in packed else None) for name, kind in kinds.items()]
    return pa.schema(fields, metadata={"seps": settings.to_json().encode()})


def to_table(rows: Sequence[Row], settings: StoreSettings) -> pa.Table:
    """Rows as one Arrow table."""
    kinds = schema(settings)
    columns = []
    for field in kinds:
        values = [getattr(row, field.name) for row in rows]
        if field.name == "vector":
            flat = np.stack([np.asarray(value, np.float16) for value in values]).ravel()
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float16()), settings.width))
        else:
            columns.append(pa.array(values, field.type))
    return pa.Table.from_arrays(columns, schema=kinds)


def from_table(table: pa.Table) -> list[Row]:
    """Rows of an Arrow table that holds every column."""
    names = [field.name for field in dataclasses.fields(Row)]
    return [Row(**{name: value[name] for name in names}) for value in table.select(names).to_pylist()]
