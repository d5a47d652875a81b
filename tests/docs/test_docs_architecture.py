"""Files, folders, rooms and Python names that the pages mention exist."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT

PACKAGE = ROOT / "src/seps"
_PATH = re.compile(r"`([\w./-]+(?:\.py|\.md|\.json|/))`")
_ROOMS = "|".join(sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
_FILE = re.compile(rf"`((?:tests|benchmarks|tools|examples|configs|{_ROOMS})/[\w/-]+\.(?:py|yaml))\b")
_NAME = re.compile(r"`(seps(?:\.\w+)+)(?:\([^`]*)?`")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_named_paths_exist(page: str) -> None:
    named = set(_PATH.findall((ROOT / page).read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []


def test_the_tree_names_every_room() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[1]
    assert set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == rooms(PACKAGE)
    assert set(re.findall(r"^    (\w+)/ ", tree, re.MULTILINE)) == rooms(PACKAGE / "retrieval") | rooms(
        PACKAGE / "photos"
    )


def rooms(folder: Path) -> set[str]:
    """The packages in a folder."""
    return {path.parent.name for path in folder.glob("*/__init__.py")}


def test_files_named_in_pages_exist() -> None:
    found = {(page.name, file) for page in PAGES for file in _FILE.findall(page.read_text(encoding="utf-8"))}
    assert found
    assert [pair for pair in sorted(found) if not any((top / pair[1]).is_file() for top in (ROOT, PACKAGE))] == []


def test_python_names_in_pages_exist() -> None:
    found = {(page.name, name) for page in PAGES for name in _NAME.findall(page.read_text(encoding="utf-8"))}
    assert found
    for _, name in sorted(found):
        pkgutil.resolve_name(name)
