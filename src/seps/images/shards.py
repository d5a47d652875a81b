"""Reading image bytes from files, from tar shards and from videos, at random and from many threads."""

from __future__ import annotations

import functools
import os
import stat
import tarfile
import threading
from pathlib import Path

from seps.images.formats import MissingReader, is_video
from seps.images.formats.video import frame_times, read_frame
from seps.images.sources import DataError, ImageSource

MAX_BYTES = 1 << 29  # no photo is larger; a wrong file under its name must not fill the memory
_INDEX_LOCK = threading.Lock()


class UnreadableImage(DataError):
    """One image cannot be read: its file or member is missing, or its bytes are not a whole image."""

    def __init__(self, source: ImageSource, why: str, kind: str = "not readable") -> None:
        super().__init__(f"The image {source} cannot be read: {why}")
        self.source = source
        self.why = why
        self.kind = kind
        """The reason in a few words, for counting."""


def read_source(source: ImageSource) -> bytes:
    """The encoded bytes of an image; of a video's frame, those of a PPM picture. Raises UnreadableImage.

    Every call opens its own handle, so threads never share a file position.
    """
    try:
        if source.member is None:
            offset, length = 0, _regular_size(source.path)
        elif is_video(source.path):
            _regular_size(source.path)
            return read_frame(source.path, source.member)
        else:
            offset, length = _locate(source, source.member)
        if length > MAX_BYTES:
            why = f"its file is larger than {MAX_BYTES >> 20} MiB. Make it smaller."
            raise UnreadableImage(source, why, "too large")
        data = _read(source.path, offset, length)
    except UnreadableImage:
        raise
    except (OSError, ValueError) as error:
        raise UnreadableImage(source, f"{_reason(error)}.", _kind(error)) from error
    if len(data) < length:
        why = "its file ends before the image does. Copy the file again."
        raise UnreadableImage(source, why, "damaged or cut short")
    return data


def why_absent(source: ImageSource) -> str | None:
    """Why there is no such file, member of a shard or frame of a video; None where there is. Nothing is decoded."""
    try:
        if source.member is None:
            _regular_size(source.path)
        elif is_video(source.path):
            return None if source.member in video_frames(source.path) else "the video has no such frame"
        else:
            _locate(source, source.member)
    except UnreadableImage as error:
        return error.why.rstrip(".")
    except (OSError, ValueError) as error:
        return _reason(error)
    return None


def shard_members(path: Path) -> list[str]:
    """The names of the regular files in a tar shard, in its order. Raises DataError if it is not a tar."""
    try:
        return list(_members(path))
    except OSError as error:
        raise DataError(f"The shard {path} cannot be read: {_reason(error)}.") from error


def video_frames(path: Path) -> list[str]:
    """The time codes of a video's frames, in order. Raises DataError if it cannot be read."""
    try:
        _regular_size(path)
        status = path.stat()
        return list(_frame_times(path, status.st_size, status.st_mtime_ns))
    except MissingReader:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{_reason(error)}; copy it again, or take it out") from error


@functools.lru_cache(maxsize=4096)
def _frame_times(path: Path, size: int, modified: int) -> tuple[str, ...]:
    return tuple(frame_times(path))


def shard_is_whole(path: Path) -> bool:
    """Whether a tar shard is complete: it ends with the empty block that marks the end of a tar archive.

    A file that was cut short, or is damaged before its end, has none that can be reached.
    """
    status = path.stat()
    with _INDEX_LOCK:
        return _read_index(path, status.st_size, status.st_mtime_ns)[1]


def _locate(source: ImageSource, member: str) -> tuple[int, int]:
    """(offset, length) of a member; the index of a shard is read once and kept."""
    members = _members(source.path)
    if member not in members:
        if not shard_is_whole(source.path):
            why = "the shard has no such member, and it ends too early: copy the shard again."
            raise UnreadableImage(source, why, "damaged or cut short")
        raise UnreadableImage(source, "the shard has no such member. Compare the names in the JSONL with it.")
    return members[member]


def _members(path: Path) -> dict[str, tuple[int, int]]:
    _regular_size(path)
    status = path.stat()
    with _INDEX_LOCK:
        return _read_index(path, status.st_size, status.st_mtime_ns)[0]


@functools.lru_cache(maxsize=4096)
def _read_index(path: Path, size: int, modified: int) -> tuple[dict[str, tuple[int, int]], bool]:
    """Member name -> (offset, length), and whether the tar is whole.

    Size and time are part of the key: a rewritten shard is read anew.
    """
    index: dict[str, tuple[int, int]] = {}
    whole = False
    try:
        with tarfile.open(path, mode="r:") as shard:
            for member in shard:
                # Links and sparse members have no plain run of bytes; nothing is ever extracted to disk.
                if member.isreg() and member.sparse is None:
                    index[member.name.removeprefix("./")] = (member.offset_data, member.size)
            # tarfile takes a damaged header for the end; a real end is a block of zeros.
            whole = _read(path, shard.offset, tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    except tarfile.TarError as error:
        # A shard cut short still serves the members before the cut; those after it are reported as missing.
        if not index:
            raise DataError(
                f"{path} is not an uncompressed tar file ({error}). Shards must be plain .tar files: "
                "compressed ones cannot be read at random."
            ) from error
    return index, whole


def _regular_size(path: Path) -> int:
    # A pipe or a device under an image's name would block a reader for ever.
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file")
    return status.st_size


def _read(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return str(getattr(error, "strerror", None) or error).rstrip(".")


def _kind(error: Exception) -> str:
    match error:
        case MissingReader():
            return "without a reader"
        case OSError() | DataError():
            return "not readable"
    return "damaged or cut short"
