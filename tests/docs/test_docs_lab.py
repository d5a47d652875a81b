"""Finished studies in lab/ are listed, lead to files that exist, and are imported by nothing."""

from __future__ import annotations

import re

from doc_blocks import ROOT

LAB = ROOT / "lab"
STUDIES = sorted(path for path in LAB.iterdir() if path.is_dir())
_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")


def test_the_index_names_every_study_and_no_link_leads_nowhere() -> None:
    lost = []
    for page in (LAB / "README.md", *(study / "README.md" for study in STUDIES)):
        links = _LINK.findall(page.read_text(encoding="utf-8"))
        lost += [f"{page.parent.name}: {link}" for link in links if not (page.parent / link).exists()]
        if page.parent == LAB:
            assert {f"{study.name}/README.md" for study in STUDIES} <= set(links)
    assert lost == []


def test_nothing_imports_a_study() -> None:
    files = [path for room in ("src", "tests", "benchmarks", "tools") for path in (ROOT / room).rglob("*.py")]
    pattern = re.compile(r"^\s*(?:from|import) lab\b", re.MULTILINE)
    assert [path for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []
