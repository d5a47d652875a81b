"""What a message must hold, whatever its wording: the file or the option, the value, the remedy."""

from __future__ import annotations

import re


def _pattern(part: object) -> str:
    text = str(part)
    escaped = re.escape(text)
    return rf"(?<![\d.]){escaped}(?!\d)" if re.fullmatch(r"\d+", text) else escaped


def naming(*parts: object) -> str:
    """A pattern for `match=`: the message has each of these parts, in any order. A number counts as a whole one."""
    return r"(?si)\A" + "".join(f"(?=.*{_pattern(part)})" for part in parts)


def mentions(message: str, *parts: object) -> bool:
    """Whether the message has each of these parts, in any order. A number counts as a whole one."""
    return re.search(naming(*parts), message) is not None


def one_line(message: str, *parts: object) -> bool:
    """Whether this is how a command reports a user's mistake: one line that has these parts, without a traceback."""
    return len(message.strip().splitlines()) == 1 and "Errno" not in message and mentions(message, *parts)
