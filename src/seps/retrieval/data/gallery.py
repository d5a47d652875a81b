"""What a folder of pictures holds: files, members of tar shards, and frames of videos.

Nothing outside the folder is read: links are followed only where they lead to a file inside it. What was not read to
its end is remembered: a picture that was not seen there is not known to be gone.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from seps.retrieval.data import DataError, ImageSource, shard_is_whole, shard_members
from seps.retrieval.data.readers import PLAIN, installed, is_video, reader_of
from seps.retrieval.data.readers import suffix_of as _suffix
from seps.retrieval.data.shards import video_frames

SUFFIXES = PLAIN
"""Of formats that are always read."""
HIDDEN = "hidden, or of a system's own folders"
NO_SUFFIX = "without a suffix in their names"
OTHER = "other files"
_UNREAD_FORMATS = {
    "pictures in a format that is not read": ".svg .psd .psb .xcf .ico .tga .eps .exr .hdr .jpf .jpx .jxr .ai .pdf",
    "videos in a format that is not read": ".flv .vob .ts .ogv .divx .rm .mxf",
    "archives other than plain .tar files": ".zip .gz .tgz .bz2 .xz .zst .7z .rar",
}
_REASONS = {suffix: reason for reason, suffixes in _UNREAD_FORMATS.items() for suffix in suffixes.split()}
_SYSTEM_NAMES = frozenset(
    {"@eadir", "@recycle", "@tmp", "#recycle", "#snapshot", "$recycle.bin", "recycler", "lost+found", "__macosx"}
    | {"system volume information", "thumbs.db", "desktop.ini"}
)
IN_A_TAR = "videos inside a tar, which are not read"


def row_id(path: str, member: str | None) -> str:
    """20 hex digits of an image's place, the same in every run."""
    return hashlib.sha256(f"{path}\0{member or ''}".encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Found:
    """One image in the folder."""

    path: str
    """Relative to the folder, with forward slashes."""
    member: str | None
    size: int
    """Bytes of the file: for a member, of its shard or video, which tells when that was written anew."""
    mtime: int

    @property
    def id(self) -> str:
        """As in the store."""
        return row_id(self.path, self.member)

    def source(self, root: Path) -> ImageSource:
        """Where its bytes are."""
        return ImageSource(root / self.path, self.member)

    def __str__(self) -> str:
        return shown_place(self.path, self.member)


def shown_place(path: str, member: str | None) -> str:
    """The name of a picture: "a.jpg", of a shard's member "a.tar:b.jpg", of a video's frame "c.mp4 @ 00:01:20"."""
    if member is None:
        return path
    return f"{path} @ {member}" if is_video(path) else f"{path}:{member}"


@dataclass(frozen=True)
class Problem:
    """Something that could not be indexed."""

    name: str
    why: str
    kind: str = ""
    """The reason in a few words, for counting."""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass
class Gallery:
    """All images of a folder in a fixed order, and what was left out."""

    root: Path
    images: list[Found] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Names of what is left out on purpose, by reason."""
    unread: set[str] = field(default_factory=set)
    """Folders ("" is the root), shards and files that could not be read to their end."""

    def is_absent(self, path: str) -> bool:
        """Whether a path that is not among the images is known not to be there."""
        places = [path, *(str(parent) for parent in PurePosixPath(path).parents)]
        return not self.unread & {"" if place == "." else place for place in places}


def is_hidden(path: str) -> bool:
    """Whether a relative path leads through a name that is hidden or belongs to a system, like `.Trash-1000`."""
    return any(part.startswith(".") or part.lower() in _SYSTEM_NAMES for part in PurePosixPath(path).parts)


def walk(folder: str | os.PathLike[str]) -> Gallery:
    """Find the images of `folder`: files by their suffix, and the image members of its tar shards.

    Raises DataError where there is no such folder, or it cannot be read.
    """
    root = Path(os.path.realpath(folder))
    if not root.is_dir():
        raise DataError(f"There is no folder {folder}. Name the folder that holds the pictures.")
    gallery = Gallery(root)
    _walk(gallery, "")
    if "" in gallery.unread:
        why = next((problem.why for problem in gallery.problems if problem.name == "."), "it cannot be read")
        raise DataError(f"{folder} was not read: {why}. Is the disk there, and may you read it? Nothing was changed.")
    return gallery


def _walk(gallery: Gallery, folder: str) -> None:
    """Take in one folder, then the folders in it, each in the order of its names."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(gallery.root / folder) as entries:
            for entry in entries:
                (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as error:
        gallery.unread.add(folder)
        gallery.problems.append(Problem(shown(folder) or ".", f"the folder cannot be read ({error.strerror or error})"))
    for name in sorted(files):
        _take(gallery, f"{folder}/{name}" if folder else name)
    for name in sorted(folders):
        place = f"{folder}/{name}" if folder else name
        if is_hidden(name):
            _skip(gallery, HIDDEN, place)
        elif os.path.islink(gallery.root / place):
            gallery.problems.append(Problem(shown(place), "a link to a folder; such links are not followed"))
            gallery.unread.add(place)
        elif not name.endswith(".lance"):
            _walk(gallery, place)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # what reads it will tell
        return False


def _take(gallery: Gallery, place: str) -> None:
    why = why_skipped(os.path.basename(place))
    if why is not None and reader_of(place) is not None and why != HIDDEN:
        gallery.unread.add(place)  # without its reader nothing is known of it: what the store has of it stays
    if why is None or (why != HIDDEN and _suffix(place) == ".tar"):
        _add(gallery, place)
    else:
        _skip(gallery, why, place)


def why_skipped(name: str) -> str | None:
    """Why a file is no picture or video to read; None for one that is."""
    suffix, reader = _suffix(name), reader_of(name)
    if is_hidden(name):
        return HIDDEN
    if reader is not None:
        return None if installed(reader) else reader.missing
    return None if suffix in SUFFIXES else _REASONS.get(suffix, OTHER if suffix else NO_SUFFIX)


def why_member_skipped(name: str) -> str | None:
    """Why a member of a tar is no picture to read; None for one that is."""
    return IN_A_TAR if is_video(name) and not is_hidden(name) else why_skipped(name)


def _skip(gallery: Gallery, reason: str, place: str) -> None:
    gallery.skipped.setdefault(reason, []).append(shown(place))


def shown(name: str) -> str:
    """A name as text that can be written: bytes that are no UTF-8 as escapes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _add(gallery: Gallery, place: str) -> None:
    file = gallery.root / place
    if not _is_text(place):
        gallery.problems.append(Problem(shown(place), "its name is not UTF-8 text; rename it"))
        return
    if os.path.islink(file) and not Path(os.path.realpath(file)).is_relative_to(gallery.root):
        gallery.problems.append(Problem(place, "a link that leads out of the folder; it is not followed"))
        gallery.unread.add(place)
        return
    try:
        status = file.stat()
        if _suffix(place) == ".tar":
            _add_shard(gallery, place, status)
        elif is_video(place):
            codes = video_frames(file)
            gallery.images += [Found(place, code, status.st_size, status.st_mtime_ns) for code in codes]
        else:
            gallery.images.append(Found(place, None, status.st_size, status.st_mtime_ns))
    except (OSError, DataError) as error:
        gallery.unread.add(place)
        kind = "not readable" if isinstance(error, OSError) else "damaged or cut short"
        gallery.problems.append(Problem(place, getattr(error, "strerror", None) or str(error), kind))


def _add_shard(gallery: Gallery, place: str, status: os.stat_result) -> None:
    file = gallery.root / place
    for name in shard_members(file):
        why = why_member_skipped(name)
        if why is not None:
            if reader_of(name) is not None and not is_video(name) and why != HIDDEN:
                gallery.unread.add(place)
            _skip(gallery, why, f"{place}:{name}")
        elif not _is_text(name):
            gallery.problems.append(Problem(shown(f"{place}:{name}"), "its name in the tar is not UTF-8 text"))
        else:
            gallery.images.append(Found(place, name, status.st_size, status.st_mtime_ns))
    if not shard_is_whole(file):
        gallery.unread.add(place)
        gallery.problems.append(
            Problem(
                place,
                "the tar ends too early: what is after the cut is not seen; copy it again",
                "damaged or cut short",
            )
        )
