"""Files that appear whole or not at all, their digests, bounded reading of them, JSON in them, and free names."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from seps.parsing import parse_object

MAX_SETTINGS_BYTES = 64 * 2**20
"""Of a file of settings, a model's configuration or its tokenizer's: each is read whole."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened to read. Raises OSError for a pipe, which would block for ever, a device or a folder."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], limit: int = MAX_SETTINGS_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError, also for one of more than `limit` bytes."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", os.fspath(path))
    return data


def sha256(path: Path) -> str:
    """The digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Let the system write a file, or the list of a folder's files, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unfinished(path: Path) -> Path:
    """What `replacing` calls a file while it is being written; a killed process leaves it behind."""
    return path.with_name(f".{path.name}.new")


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """While it lasts, an OSError that names no file (a full disk does not), or names `temporary`, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None or (temporary is not None and error.filename == str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A file to write, `temporary` (default: `unfinished`), which is put in the place of `path` once the context ends.

    Where it fails, what was at `path` stays, and an OSError names `path`.
    """
    temporary = temporary if temporary is not None else unfinished(path)
    try:
        with naming(path, temporary):
            yield temporary
            sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once: a reader, or a crash, sees the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def numbered(path: Path, mark: str = "-{}") -> Iterator[Path]:
    """The path, then the same with 2, 3, ... after its stem: `NAME.png`, `NAME-2.png`, `NAME-3.png`."""
    yield path
    for number in itertools.count(2):
        yield path.with_stem(path.stem + mark.format(number))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_text` of a JSON object."""
    write_text(path, json.dumps(value, indent=1))


def load_json(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """The JSON object in a regular file. Raises OSError, and ValueError for anything else in it.

    With `finite`, numbers like NaN and 1e999 are errors.
    """
    return parse_object(read_regular(path).decode("utf-8"), finite=finite)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file, in which figures may be NaN; empty where there is no such file or object."""
    try:
        return load_json(path, finite=False)
    except (OSError, ValueError):
        return {}
