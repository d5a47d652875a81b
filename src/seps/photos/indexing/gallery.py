"""What a folder of pictures holds: files, members of tar shards, and frames of videos.

Nothing outside the folder is read: links are followed only where they lead to a file inside it. What was not read to
its end is remembered: a picture that was not seen there is not known to be gone. Hidden files and folders, those of
systems, and what a pattern excludes (`seps.photos.indexing.ignoring`) are left out and counted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from seps.images.formats import PLAIN, installed, is_video, reader_of
from seps.images.formats import suffix_of as _suffix
from seps.images.shards import shard_is_whole, shard_members, video_frames
from seps.images.sources import DataError, ImageSource, row_id
from seps.photos.indexing.ignoring import IGNORE_FILE, Rules, file_rules, option_rules, why_excluded
from seps.photos.store.rows import shown_place
from seps.retrieval.data.lines import is_unicode

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
    | {"system volume information", "thumbs.db", "desktop.ini", "node_modules", "__pycache__"}
)
IN_A_TAR = "videos inside a tar, which are not read"


@dataclass(frozen=True)
class Found:
    """One image in the folder."""

    path: str
    """Relative to the folder, with forward slashes."""
    member: str | None
    size: int
    """Bytes of the file: for a member, of its shard or video, which tells when that was written anew."""
    mtime: int
    base: str = ""
    """What stands before the path in the store: "", or the folder itself (see `Gallery.base`)."""
    sidecar: tuple[str, int] | None = None
    """Path of the XMP file beside it, relative to the folder, and a number that changes with its size and time."""

    @property
    def stored(self) -> str:
        """The path in the store."""
        return f"{self.base}/{self.path}" if self.base else self.path

    @property
    def id(self) -> str:
        """As in the store."""
        return row_id(self.stored, self.member)

    def source(self, root: Path) -> ImageSource:
        """Where its bytes are."""
        return ImageSource(root / self.path, self.member)

    def columns(self) -> dict[str, str | int | None]:
        """What the store keeps of the file."""
        return {"path": self.stored, "member": self.member, "size": self.size, "mtime": self.mtime}

    def __str__(self) -> str:
        return shown_place(self.stored, self.member)


@dataclass(frozen=True)
class Problem:
    """Something that could not be indexed."""

    name: str
    why: str
    kind: str = ""
    """The reason in a few words, for counting."""
    again: bool = False
    """The store knew that this file could not be read, and the file has not changed since."""
    id: str = ""
    """Of a video or shard that could not be opened: as `Gallery.unreadable` names it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass
class Gallery:
    """All images of a folder in a fixed order, and what was left out."""

    root: Path
    base: str = ""
    """What stands before its paths in a store of several folders: "" for the store's first, itself for another."""
    images: list[Found] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Names of what is left out on purpose, by reason."""
    unreadable: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of videos and shards that could not be opened, by `row_id`."""
    unread: set[str] = field(default_factory=set)
    """Folders ("" is the root), shards and files that could not be read to their end."""
    left_out: set[str] = field(default_factory=set)
    """Folders and files that are hidden, of a system or excluded, relative to the root."""

    def is_left_out(self, path: str, member: str | None = None) -> bool:
        """Whether a relative path lies in a place that is left out, though its file may be there."""
        places = {path, *map(str, PurePosixPath(path).parents)}
        return bool(self.left_out & places) or is_hidden(path) or is_hidden(member or "")

    def is_absent(self, path: str) -> bool:
        """Whether a path that is not among the images is known not to be there."""
        places = [path, *(str(parent) for parent in PurePosixPath(path).parents)]
        return not self.unread & {"" if place == "." else place for place in places}


def is_hidden(path: str) -> bool:
    """Whether a relative path leads through a name that is hidden or belongs to a system, like `.Trash-1000`."""
    return any(part.startswith(".") or part.lower() in _SYSTEM_NAMES for part in PurePosixPath(path).parts)


