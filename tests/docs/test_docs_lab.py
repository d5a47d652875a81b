"""Each finished study in lab/ states its question, verdict and commands, and lists its raw files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_blocks import ROOT

LAB = ROOT / "lab"
STUDIES = sorted(path.parent for path in LAB.glob("*/README.md"))
_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")


def test_every_folder_is_a_study_and_in_the_index() -> None:
    folders = {path for path in LAB.iterdir() if path.is_dir()}
    assert folders == set(STUDIES)
    index = (LAB / "README.md").read_text(encoding="utf-8")
    assert {link for link in _LINK.findall(index) if link.endswith("/README.md")} == {
        f"{study.name}/README.md" for study in STUDIES
    }


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_a_study_is_whole(study: Path) -> None:
    text = (study / "README.md").read_text(encoding="utf-8")
    for part in ("**Question.**", "**Verdict.**", "**Code**", "\n## "):
        assert part in text, part
    raw = {path.name for path in study.iterdir() if path.suffix in (".json", ".jsonl", ".gz")}
    assert raw <= set(_LINK.findall(text))
    assert [link for link in _LINK.findall(text) if not (study / link).exists()] == []


def test_nothing_imports_a_study() -> None:
    files = [path for room in ("src", "tests", "benchmarks", "tools") for path in (ROOT / room).rglob("*.py")]
    pattern = re.compile(r"^\s*(?:from|import) lab\b", re.MULTILINE)
    assert [path for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []
