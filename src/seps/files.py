"""Files that appear whole or not at all, their digests, and JSON in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
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
    """What `write_text` calls a file while it is being written; a killed one stays behind."""
    return path.with_name(f".{path.name}.new")


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once: a reader, or a crash, sees the old one or the new one."""
    temporary = unfinished(path)
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
