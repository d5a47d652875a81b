"""The single file in another language: docstrings and notes are replaced; code, shape comments and equations stay.

The translation of `method/select.py` is `method/select.zh.yaml` beside it, a list of pairs: `en`, what the source says,
and `zh`. A changed text no longer finds its entry, so that no translation can outlive it.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import yaml  # type: ignore[import-untyped]

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
_NO_NOTE = ("# (", "# each (", "# -, (", "# type:", "# noqa")
"""How comments begin that are not translated: shapes, and what tools read."""


class Text(NamedTuple):
    """A docstring or a note, and the lines (from 0, the last included) and column where it stands."""

    said: str
    first: int
    last: int
    column: int
    docstring: bool


def texts(source: str) -> list[Text]:
    """Every docstring and note of a source file, in the order of its lines. A note is a comment that is no shape."""
    return sorted([*_docstrings(source), *_notes(source)], key=lambda text: text.first)


def _docstrings(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                last = (node.end_lineno or node.lineno) - 1
                yield Text(inspect.cleandoc(text), node.lineno - 1, last, node.col_offset, True)


def _notes(source: str) -> Iterator[Text]:
    """Comments on lines of their own that follow each other are one note."""
    note: Text | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(_NO_NOTE):
            continue
        (row, column), said = token.start, token.string.lstrip("# ")
        alone = not token.line[:column].strip()
        if note and alone and (note.last, note.column) == (row - 2, column):
            note = note._replace(said=f"{note.said} {said}", last=row - 1)
            continue
        if note:
            yield note
        note = Text(said, row - 1, row - 1, column, False)
        if not alone:
            yield note
            note = None
    if note:
        yield note


class Translation:
    """What is said in another language, by what the source says; it keeps account of what is missing and unused."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self.entries = entries
        self.used: dict[str, bool] = {}
        """What was asked for, in that order, and whether it has a translation."""

    @property
    def missing(self) -> list[str]:
        """What was asked for and has no translation."""
        return [said for said, found in self.used.items() if not found]

    @property
    def stale(self) -> list[str]:
        """Entries that nobody asked for."""
        return [said for said in self.entries if said not in self.used]

    @classmethod
    def read(cls, path: Path) -> Translation:
        """The translation in a file; empty where there is none."""
        pairs = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if path.exists() else []
        return cls({pair["en"].strip(): (pair["zh"] or "").strip() for pair in pairs})

    def __call__(self, said: str) -> str:
        """The translation of `said`, or `said` itself where there is none."""
        found = self.entries.get(said)
        self.used[said] = bool(found)
        return found or said


def in_english(said: str) -> str:
    """The words as they are."""
    return said


def translated(source: str, translation: Translation) -> str:
    """The source with its docstrings and notes translated."""
    lines = source.splitlines(keepends=True)
    found = [(text, translation(text.said).splitlines()) for text in texts(source)]
    for text, said in reversed(found):
        indent = lines[text.first][: text.column]
        if text.docstring:
            said = [line.replace("\\", "\\\\") for line in said]
            closing = [] if len(said) == 1 else ['"""']
            said = ['"""' + said[0] + ('"""' if len(said) == 1 else ""), *said[1:], *closing]
        else:
            said = [f"# {line}" for line in said]
        blank = " " * text.column
        written = [f"{blank if i else indent}{line}".rstrip() + "\n" for i, line in enumerate(said)]
        lines[text.first : text.last + 1] = written
    return "".join(lines)
