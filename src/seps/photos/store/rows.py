"""What the store keeps per image, and the settings of a whole store."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sqlite3
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seps.images.formats import is_video
from seps.images.sources import ImageSource
from seps.images.sources import row_id as row_id
from seps.parsing import is_number, parse_json
from seps.retrieval.engine.engine import Digests
from seps.retrieval.engine.layout import PACKED, Layout, layout_values, read_layout
from seps.retrieval.languages import is_unspaced

FORMAT = 9
"""Of the columns and settings. A store of any other format is refused: its pictures are indexed again."""
TABLE = "images"
WORD_COLUMNS = ("dense", "ocr")
"""Where words of queries are looked up: descriptions, and text in pictures."""
DESCRIBED = "dense IS NOT NULL OR ocr <> ''"
"""Of rows with words, in SQL."""
OTHER_WORDS = (
    "The descriptions in the store {} were encoded by the embedded model of another release of seps. Use that release, "
    "or index the folder into another store."
)


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
    """Name, hub id or folder of the model."""
    model_hash: str
    """Digest of what makes a picture's state."""
    layout: Layout
    """How one picture is kept."""
    words_hash: str = ""
    """Digest of the model that encodes descriptions, where that is another one."""
    text_hash: str = ""
    """Digest of the text side that the levels and the calibration were made with; of a dual encoder it is empty."""
    format: int = FORMAT
    """Of the columns and settings."""
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
    metadata: bool = True
    """Whether titles, captions, keywords, persons and places of the files become descriptions."""
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
        """The file of a row's path, absolute. It is not checked to lie in its folder (`source`)."""
        return Path(self.root) / path

    def source(self, row: Mapping[str, Any]) -> ImageSource:
        """Where the original of a row with `path` and `member` is. Raises StoreError for a path out of the folder."""
        root = Path(os.path.realpath(self.root_of(str(row["path"]))))
        path = Path(os.path.realpath(root / str(row["path"])))
        if not path.is_relative_to(root):
            raise StoreError(f"The path {row['path']!r} leads out of the indexed folder; it is not read.")
        return ImageSource(path, row["member"])

    def stored_folder(self, folder: str) -> str:
        """A folder as the rows' paths begin with it: one of the first root may be given absolutely, too."""
        if not os.path.isabs(folder) or not Path(folder).is_relative_to(self.root):
            return folder
        return Path(folder).relative_to(self.root).as_posix()

    @property
    def digests(self) -> Digests:
        """Of the engine that the store is of."""
        return Digests(self.model_hash, self.words_hash, self.text_hash)

    @property
    def calibration_tag(self) -> str | None:
        """How the calibration was made; None without one."""
        return self.calibrated if self.calibration else None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "layout": layout_values(self.layout)})

    @classmethod
    def from_json(cls, text: str, where: str) -> StoreSettings:
        """Read `to_json`'s line. Raises StoreError for damaged settings and for those of a newer release."""
        try:
            values = parse_json(text, finite=True)
            if int(values["format"]) == FORMAT:
                values |= {name: tuple(values.get(name, ())) for name in ("more_roots", "removed_roots")}
                values["unreadable"] = {name: tuple(facts) for name, facts in values.get("unreadable", {}).items()}
                settings = cls(**{**values, "layout": read_layout(values["layout"])})
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
        texts = (self.root, self.model, self.model_hash, self.text_hash, self.bank, *self.more_roots)
        if not all(isinstance(value, str) for value in (*texts, *self.removed_roots)):
            raise ValueError("root, model, digests and bank must be texts")
        if not all(map(is_number, self.calibration.values())):
            raise ValueError("the calibration must be numbers")


