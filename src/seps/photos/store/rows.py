"""What the store keeps per image, the settings of a whole store, and their form as Arrow tables."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from seps.images.sources import row_id as row_id
from seps.parsing import parse_json
from seps.retrieval.engine.codec import Array, Precision

FORMAT = 7
"""Of the columns and settings. A store of any other format is refused: its pictures are indexed again."""
TABLE = "images"
STATE = ("tokens", "positions", "mean", "words")
StoreKind = Literal["patches", "vectors"]


class StoreError(ValueError):
    """A store that cannot be opened, read or written; the message says why and what to do."""


class OtherModelError(StoreError):
    """A store that was made with other weights."""


class OutdatedStoreError(StoreError):
    """A store of another format, or whose scores were made in another way: its folders are indexed again."""


class MissingStoreError(StoreError):
    """There is no store, or nothing in its place that can be read as one."""


@dataclass(frozen=True)
class StoreSettings:
    """What all images of a store have in common; kept with the table."""

    root: str
    """Folder that the paths are relative to."""
    model: str
    model_hash: str
    """Digest of what makes a picture's state."""
    width: int
    """C of tokens, words and vectors."""
    grid: tuple[int, int]
    """Patches, or means of patches, down and across."""
    num_prefix_tokens: int
    precision: Precision = "float16"
    keep_patches: int | None = None
    """Patches kept per image; None: all."""
    keep_words: int | None = None
    """Words kept per description, merged; None: all."""
    means: bool = False
    """The tokens are means of the patches in each cell of `grid`, which is coarser than the model's."""
    format: int = FORMAT
    guides: Mapping[str, int] = field(default_factory=dict)
    """By name of a guide that comes with the images: the number of its values. Without any there is no such column."""
    kind: StoreKind = "patches"
    """"vectors": of a dual encoder, one vector per image and no tokens; its pixels are made by its own processor."""
    words_width: int | None = None
    """C of description words where another model than the pictures' encodes them."""
    words_hash: str = ""
    """Digest of that model."""
    text_hash: str = ""
    """Digest of the text side that the levels and the calibration were made with; of a dual encoder it is empty."""
    bank: str = ""
    """Tag of the background queries that the images' levels are made with; without any there is no such column."""
    calibration: Mapping[str, float] = field(default_factory=dict)
    """What scores are worth in this gallery: see `seps.retrieval.ranking.confidence.Calibration`. Empty: not known."""
    calibrated: str = ""
    """Tag of how that was made (`seps.retrieval.ranking.bank.calibration_name`)."""
    more_roots: tuple[str, ...] = ()
    """Further folders. The paths of their pictures are absolute, and begin with the folder."""
    removed_roots: tuple[str, ...] = ()
    """Those of the folders that were removed. Their rows are kept, excluded, until they are pruned."""
    excluded: int = 0
    """Rows that are excluded."""
    unreadable: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of files that could not be read, by id: to know that nothing is new, without reading them again."""

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders of the store that were not removed."""
        return tuple(root for root in (self.root, *self.more_roots) if root not in self.removed_roots)

    def base_of(self, path: str) -> str:
        """What stands before a row's path in its folder: "" in the first folder, else the folder."""
        if not os.path.isabs(path):
            return ""
        return max((root for root in self.more_roots if path.startswith(f"{root}/")), key=len, default="")

    def root_of(self, path: str) -> str:
        """The folder of a row's path."""
        return self.base_of(path) or self.root

    def file(self, path: str) -> Path:
        """The file of a row's path, absolute. It is not checked to lie in its folder (`Searcher.image_source`)."""
        return Path(self.root) / path

    def stored_folder(self, folder: str) -> str:
        """A folder as the rows' paths begin with it: one of the first root may be given absolutely, too."""
        if not os.path.isabs(folder) or not Path(folder).is_relative_to(self.root):
            return folder
        return Path(folder).relative_to(self.root).as_posix()

    @property
    def state(self) -> tuple[str, ...]:
        """The columns from which an image's state is restored."""
        return (*STATE, "guides") if self.guides else STATE

    @property
    def appearance(self) -> tuple[str, ...]:
        """The columns from which a vector of an image's pixels alone is made (`codec.appearance`)."""
        if self.kind == "vectors":
            return ("vector",)
        return ("mean",) if self.keep_patches is not None or self.means else ("tokens",)

    @property
    def patches(self) -> int:
        """Patches, or means of them, that are kept per image."""
        return self.keep_patches or self.grid[0] * self.grid[1]

    @property
    def kept(self) -> str:
        """What is kept per image, in words."""
        patches = "one vector" if self.kind == "vectors" else f"{self.keep_patches or 'all'} patches"
        if self.means:
            patches = f"{self.grid[0]} x {self.grid[1]} means of patches"
        return f"{patches} and {self.keep_words or 'all'} words of a description as {self.precision}"

    @property
    def vector_type(self) -> pa.DataType:
        """Of the column `vector`."""
        return pa.list_(pa.float16(), self.vector_width)

    @property
    def vector_width(self) -> int:
        """Values of a search vector: that of the picture, and where descriptions have their own width theirs and 1."""
        return self.width if self.words_width is None else self.width + self.words_width + 1

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, where: str) -> StoreSettings:
        """Read `to_json`'s line. Raises StoreError for damaged settings and for those of a newer release."""
        try:
            values = parse_json(text, finite=True)
            if int(values["format"]) == FORMAT:
                rows, columns = map(int, values["grid"])
                values |= {name: tuple(values.get(name, ())) for name in ("more_roots", "removed_roots")}
                values["unreadable"] = {name: tuple(facts) for name, facts in values.get("unreadable", {}).items()}
                settings = cls(**{**values, "grid": (rows, columns)})
                settings._check()
                return settings
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"The settings of the store {where} are damaged ({error}). Copy the store again from where it is "
                "whole, or index the folder into another store."
            ) from error
        raise OutdatedStoreError(
            f"The store {where} was written by another version of seps (format {values['format']}; this one reads "
            f"{FORMAT}), which keeps and scores pictures in another way. Delete it, or name another place, and index "
            f"again: seps index {shlex.quote(str(values.get('root', 'FOLDER')))} --store {shlex.quote(where)}"
        )

    def _check(self) -> None:
        texts = (self.root, self.model, self.model_hash, self.text_hash, *self.more_roots, *self.removed_roots)
        numbers = (self.width, *self.grid, self.keep_patches or 1, self.keep_words or 1, self.words_width or 1)
        if not all(isinstance(value, str) for value in texts):
            raise ValueError("root, model and digests must be texts")
        if not all(isinstance(value, int) and value > 0 for value in numbers) or self.num_prefix_tokens < 0:
            raise ValueError("width, grid and counts must be positive numbers")
        if self.precision not in get_args(Precision):
            raise ValueError(f"the precision is {self.precision!r}")
        if not isinstance(self.means, bool) or (self.means and self.keep_patches is not None):
            raise ValueError(f"means is {self.means!r} beside keep_patches {self.keep_patches!r}")
        if not all(isinstance(width, int) and width > 0 for width in self.guides.values()):
            raise ValueError("the widths of the guides must be positive numbers")
        if self.kind not in get_args(StoreKind):
            raise ValueError(f"the kind is {self.kind!r}")
        if not isinstance(self.bank, str) or not all(isinstance(value, float) for value in self.calibration.values()):
            raise ValueError("the bank must be a text and its calibration numbers")


