"""Files that appear whole or not at all, their digests, JSON in them, and names that are free."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when the file is not there or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
