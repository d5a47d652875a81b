"""Which files and folders a walk leaves out because a pattern says so: `--exclude`, and `.sepsignore` in any folder.

The patterns are those of .gitignore, read by `pathspec`. The last line that matches decides; the file of an inner
folder comes after those above it. A folder that is left out is not read: nothing below it can be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seps.files import read_regular
from seps.images.sources import DataError

if TYPE_CHECKING:
    import pathspec

IGNORE_FILE = ".sepsignore"
BY_OPTION = "excluded by --exclude"
BY_FILE = f"excluded by {IGNORE_FILE}"


@dataclass(frozen=True)
class Rules:
    """The patterns of one source."""

    patterns: pathspec.GitIgnoreSpec
    base: str
    """Folder that the patterns count from, relative to the root; "" is the root."""
    reason: str


def why_excluded(rules: Iterable[Rules], place: str, is_folder: bool) -> str | None:
    """The reason of the last pattern that matches a path; None where none matches, or that one takes it back."""
    for source in reversed(tuple(rules)):
        inside = place.removeprefix(f"{source.base}/") if source.base else place
        excluded = source.patterns.check_file(f"{inside}/" if is_folder else inside).include
        if excluded is not None:
            return source.reason if excluded else None
    return None


def option_rules(patterns: Iterable[str]) -> tuple[Rules, ...]:
    """Rules of `--exclude`. Raises DataError for a pattern that is blank or cannot be read."""
    lines = list(patterns)
    for line in lines:
        if all(pattern.include is None for pattern in _read([line]).patterns):
            raise DataError(f"--exclude {line!r} names nothing. Give a pattern like 'screenshots/' or '*.gif'.")
    return (Rules(_read(lines), "", BY_OPTION),) if lines else ()


def file_rules(folder: Path, base: str) -> tuple[tuple[Rules, ...], list[str]]:
    """Rules of the ignore file in `folder`, which lies at `base` below the root, and its lines that cannot be used.

    Raises OSError for a file that is there and cannot be read.
    """
    try:
        text = read_regular(folder / IGNORE_FILE).decode("utf-8-sig", "surrogateescape")
    except FileNotFoundError:
        return (), []
    lines, bad = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            _read([line])
        except DataError as error:
            bad.append(f"line {number}: {error}")
        else:
            lines.append(line)
    return (Rules(_read(lines), base, BY_FILE),), bad


def _read(lines: Sequence[str]) -> pathspec.GitIgnoreSpec:
    """Raises DataError for a line that is no pattern."""
    import pathspec  # a search needs none

    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error) as error:
        named = repr(lines[0]) if len(lines) == 1 else "of a list"
        raise DataError(f"The pattern {named} cannot be read ({error}). Patterns are those of .gitignore.") from error
