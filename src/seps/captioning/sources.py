"""What to describe: the images of a folder, of tar shards, or of a JSONL data set, each with its id."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seps.retrieval.data import DataError, ImageSource, load_jsonl, shard_members

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"}
    | {".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".jp2", ".j2k", ".avif"}
)


@dataclass(frozen=True)
class Item:
    """One image to describe. `known`, `aside`: content hashes that were described, or set aside, before."""

    id: str
    source: ImageSource
    known: str = ""
    aside: str = ""


def content_hash(data: bytes) -> str:
    """The SHA-256 of an image's encoded bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def list_images(path: str | os.PathLike[str], images_root: str | os.PathLike[str] | None = None) -> list[Item]:
    """The images under `path`, in a fixed order.

    A folder is walked; an image's id is its path in the folder, and the images of a .tar in it are its members'
    names. A .tar is such a shard alone. Another file is a JSONL data set, with `images_root` for its paths.
    Raises DataError where there is none, or where two have the same id.
    """
    path = Path(path)
    if path.is_dir():
        items = list(_folder(path))
    elif path.suffix.lower() == ".tar":
        items = list(_shard(path))
    elif path.suffix.lower() in EXTENSIONS:
        raise DataError(f"{path} is one image. Give the folder that holds it, a .tar or a JSONL file.")
    else:
        records = load_jsonl(path, images_root=images_root).records
        items = [Item(record.id, record.source) for record in records]
    if not items:
        raise DataError(f"{path} holds no images ({', '.join(sorted(EXTENSIONS))}). Check the path.")
    return _checked(items)


def _folder(folder: Path) -> Iterator[Item]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(parent, name)
            if name.startswith(".") or not file.is_file():
                continue
            if file.suffix.lower() == ".tar":
                yield from _shard(file)
            elif file.suffix.lower() in EXTENSIONS:
                yield Item(file.relative_to(folder).as_posix(), ImageSource(file))


def _shard(path: Path) -> Iterator[Item]:
    for member in shard_members(path):
        if os.path.splitext(member)[1].lower() in EXTENSIONS:
            yield Item(member, ImageSource(path, member))


def _checked(items: list[Item]) -> list[Item]:
    seen: dict[str, Item] = {}
    for item in items:
        try:
            item.id.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"The name {item.id!r} is not UTF-8 text, so no line can name it. Rename it.") from error
        other = seen.setdefault(item.id, item)
        if other is not item:
            raise DataError(
                f"Two images have the id {item.id!r}: {other.source} and {item.source}. A description is bound "
                "to an image by its id. Rename one, or describe them in two runs."
            )
    return items
