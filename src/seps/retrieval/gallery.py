"""What a folder of pictures holds: files, members of tar shards, and the descriptions written for them.

Nothing outside the folder is read: links are followed only where they lead to a file inside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from seps.retrieval.data import DataError, ImageSource, shard_members
from seps.retrieval.data.lines import json_lines
from seps.retrieval.store_rows import row_id

SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .webp .gif .bmp .tif .tiff .ppm .pgm .pbm .jp2 .j2k .avif".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Found:
    """One image in the folder."""

    path: str
    """Relative to the folder, with forward slashes."""
    member: str | None
    size: int
    """Bytes of the file: for a member, of its shard, which tells when the shard was written anew."""
    mtime: int

    @property
    def id(self) -> str:
        """As in the store."""
        return row_id(self.path, self.member)

    def source(self, root: Path) -> ImageSource:
        """Where its bytes are."""
        return ImageSource(root / self.path, self.member)

    def __str__(self) -> str:
        return self.path if self.member is None else f"{self.path}:{self.member}"


@dataclass(frozen=True)
class Problem:
    """Something that could not be indexed."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass
class Gallery:
    """All images of a folder in a fixed order, and what was left out."""

    root: Path
    images: list[Found] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def walk(folder: str | os.PathLike[str]) -> Gallery:
    """Find the images of `folder`: files by their suffix, and the image members of its tar shards.

    Raises DataError where there is no such folder.
    """
    root = Path(os.path.realpath(folder))
    if not root.is_dir():
        raise DataError(f"There is no folder {folder}. Name the folder that holds the pictures.")
    gallery = Gallery(root)

    def unreadable(error: OSError) -> None:
        name = os.path.relpath(error.filename or root, root)
        gallery.problems.append(Problem(_shown(name), f"the folder cannot be read ({error.strerror})"))

    for parent, folders, files in os.walk(root, onerror=unreadable):
        for name in list(folders):
            if os.path.islink(os.path.join(parent, name)):
                place = os.path.relpath(os.path.join(parent, name), root)
                gallery.problems.append(Problem(_shown(place), "a link to a folder; such links are not followed"))
        folders[:] = sorted(name for name in folders if not name.endswith(".lance"))
        for name in sorted(files):
            if _suffix(name) in SUFFIXES or _suffix(name) == ".tar":
                _add(gallery, Path(parent, name))
    return gallery


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _add(gallery: Gallery, file: Path) -> None:
    relative = file.relative_to(gallery.root).as_posix()
    try:
        relative.encode("utf-8")
    except UnicodeEncodeError:
        gallery.problems.append(Problem(_shown(relative), "its name is not UTF-8 text; rename it"))
        return
    if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(gallery.root):
        gallery.problems.append(Problem(relative, "a link that leads out of the folder; it is not followed"))
        return
    try:
        status = file.stat()
        if _suffix(file.name) == ".tar":
            gallery.images.extend(
                Found(relative, name, status.st_size, status.st_mtime_ns)
                for name in shard_members(file)
                if _suffix(name) in SUFFIXES
            )
        else:
            gallery.images.append(Found(relative, None, status.st_size, status.st_mtime_ns))
    except (OSError, DataError) as error:
        gallery.problems.append(Problem(relative, getattr(error, "strerror", None) or str(error)))


class Descriptions:
    """Texts by image: from a file of `seps caption`, and from JSONL data files in the folder itself."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], str] = {}
        self._places: dict[str, tuple[str, str]] = {}

    def read(self, file: Path, *, strict: bool) -> None:
        """Take over the texts of a JSONL file; later files count. Raises DataError for a malformed line if `strict`."""
        try:
            for _, value in json_lines(file):
                image, shard = value.get("image", value.get("id")), value.get("shard") or ""
                text = value.get("dense", value.get("text"))
                if isinstance(image, int):
                    image = str(image)
                if not isinstance(image, str) or not isinstance(shard, str):
                    continue
                place = self._places.get(image) or (shard, image.removeprefix("./"))
                if value.get("id") is not None and "image" in value:
                    self._places[str(value["id"])] = place
                if isinstance(text, str) and text.strip():
                    self._texts[place] = text.strip()
        except DataError:
            if strict:
                raise

    def of(self, image: Found) -> str | None:
        """The description of an image, or None."""
        if image.member is None:
            return self._texts.get(("", image.path))
        return self._texts.get((image.path, image.member)) or self._texts.get(("", image.member))


def read_descriptions(root: Path, extra: Iterable[str | os.PathLike[str]] = ()) -> Descriptions:
    """Descriptions from `root`'s own JSONL files, then from the files named, which must be well formed."""
    texts = Descriptions()
    for file in sorted(root.glob("*.jsonl")):
        texts.read(file, strict=False)
    for named in extra:
        texts.read(Path(named), strict=True)
    return texts
