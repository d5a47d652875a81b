"""Text that comes from files, models and networks, made safe for a terminal."""

from __future__ import annotations

import json
import shlex
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

SHOWN_PROBLEMS = 20
SHOWN_SKIPPED = 3
# Joiners are part of many scripts and of emoji; they cannot move or hide other text.
_KEPT = "\u200c\u200d"


def printable(text: object) -> str:
    """`text` with every character that a terminal would obey written as a visible escape, like \\x1b or \\u202e.

    These are the control characters (C0, C1, line ends included), the marks that change the direction of writing, and
    bytes of a file name that are no text.
    """
    return "".join(letter if _harmless(letter) else _escape(letter) for letter in str(text))


def counted(count: int, what: str, several: str = "") -> str:
    """A number and its noun: "1 picture", "2 pictures"; `several` where the plural is not made with an s."""
    return f"{count} {what if count == 1 else several or what + 's'}"


def cells(text: str) -> int:
    """How many columns of a terminal a text takes: letters of East Asia and emoji two, marks above others none."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(bool(unicodedata.combining(letter)) or letter in _KEPT for letter in text)


def literal(text: object) -> Text:
    """`printable`, as a piece for rich's tables and consoles: brackets are no style there and `:dog:` is no picture."""
    from rich.text import Text

    return Text(printable(text))


def typed(path: object) -> str:
    """A path as it is typed in a shell, for commands that we suggest: in quotation marks where it has spaces."""
    return shlex.quote(printable(path))


def printable_json(value: Any, indent: int | None = None) -> str:
    """JSON that holds the same strings, with every character that a terminal would obey as a JSON escape."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(letter if letter == "\n" or _harmless(letter) else _json_escape(letter) for letter in text)


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print a result as JSON (`printable_json`); where standard output has not all letters, all in ASCII."""
    text = printable_json(value, indent)
    if not _can_be_written(text):
        # Python's own escapes, \\xe9 and \\U0001f436, are none of JSON's.
        text = json.dumps(value, indent=indent).replace("\x7f", "\\u007f")
    print(text)


def print_for_programs(text: str) -> None:
    """Print text as it is; in UTF-8 where standard output has not all its letters, so that no name becomes another."""
    if _can_be_written(text):
        sys.stdout.write(text)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


def _can_be_written(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return not hasattr(sys.stdout, "buffer")
    return True


def say(text: str) -> None:
    """Print a message, which is not the result, on standard error."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def list_problems(problems: Sequence[object], what: str, option: str, kinds: Mapping[str, int] | None = None) -> None:
    """Say how many problems there are, of which `kinds`, and the first of them; with `option` the command lists all."""
    if problems:
        reasons = ", ".join(f"{count} {kind}" for kind, count in (kinds or {}).items())
        say(f"\n{len(problems)} {what}{f' ({reasons})' if reasons else ''}:")
    for problem in problems[:SHOWN_PROBLEMS]:
        say(f"  {printable(problem)}")
    if len(problems) > SHOWN_PROBLEMS:
        say(f"  and {len(problems) - SHOWN_PROBLEMS} more ({option} lists all)")


def list_skipped(skipped: Mapping[str, Sequence[str]]) -> None:
    """Say what of a folder was left out, by reason; what is surely no picture is counted in the report alone."""
    from seps.photos.indexing.gallery import OTHER

    counted = {reason: names for reason, names in skipped.items() if reason != OTHER}
    if counted:
        number = sum(map(len, counted.values()))
        say(f"\n{number} {'was' if number == 1 else 'were'} skipped:")
    for reason, names in sorted(counted.items()):
        more = ", ..." if len(names) > SHOWN_SKIPPED else ""
        say(f"  {len(names)} {reason} ({', '.join(map(printable, names[:SHOWN_SKIPPED]))}{more})")


def printable_lines(text: str) -> str:
    """`printable`, with the line ends kept: for messages that we wrote over several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _harmless(letter: str) -> bool:
    return letter in _KEPT or letter.isprintable()


def _escape(letter: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter)
    if short:
        return short
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(letter: str) -> str:
    return json.dumps(letter)[1:-1] if ord(letter) != 0x7F else "\\u007f"
