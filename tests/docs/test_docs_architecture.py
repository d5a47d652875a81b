"""ARCHITECTURE.md and CONTRIBUTING.md name only files and folders that exist, and every room of the package."""

from __future__ import annotations

import re

import pytest
from doc_blocks import ROOT

_PATH = re.compile(r"`([\w./-]+(?:\.py|\.md|\.json|/))`")
PACKAGE = ROOT / "src/seps"


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_named_paths_exist(page: str) -> None:
    named = set(_PATH.findall((ROOT / page).read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []


def test_the_tree_names_every_room() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[1]
    named = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert named == rooms
    inner = set(re.findall(r"^    (\w+)/ ", tree, re.MULTILINE))
    assert inner == {path.parent.name for path in (PACKAGE / "retrieval").glob("*/__init__.py")}
