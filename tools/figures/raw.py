"""Raw files, and what the tables have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = Sequence[str]
YES, MODEL, NO, OTHER = "**yes**", "yes, but for the model", "no", "—"
"""Whether a row is the default call; other code has none."""
NOT_RECORDED = "not recorded yet"


class Results:
    """Reads the raw files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / name).exists()

    def text(self, name: str) -> str:
        """A file as text."""
        return (self.folder / name).read_text(encoding="utf-8")

    def json(self, name: str) -> Any:
        """A JSON file."""
        return json.loads(self.text(name))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of JSON lines."""
        return [json.loads(line) for line in self.text(name).splitlines()]


def link(name: str) -> str:
    """The link of the page to a raw file."""
    return f"[raw](results/{name})"


def table(head: Row, rows: Sequence[Row], *after: str) -> str:
    """A Markdown table, and paragraphs after it."""
    first, *lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    notes = [line for text in after for line in ("", text)]
    return "\n".join(["", first, "|" + "---|" * len(head), *lines, *notes, ""])


def seconds(value: float) -> str:
    """Three digits: 0.206, 3.52, 24.4, 266."""
    digits = 3 if value < 1 else max(0, 3 - len(str(int(value))))
    return f"{value:,.{digits}f}"


def mib(value: float) -> str:
    """A number of MiB."""
    return f"{value:,.0f} MiB"
