"""What a failed command says: a sentence for a user's mistake, a traceback and where to report for a defect of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from seps.cli.shared.text import printable, printable_lines
from seps.extras import MissingPackage, missing_package
from seps.plugins import PLUGIN_MODULE

EXIT_USER_ERROR = 2
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130
REPORT = "Please report it, with the lines above and the output of `seps doctor`, to the maintainers of seps."
_CAUSES = {
    errno.ENOENT: "there is no such file or folder",
    errno.EACCES: "you may not read or write it",
    errno.EPERM: "you may not read or write it",
    errno.EISDIR: "it is a folder, and a file is needed",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EEXIST: "there is a file or folder of this name already",
    errno.EROFS: "it is on a disk that can only be read",
    errno.ENOSPC: "the disk is full; make room, then run the command again",
    errno.EFBIG: "the file would be larger than this disk, or your limit (ulimit -f), allows",
    errno.EDQUOT: "your quota on this disk is used up; make room, then run the command again",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EIO: "the disk or network share does not answer properly",
    errno.ELOOP: "it is a link that leads back to itself",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n) or use fewer workers",
    errno.EADDRINUSE: "the address is in use; choose another --port, or stop the program that listens there",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose another --host",
    errno.ECONNREFUSED: "nothing answers at that address",
}


OUT_OF_MEMORY = "out of memory ({}). Use a smaller batch, fewer workers, or --device cpu."


def sentence(error: BaseException) -> str | None:
    """What to tell a user about a mistake or a fault of the machine; None for an error that only a defect explains."""
    match error:
        case UnicodeError():
            return None
        case OSError():
            return _operating_system(error)
        case MissingPackage():
            return str(error)
        case ModuleNotFoundError(name=str(name)) if name and name.partition(".")[0] != "seps":
            return missing_package(name)
        case MemoryError():
            return OUT_OF_MEMORY.format(_first_line(error))
        case ValueError() if _is_ours(type(error).__module__) or _raised_by_us(error.__traceback__):
            return str(error)
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not loaded here
        return OUT_OF_MEMORY.format(_first_line(error))
    return _of_a_plugin(error)


def _of_a_plugin(error: BaseException) -> str | None:
    """What to say where a file of --plugin failed; None where no such file took part."""
    place, where = error.__traceback__, None
    while place is not None:
        if str(place.tb_frame.f_globals.get("__name__", "")).startswith(PLUGIN_MODULE):
            where = f"{place.tb_frame.f_code.co_filename}, line {place.tb_lineno}"
        place = place.tb_next
    if where is None:
        return None
    return f"your plugin failed ({where}): {type(error).__name__}: {error}. --debug shows the whole traceback."


def tell(command: str, error: Exception, debug: bool) -> bool:
    """Print what `error` means for the user of `command` on standard error; whether it was one we expect."""
    text = sentence(error)
    if text is None or debug:
        print(printable_lines("".join(traceback.format_exception(error)).rstrip()), file=sys.stderr)
    said = text if text is not None else f"stopped by a defect of seps ({type(error).__name__}). {REPORT}"
    print(f"{command}: {printable_lines(said)}", file=sys.stderr)
    return text is not None


@contextlib.contextmanager
def warnings_as_sentences(command: str) -> Iterator[None]:
    """While the context lasts, a UserWarning of seps is one line on standard error, once; others are shown as Python
    does."""
    package = Path(__file__).resolve().parents[2]
    before = warnings.showwarning
    told: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning and Path(filename).is_relative_to(package):
            text = f"{command}: warning: {printable_lines(str(message))}"
            if text not in told:  # Python counts per line of code, and several may say the same
                told.add(text)
                print(text, file=sys.stderr)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _operating_system(error: OSError) -> str:
    if error.errno is None or not error.strerror:
        return str(error) or type(error).__name__
    cause = _CAUSES.get(error.errno, error.strerror[:1].lower() + error.strerror[1:])
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return f"{' -> '.join(map(printable, names))}: {cause}." if names else f"{cause[:1].upper()}{cause[1:]}."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "seps"


def _raised_by_us(place: TracebackType | None) -> bool:
    """Whether the innermost function of a traceback is one of seps: others' ValueErrors are not written for users."""
    if place is None:
        return False
    while place.tb_next is not None:
        place = place.tb_next
    return _is_ours(str(place.tb_frame.f_globals.get("__name__", "")))