@dataclass(frozen=True)
class Row:
    """One image of the store; the names are those of the columns. Those of `PACKED` are its packed state."""

    id: str
    """20 hex digits of the hash of path and member."""
    path: str
    """Of the file, relative to the first folder, with forward slashes; of other folders absolute."""
    member: str | None
    """Member of the tar shard `path`."""
    size: int
    """Bytes of the file."""
    mtime: int
    """When the file was changed, in nanoseconds since 1970."""
    sha256: str
    """Of the bytes of the file."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    thumbnail: bytes
    """A JPEG."""
    vector: Any
    """(C,) float16: the vector of the candidate search."""
    tokens: bytes
    """(P + N or M, C) prefix tokens and patches; empty where a picture has one vector."""
    positions: bytes | None
    """(M,) uint16: which patches the tokens are; None: all, or a grid of means, in order."""
    mean: bytes | None
    """(1, C) the mean of all patches, where some were left out or the tokens are means."""
    words: bytes | None
    """(L, C) words of the description."""
    dense: str | None
    """The description: what was written for it, and its metadata."""
    bank: float | None = None
    """Level of the image over the bank of background queries; None: not computed yet."""
    taken: int | None = None
    """Nanoseconds since 1970 by EXIF; None: the file does not say."""
    excluded: bool | None = False
    """Hidden from search, still stored: a pattern excludes it, or its folder was removed from the store."""
    written: str | None = None
    """The part of the description that a line of a JSONL file gave."""
    sources: str | None = None
    """Where the description is from, separated by commas: "jsonl, xmp title, iptc keywords"."""
    sidecar: int | None = None
    """State of the sidecar whose metadata was read, 0 without one; None: no metadata was read."""
    latitude: float | None = None
    longitude: float | None = None
    """Degrees, where the file says where the photo was taken."""
    ocr: str | None = None
    """Text in the picture, a line per line, empty where there is none; None: not looked for."""


_ORDER = (
    *("id", "path", "member", "size", "mtime", "sha256", "width", "height", "thumbnail", "vector", *PACKED, "dense"),
    *("bank", "taken", "excluded", "written", "sources", "sidecar", "latitude", "longitude", "ocr"),
)
"""Columns of a table."""


def column_names(settings: StoreSettings) -> list[str]:
    """The columns of the table, in their order."""
    return [name for name in _ORDER if name != "bank" or settings.bank]


def word_condition(word: str, columns: Sequence[str] = WORD_COLUMNS) -> str:
    """A condition in SQL: the word, of letters and digits alone, is in a text."""
    pattern = "|".join(dict.fromkeys(unicodedata.normalize(form, word) for form in ("NFC", "NFD")))
    edge = "" if is_unspaced(word) else r"\b"
    return " OR ".join(f"regexp_like({each}, '{edge}({pattern}){edge}', 'i')" for each in columns)


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
    excluded: bool | None = False
    written: str | None = None
    sidecar: int | None = None
    ocr: str | None = None
    """As in `Row`."""


def shown_place(path: str, member: str | None) -> str:
    """The name of a picture: "a.jpg", of a shard's member "a.tar:b.jpg", of a video's frame "c.mp4 @ 00:01:20"."""
    if member is None:
        return path
    return f"{path} @ {member}" if is_video(path) else f"{path}:{member}"


ERRORS = (ValueError, RuntimeError, OSError, sqlite3.Error)
"""What Lance and SQLite raise."""


def fixed_settings(settings: StoreSettings) -> StoreSettings:
    """What must stay the same while a store is open; its folders, levels, exclusions and calibration may change."""
    return replace(
        settings,
        root="",
        text_hash="",
        bank="",
        calibration={},
        calibrated="",
        more_roots=(),
        removed_roots=(),
        excluded=0,
        unreadable={},
    )


def newest_settings(table: Any, known: StoreSettings, where: str) -> StoreSettings:
    """What a table says of itself now, where it is still of the same model and state as `known` says; else `known`."""
    try:
        found = StoreSettings.from_json(table.settings, where)
    except (StoreError, KeyError, TypeError):
        return known
    return found if fixed_settings(found) == fixed_settings(known) else known


def is_remote(location: str) -> bool:
    """Whether the location is a URI (object storage) and not a folder."""
    return "://" in location


def first_line(error: Exception) -> str:
    """The first line of an error, without the place in a library's source."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.split(r", (?:/|rust/)\S+\.rs:", text)[0].rstrip(".")
