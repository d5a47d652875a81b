"""Reading what users wrote: lines of text, lines of JSON, and paths that must stay inside a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seps.files import open_regular
from seps.images.sources import DataError
from seps.parsing import MAX_CHARACTERS, ShapeError, parse_object

MAX_LINE_BYTES = 16 * 2**20
TOO_LONG = f"longer than {MAX_LINE_BYTES >> 20} MiB, and not read"
_UTF8_MARK = b"\xef\xbb\xbf"


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file; DataError where there is none or it cannot be read."""
    if not path.is_file():
        raise DataError(f"There is no file {path}. Check the path.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def raw_lines(path: Path) -> Iterator[bytes | None]:
    """The lines of a regular file with their ends, one at a time; None for one of more than `MAX_LINE_BYTES`.

    Raises DataError where there is no such file or it cannot be read. A mark of UTF-8 at the start is left out.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}. Check the path.")
    try:
        with open_regular(path) as file:
            if file.read(len(_UTF8_MARK)) != _UTF8_MARK:
                file.seek(0)
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) <= MAX_LINE_BYTES:
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(2**20)
                yield None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def text_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file without their ends.

    Only line feeds (after an optional carriage return) end a line: captions hold other characters that
    `str.splitlines` would split at, and one split line shifts every caption after it.
    """
    return list(_texts(path))


def _texts(path: Path) -> Iterator[str]:
    """`text_lines`, one at a time."""
    for number, line in enumerate(raw_lines(path), start=1):
        if line is None:
            raise DataError(f"{path}, line {number}: {TOO_LONG}.")
        if not line.endswith(b"\n") and not line.strip():
            return
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8 text. Save the file as UTF-8.") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) for every non-blank line of a JSONL file; `place` names file and line in messages."""
    for number, line in enumerate(_texts(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            value = parse_object(line)
        except ShapeError as error:
            raise DataError(f"{place}: {error}.") from error
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON ({error}). Each line must be one JSON object.") from error
        yield place, value


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: halves of surrogate pairs, as in names of other encodings, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def checked_text(value: object, what: str, place: str) -> str:
    """`value` as a text with words in it, left as it is (names may start with a space), or DataError."""
    if not isinstance(value, str):
        raise DataError(f"{place}: {what} must be a text, not {type(value).__name__}.")
    if not is_unicode(value):
        raise DataError(f"{place}: {what} holds half of a surrogate pair, which is not a character.")
    if not value.strip():
        raise DataError(f"{place}: {what} is blank. Write a text or leave the entry out.")
    return value


def cut_text(text: str) -> tuple[str, str | None]:
    """A description, at most the `MAX_CHARACTERS` that a model may get, and where it was longer a notice of that."""
    if len(text) <= MAX_CHARACTERS:
        return text, None
    return text[:MAX_CHARACTERS], f"it has {len(text):,} characters, of which the first {MAX_CHARACTERS:,} are used"


class Root:
    """A folder that paths from data files may not lead out of, links followed.

    Resolved parents are remembered: a hundred thousand images share a few folders.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"The image folder {folder} does not exist or is not a folder.")
        self.folder = Path(os.path.realpath(folder))
        self._parents: dict[str, str] = {}

    def __call__(self, name: str, place: str) -> Path:
        """The resolved path of `name` under the folder; the file itself need not exist."""
        if "\0" in name:
            raise DataError(f"{place}: the path {name!r} holds a NUL character.")
        if os.path.isabs(name) or name.startswith("/"):
            raise DataError(f"{place}: the path {name!r} is absolute. Write it relative to {self.folder}.")
        parent, last = os.path.split(os.path.join(self.folder, name))
        try:
            if parent not in self._parents:
                self._parents[parent] = os.path.realpath(parent)
            full = os.path.join(self._parents[parent], last)
            if last in ("", ".", "..") or os.path.islink(full):
                full = os.path.realpath(full)
        except (OSError, ValueError) as error:
            raise DataError(f"{place}: the path {name!r} cannot be followed ({error}).") from error
        if not full.startswith(str(self.folder).rstrip(os.sep) + os.sep):
            raise DataError(
                f"{place}: the path {name!r} leads out of {self.folder}, links followed. "
                "Give the folder that holds the images as the image root."
            )
        return Path(full)


def checked_member(name: str, place: str) -> str:
    """A tar member's name without a leading `./`; absolute names and `..` are refused as for files."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise DataError(f"{place}: the member name {name!r} leads out of its shard. Use a plain relative name.")
    return name.removeprefix("./")
