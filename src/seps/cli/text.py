"""Text from files made safe to print: names, captions and descriptions may hold what a terminal would obey."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: object) -> str:
    """The text with every character that does not print written as an escape, like `\\x1b` or `\\u202e`.

    Control characters move the cursor, change colours and titles; direction marks show a name backwards; a line break
    makes one name look like two; half a surrogate pair cannot be written at all.
    """
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in str(text))


def literal(text: object) -> Text:
    """`printable`, as a piece for rich's tables and consoles: brackets are no style there and `:dog:` is no picture."""
    from rich.text import Text

    return Text(printable(text))


def printable_json(value: Any, indent: int | None = None) -> str:
    """JSON that holds the same strings, with every character that does not print as a JSON escape."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(letter if letter.isprintable() or letter == "\n" else _json_escape(letter) for letter in text)


def _escape(letter: str) -> str:
    number = ord(letter)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    if letter in short:
        return short[letter]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_escape(letter: str) -> str:
    return json.dumps(letter)[1:-1] if ord(letter) != 0x7F else "\\u007f"