def walk(folder: str | os.PathLike[str], exclude: Iterable[str] = (), base: str = "") -> Gallery:
    """Find the images of `folder`: files by their suffix, and the image members of its tar shards.

    `exclude` are patterns of what is left out (`photos.indexing.ignoring`), beside those of ignore files; `base` as in
    `Gallery`. Raises DataError where there is no such folder, it cannot be read, or a pattern cannot.
    """
    root = Path(os.path.realpath(folder))
    if not root.is_dir():
        raise DataError(f"There is no folder {folder}. Name the folder that holds the pictures.")
    gallery = Gallery(root, base)
    _walk(gallery, option_rules(exclude))
    if "" in gallery.unread:
        why = next((problem.why for problem in gallery.problems if problem.name == "."), "it cannot be read")
        raise DataError(f"{folder} was not read: {why}. Is the disk there, and may you read it? Nothing was changed.")
    return gallery


def _walk(gallery: Gallery, rules: tuple[Rules, ...]) -> None:
    """Add the root, then the folders in it, each before the next of its names. Without recursion: folders are deep."""
    waiting: list[tuple[str, tuple[Rules, ...]]] = [("", rules)]
    while waiting:
        folder, rules = waiting.pop()
        if _is_walked(gallery, folder, rules):
            waiting += reversed(_read_folder(gallery, folder, rules))


def _is_walked(gallery: Gallery, folder: str, rules: tuple[Rules, ...]) -> bool:
    """Whether a folder is looked into; what is left out is noted."""
    name = os.path.basename(folder)
    why = HIDDEN if is_hidden(name) else why_excluded(rules, folder, True) if rules and folder else None
    if why is not None:
        gallery.left_out.add(folder)
        _skip(gallery, why, folder)
        return False
    if folder and os.path.islink(gallery.root / folder):
        gallery.problems.append(Problem(shown(folder), "a link to a folder; such links are not followed"))
        gallery.unread.add(folder)
        return False
    return not name.endswith(".lance")


def _read_folder(gallery: Gallery, folder: str, rules: tuple[Rules, ...]) -> list[tuple[str, tuple[Rules, ...]]]:
    """Add the files of a folder; returns the folders in it, in the order of their names, with their rules."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(gallery.root / folder) as entries:
            for entry in entries:
                (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as error:
        gallery.unread.add(folder)
        gallery.problems.append(Problem(shown(folder) or ".", f"the folder cannot be read ({error.strerror or error})"))
    if IGNORE_FILE in files:
        files.remove(IGNORE_FILE)
        more = _read_rules(gallery, folder)
        if more is None:
            return []
        rules += more
    first, sidecars = len(gallery.images), {}
    for name in sorted(files):
        place = f"{folder}/{name}" if folder else name
        excluded = why_excluded(rules, place, False) if rules else None
        if _suffix(name) != ".xmp" or is_hidden(name):
            _take(gallery, place, excluded)
        elif excluded is None:
            sidecars[name.lower()] = name
    if sidecars:
        _add_sidecars(gallery, folder, first, sidecars)
    return [(f"{folder}/{name}" if folder else name, rules) for name in sorted(folders)]


def _add_sidecars(gallery: Gallery, folder: str, first: int, sidecars: dict[str, str]) -> None:
    """Give the images of a folder, those from `first` on, the sidecars `IMG.jpg.xmp` or `IMG.xmp` that lie there."""
    for place in range(first, len(gallery.images)):
        found = gallery.images[place]
        name = os.path.basename(found.path).lower()
        own = next(
            (sidecars[each] for each in (f"{name}.xmp", f"{name.rpartition('.')[0]}.xmp") if each in sidecars), None
        )
        if own is None or found.member is not None:
            continue
        path = f"{folder}/{own}" if folder else own
        file = gallery.root / path
        if os.path.islink(file) and not Path(os.path.realpath(file)).is_relative_to(gallery.root):
            continue
        try:
            status = file.stat()
        except OSError:
            continue
        state = zlib.crc32(f"{own}/{status.st_size}/{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
        gallery.images[place] = replace(found, sidecar=(path, 1 + state))


def _read_rules(gallery: Gallery, folder: str) -> tuple[Rules, ...] | None:
    """Rules of a folder's ignore file; None where it cannot be read: what it excludes must not be shown then."""
    place = f"{folder}/{IGNORE_FILE}" if folder else IGNORE_FILE
    try:
        rules, bad = file_rules(gallery.root / folder, folder)
    except OSError as error:
        gallery.unread.add(folder)
        why = f"it cannot be read ({error.strerror or error}), so that its folder was not read either"
        # The root's own name is ".", which `walk` looks for.
        gallery.problems.append(
            Problem(shown(place) if folder else ".", f"{IGNORE_FILE}: {why}" if not folder else why)
        )
        return None
    gallery.problems += [Problem(shown(place), why) for why in bad]
    return rules


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # what reads it will tell
        return False


