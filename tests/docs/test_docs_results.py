"""docs/results/README.md says where each figure comes from: files, pages and commands exist, and none is left out."""

from __future__ import annotations

import re
import shlex

from doc_blocks import PAGES, ROOT
from doc_commands import check_benchmark, check_make, parse_seps

RESULTS = ROOT / "docs/results"
INDEX = RESULTS / "README.md"
_LINK = re.compile(r"\]\(([^)\s#:]+)\)")
_COMMAND = re.compile(r"`((?:seps|python -m|make) [^`]+)`")


def table_rows() -> dict[str, str]:
    """The rows of the table of files, by file name."""
    text = INDEX.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.*$", text, re.MULTILINE)
    return {name: row for row in rows for name in re.findall(r"\]\(([\w.-]+)\)", row.split(" | ")[0])}


def linked(row: str) -> set[str]:
    """The pages a row links to, as paths from the root."""
    return {str((RESULTS / link).resolve().relative_to(ROOT)) for link in _LINK.findall(row)}


def test_every_file_is_named_and_every_named_file_exists() -> None:
    there = {path.name for path in RESULTS.iterdir() if path != INDEX}
    assert set(table_rows()) == there
    assert [link for link in _LINK.findall(INDEX.read_text(encoding="utf-8")) if not (RESULTS / link).exists()] == []


def test_every_page_that_links_a_file_is_in_its_row() -> None:
    rows, missing = table_rows(), []
    for page in PAGES:
        if page.parent == RESULTS:
            continue
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.parent == RESULTS and target != INDEX:
                name = str(page.relative_to(ROOT))
                if name not in linked(rows[target.name]):
                    missing.append(f"{target.name}: {name}")
    assert missing == []


def test_every_command_is_understood() -> None:
    found = [shlex.split(command) for command in _COMMAND.findall(INDEX.read_text(encoding="utf-8"))]
    assert found
    for words in found:
        check = check_make if words[0] == "make" else parse_seps if words[0] == "seps" else check_benchmark
        check(words)