@dataclass(frozen=True)
class Row:
    """One image of the store; the names are those of the columns. Those of `STATE` are its packed state."""

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
    """(C,) float16; of the kind "vectors" it is the whole state of the picture."""
    tokens: bytes
    """(P + N or M, C) prefix tokens and patches; empty in a store of the kind "vectors"."""
    positions: bytes | None
    """(M,) uint16: which patches the tokens are; None: all, or a grid of means, in order."""
    mean: bytes | None
    """(1, C) the mean of all patches, where some were left out or the tokens are means."""
    words: bytes | None
    """(L, C) words of the description."""
    dense: str | None
    """The description."""
    guides: bytes | None = None
    """Float32 values of all guides, one after the other in the settings' order; None: no guide came with it."""
    bank: float | None = None
    """Level of the image over the bank of background queries; None: not computed yet."""
    taken: int | None = None
    """Nanoseconds since 1970 by EXIF; None: the file does not say."""
    excluded: bool | None = False
    """Kept and never found: a pattern leaves it out, or its folder was removed from the store."""


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
        "vector": settings.vector_type,
        "tokens": pa.large_binary(),
        "positions": pa.binary(),
        "mean": pa.binary(),
        "words": pa.large_binary(),
        "dense": pa.string(),
        **({"guides": pa.binary()} if settings.guides else {}),
        **({"bank": pa.float32()} if settings.bank else {}),
        "taken": pa.int64(),
        "excluded": pa.bool_(),
    }
    # Rounded values use 7.4 of their 8 bits on average, codes of 4 bits 3.8: coding them takes 6 % off, without loss.
    coded = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "1"}
    packed = ("tokens", "words") if settings.precision.startswith("int") else ()
    fields = [pa.field(name, kind, metadata=coded if name in packed else None) for name, kind in kinds.items()]
    return pa.schema(fields, metadata={"seps": settings.to_json().encode()})


