"""Lines that survive a kill: appended one at a time, each on the disk before the next, a torn end repaired.

By hand: libraries that read and write JSONL neither sync each line nor repair a line that a kill cut off.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from seps.files import sync
from seps.images.sources import DataError
from seps.locks import FileLock
from seps.parsing import as_object, is_whole, parse_json, parse_object

Line = dict[str, Any]
GOOD_KEYS = ("image", "sha256", "dense", "model")
FAILED_KEYS = ("image", "reason", "kind")


class LastLine(NamedTuple):
    """What is remembered of an image's last line: the content hash, a note, where the line starts."""

    sha256: str
    note: Any
    offset: int


class LineFile:
    """A JSONL file with one line per image; of two lines for an image the later one counts.

    Raises DataError for a file that holds something else: it is never cut or overwritten.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], note: Callable[[Line], Any]) -> None:
        self.path = path
        self.keys = keys
        self.note = note
        self.entries: dict[str, LastLine] = {}
        self._lines = 0
        self._handle = -1
        self._size = 0

    @property
    def superseded(self) -> int:
        """How many lines of the file no longer count."""
        return self._lines - len(self.entries)

    def open(self) -> None:
        """Read what is there, repair a torn last line, drop superseded ones, and be ready to append."""
        new = not self.path.exists()
        if not (new or self.path.is_file()):
            raise DataError(f"{self.path} is not a file. Choose another --out.")
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._handle).st_size
        if new:
            with suppress(OSError):  # a new file's name is on the disk only when its folder is; not every system can
                sync(self.path.parent)
        self.entries, self._lines = {}, 0
        for offset, raw in self._raw_lines():
            if not raw.endswith(b"\n"):
                self._repair(raw, offset)
                break
            self._remember(self._parse(raw, offset), offset)
        if self.superseded:
            self.compact()

    def append(self, line: Line) -> None:
        """Write one line; when this returns it is on the disk. Raises OSError, leaving no half line."""
        offset = self._size
        self._write(json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n")
        self._remember(line, offset)

    def forget(self, image: str) -> None:
        """Leave an image's line out from the next `compact` on."""
        self.entries.pop(image, None)

    def read(self, image: str) -> Line:
        """The line of an image."""
        with self.path.open("rb") as file:
            file.seek(self.entries[image].offset)
            value: Line = json.loads(file.readline())
        return value

    def compact(self) -> None:
        """Rewrite the file with the last line of every remembered image; it changes whole or not at all."""
        kept = {line.offset for line in self.entries.values()}
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(raw for offset, raw in self._raw_lines() if offset in kept)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, self.path.stat().st_mode & 0o777)  # mkstemp's files are private
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self.close()
        self.open()

    def close(self) -> None:
        """Nothing to flush: every line is on the disk already."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.write(self._handle, data[written:])
            os.fsync(self._handle)
        except BaseException:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(data)

    def _repair(self, torn: bytes, offset: int) -> None:
        """Complete or cut off a last line without its line feed. Raises DataError for one that is not ours."""
        start = b'{"image": "'
        try:
            parse_json(torn)
        except ValueError:
            ours = torn.startswith(start) or start.startswith(torn) or not torn.strip(b"\0")
            if not ours:
                raise DataError(self._foreign(offset)) from None
            os.ftruncate(self._handle, offset)
            os.fsync(self._handle)
            self._size = offset
        else:
            self._remember(self._parse(torn, offset), offset)
            self._write(b"\n")

    def _remember(self, line: Line, offset: int) -> None:
        self._lines += 1
        self.entries[line["image"]] = LastLine(str(line.get("sha256", "")), self.note(line), offset)

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                yield offset, line
                offset += len(line)

    def _parse(self, raw: bytes, offset: int) -> Line:
        try:
            value = parse_object(raw)
        except ValueError as error:
            raise DataError(self._foreign(offset)) from error
        if not all(isinstance(value.get(key), str) for key in self.keys):
            raise DataError(self._foreign(offset))
        return value

    def _foreign(self, offset: int) -> str:
        return (
            f"{self.path} holds something that `seps caption` did not write (at byte {offset}). "
            "It was left as it is. Choose another --out."
        )


class Journal:
    """The descriptions of a run and, beside them, the images that were set aside; written by one process at a time.

    out: dense.jsonl, failed: dense.failed.jsonl, lock: dense.jsonl.lock.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.path = Path(out)
        self.good = LineFile(self.path, GOOD_KEYS, _good_note)
        self.failed = LineFile(failed_path(self.path), FAILED_KEYS, lambda line: line["kind"])
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"), self.path)

    def __enter__(self) -> Journal:
        if not self.path.absolute().parent.is_dir():
            raise DataError(f"The folder {self.path.absolute().parent} for {self.path.name} does not exist. Make it.")
        self._lock.__enter__()
        try:
            self.good.open()
            self.failed.open()
            for image, failure in list(self.failed.entries.items()):
                described = self.good.entries.get(image)
                if described is not None and described.sha256 == failure.sha256:
                    self.failed.forget(image)  # a kill between writing the two files left both
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for file in (self.good, self.failed):
                file.close()
            # An empty file would look as if something had been described, or had failed.
            for path in (self.path, self.failed.path):
                if path.is_file() and not path.stat().st_size:
                    path.unlink()
        finally:
            self._lock.__exit__()

    def write_good(self, line: Line) -> None:
        """Append a description; what the side file says about the image is void."""
        self.good.append(line)
        self.failed.forget(line["image"])

    def write_failed(self, line: Line) -> None:
        """Append an image that was set aside; a description of what the image was before is void."""
        self.failed.append(line)
        known = self.good.entries.get(line["image"])
        if known is not None and line.get("sha256") and known.sha256 != line["sha256"]:
            self.good.forget(line["image"])

    @property
    def makers(self) -> set[str]:
        """Every model with its settings that wrote a description."""
        return {entry.note[1] for entry in self.good.entries.values()}

    def tidy(self) -> None:
        """Drop superseded lines, at the end of a run."""
        for file in (self.good, self.failed):
            if file.superseded:
                file.compact()


def failed_path(out: Path) -> Path:
    """dense.jsonl -> dense.failed.jsonl"""
    return out.with_name(f"{out.stem}.failed{out.suffix or '.jsonl'}")


def maker_of(line: Line) -> str:
    """Model and settings of a line as one text; the seed says nothing about the kind of text."""
    kept = {key: value for key, value in as_object(line.get("settings")).items() if key != "seed"}
    return json.dumps({"model": line.get("model"), **kept}, sort_keys=True, ensure_ascii=False)


def _good_note(line: Line) -> tuple[int, str]:
    """How many words a description has, as counted when it was written, and what made it."""
    words = line.get("words")
    return words if is_whole(words) else len(str(line["dense"]).split()), sys.intern(maker_of(line))