def _take(gallery: Gallery, place: str, excluded: str | None) -> None:
    why = why_skipped(os.path.basename(place))
    if why is not None and reader_of(place) is not None and why != HIDDEN:
        gallery.unread.add(place)  # without its reader nothing is known of it: what the store has of it stays
    if why is None or (why != HIDDEN and _suffix(place) == ".tar"):
        why = excluded
    if why is None:
        _add(gallery, place)
        return
    if why in (HIDDEN, excluded):
        gallery.left_out.add(place)
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


def _add(gallery: Gallery, place: str) -> None:
    file = gallery.root / place
    if not is_unicode(place):
        gallery.problems.append(Problem(shown(place), "its name is not UTF-8 text; rename it"))
        return
    if os.path.islink(file) and not Path(os.path.realpath(file)).is_relative_to(gallery.root):
        gallery.problems.append(Problem(place, "a link that leads out of the folder; it is not followed"))
        gallery.unread.add(place)
        return
    status: os.stat_result | None = None
    try:
        status = file.stat()
        if _suffix(place) == ".tar":
            _add_shard(gallery, place, status)
        elif is_video(place):
            codes = video_frames(file)
            gallery.images += [Found(place, code, status.st_size, status.st_mtime_ns, gallery.base) for code in codes]
        else:
            gallery.images.append(Found(place, None, status.st_size, status.st_mtime_ns, gallery.base))
    except (OSError, DataError) as error:
        gallery.unread.add(place)
        kind = "not readable" if isinstance(error, OSError) else "damaged or cut short"
        why = getattr(error, "strerror", None) or str(error)
        gallery.problems.append(
            Problem(place, why, kind) if status is None else _broken(gallery, place, status, why, kind)
        )


def _broken(gallery: Gallery, place: str, status: os.stat_result, why: str, kind: str) -> Problem:
    """The problem of a video or shard, which is remembered with the state of the file."""
    identity = Found(place, None, status.st_size, status.st_mtime_ns, gallery.base).id
    gallery.unreadable[identity] = status.st_size, status.st_mtime_ns
    return Problem(place, why, kind, id=identity)


def _add_shard(gallery: Gallery, place: str, status: os.stat_result) -> None:
    file = gallery.root / place
    for name in shard_members(file):
        why = why_member_skipped(name)
        if why is not None:
            if reader_of(name) is not None and not is_video(name) and why != HIDDEN:
                gallery.unread.add(place)
            _skip(gallery, why, f"{place}:{name}")
        elif not is_unicode(name):
            gallery.problems.append(Problem(shown(f"{place}:{name}"), "its name in the tar is not UTF-8 text"))
        else:
            gallery.images.append(Found(place, name, status.st_size, status.st_mtime_ns, gallery.base))
    if not shard_is_whole(file):
        gallery.unread.add(place)
        why = "the tar ends too early: what is after the cut is not seen; copy it again"
        gallery.problems.append(_broken(gallery, place, status, why, "damaged or cut short"))