def to_table(rows: Sequence[Row], settings: StoreSettings) -> pa.Table:
    """Rows as one Arrow table."""
    kinds = schema(settings)
    columns = []
    for column in kinds:
        values = [getattr(row, column.name) for row in rows]
        if column.name == "vector":
            number = column.type.value_type.to_pandas_dtype()
            flat = np.stack([np.asarray(value, number) for value in values]).ravel()
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(flat), column.type.list_size))
        else:
            columns.append(pa.array(values, column.type))
    return pa.Table.from_arrays(columns, schema=kinds)


class Columns:
    """Some columns of some images, as they were read; `len` is the number of images."""

    def __init__(self, arrow: pa.Table | pa.RecordBatch) -> None:
        self._arrow = arrow

    def __len__(self) -> int:
        return int(self._arrow.num_rows)

    def part(self, start: int, count: int) -> Columns:
        """At most `count` of the images."""
        return Columns(self._arrow.slice(start, count))

    def values(self, name: str) -> list[Any]:
        """One column as plain values."""
        found: list[Any] = self._arrow.column(name).to_pylist()
        return found

    def rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Per image its columns (those of `names`) by name."""
        found: list[dict[str, Any]] = (self._arrow if names is None else self._arrow.select(list(names))).to_pylist()
        return found

    def vectors(self, name: str = "vector") -> Array:
        """(B, C) float32: a column of vectors."""
        column = self._arrow.column(name)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        found: Array = np.array(column.flatten(), np.float32).reshape(len(column), column.type.list_size)
        return found

    def blobs(self, name: str) -> Array | list[bytes]:
        """A column of bytes: (B, size) uint8 without a copy where all have one size, else a list."""
        column = self._arrow.column(name)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        count = len(column)
        offsets = np.frombuffer(column.buffers()[1], "<i8", count + 1, 8 * column.offset)
        size = int(offsets[1] - offsets[0]) if count else 0
        if not size or column.null_count or (np.diff(offsets) != size).any():
            return self.values(name)
        return np.frombuffer(column.buffers()[2], np.uint8, count * size, int(offsets[0])).reshape(count, size)


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """What the store knows of an image's file: whether it has changed since, and its description."""

    id: str
    path: str
    member: str | None
    size: int
    mtime: int
    sha256: str
    description: str | None
    guides: bytes | None = None
    excluded: bool | None = False


def told_widths(guides: Mapping[str, int]) -> str:
    """Names and widths, for messages."""
    return ", ".join(f"{name} ({width})" for name, width in guides.items()) or "none"
