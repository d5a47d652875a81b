"""Fenced blocks of the Markdown pages, and the single commands of a shell block."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = [*READMES, *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api")]
"""Every page whose blocks are executed: all but those made from docstrings."""
_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_SHELL = {"&&", "||", "|", ";", ">", ">>", "<", "&"}


@dataclass(frozen=True)
class Block:
    """One fenced block: where it starts, what it says it is, and its text."""

    place: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[3].strip(), found[4])


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block as lists of words; comments are left out, continued lines joined.

    Raises ValueError for anything but plain commands, since those are what is checked.
    """
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if _SHELL & set(words):
            raise ValueError(f"{block.place}: {line!r} is no plain command; write one command a line.")
        if words:
            yield words
