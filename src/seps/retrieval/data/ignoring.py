"""Which files and folders a walk leaves out because a pattern says so: `--exclude`, and `.sepsignore` in any folder.

The patterns are those of .gitignore. One per line; `#` begins a comment. `*` and `?` stop at a slash, `**` does not,
`[ab]` is one of these letters. A pattern with a slash at its start or inside counts from the folder of its file, any
other fits a name at any depth; a slash at its end means folders alone. `!` takes back what an earlier line left out.
The last line that fits decides. A folder that is left out is not looked into: nothing below it can be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from seps.files import read_regular

from .records import DataError

IGNORE_FILE = ".sepsignore"
BY_OPTION = "excluded by --exclude"
BY_FILE = f"excluded by {IGNORE_FILE}"


@dataclass(frozen=True)
class Rule:
    """One pattern, ready to compare."""

    expression: re.Pattern[str]
    """Of a path relative to `base`."""
    base: str
    """Folder that the pattern counts from, relative to the root; "" is the root."""
    folders_only: bool
    takes_back: bool
    reason: str

    def fits(self, place: str, is_folder: bool) -> bool:
        """Whether it speaks of this path, relative to the root."""
        if self.folders_only and not is_folder:
            return False
        inside = place if not self.base else place.removeprefix(f"{self.base}/")
        if self.base and inside == place:
            return False
        return self.expression.fullmatch(inside) is not None


Rules = tuple[Rule, ...]


def why_excluded(rules: Rules, place: str, is_folder: bool) -> str | None:
    """The reason of the last rule that fits the path; None where none fits, or that one takes it back."""
    for rule in reversed(rules):
        if rule.fits(place, is_folder):
            return None if rule.takes_back else rule.reason
    return None


def option_rules(patterns: Iterable[str]) -> Rules:
    """Rules of `--exclude`. Raises DataError for a pattern that is blank or cannot be read."""
    rules = []
    for pattern in patterns:
        found = _rule(pattern, "", BY_OPTION)
        if found is None:
            raise DataError(f"--exclude {pattern!r} names nothing. Give a pattern like 'screenshots/' or '*.gif'.")
        rules.append(found)
    return tuple(rules)


def file_rules(folder: Path, base: str) -> tuple[Rules, list[str]]:
    """Rules of the ignore file in `folder`, which lies at `base` below the root, and its lines that cannot be used.

    Raises OSError for a file that is there and cannot be read.
    """
    try:
        text = read_regular(folder / IGNORE_FILE).decode("utf-8-sig", "surrogateescape")
    except FileNotFoundError:
        return (), []
    rules, bad = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = _rule(line, base, BY_FILE)
        except DataError as error:
            bad.append(f"line {number}: {error}")
            continue
        if found is not None:
            rules.append(found)
    return tuple(rules), bad


def _rule(line: str, base: str, reason: str) -> Rule | None:
    """The rule of one line; None for a blank line or a comment."""
    pattern = re.sub(r"(?<!\\)\s+$", "", line)
    if not pattern or pattern.startswith("#"):
        return None
    takes_back = pattern.startswith("!")
    pattern = pattern[1:] if takes_back else pattern
    folders_only = pattern.endswith("/")
    pattern = pattern.rstrip("/")
    if not pattern:
        return None
    anchored = "/" in pattern
    text = ("" if anchored else "(?:.*/)?") + _expression(pattern.lstrip("/"))
    try:
        return Rule(re.compile(text, re.DOTALL), base, folders_only, takes_back, reason)
    except re.error as error:
        raise DataError(f"The pattern {line!r} cannot be read ({error}). Patterns are those of .gitignore.") from error


def _expression(pattern: str) -> str:
    """A pattern as a regular expression."""
    parts = []
    place = 0
    while place < len(pattern):
        rest = pattern[place:]
        letters = re.match(r"\[(!|\^)?(\]?[^\]]*)\]", rest)
        if rest.startswith("**/") and (not place or pattern[place - 1] == "/"):
            parts.append("(?:.*/)?")
            place += 3
        elif rest == "**" and (not place or pattern[place - 1] == "/"):
            parts.append(".+")
            place += 2
        elif rest[0] == "*":
            parts.append("[^/]*")
            place += 1
        elif rest[0] == "?":
            parts.append("[^/]")
            place += 1
        elif letters:
            inside = letters[2].replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace("^", "\\^")
            parts.append(f"(?!/)[{'^' if letters[1] else ''}{inside}]")
            place += letters.end()
        elif rest[0] == "\\" and len(rest) > 1:
            parts.append(re.escape(rest[1]))
            place += 2
        else:
            parts.append(re.escape(rest[0]))
            place += 1
    return "".join(parts)
