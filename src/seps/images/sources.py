"""Where the bytes of a picture are, and what is raised where they are wrong."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


class DataError(ValueError):
    """Something in the user's data is wrong; the message says what, where, and what to do."""


@dataclass(frozen=True, order=True)
class ImageSource:
    """Where the bytes of one image are: a file, or a member of an uncompressed tar shard."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.member} in {self.path}"


def row_id(path: str, member: str | None) -> str:
    """Id of an image in a store: 20 hex digits of the hash of its path and, inside a tar shard, its member name.

    The same place has the same id in every run and on every machine.
    """
    return hashlib.sha256(f"{path}\0{member or ''}".encode()).hexdigest()[:20]
