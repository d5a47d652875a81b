"""Each statement of "paper versus code" points to a measured row of the ablation, in both languages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT

from seps.retrieval.experiments import report as compare_report
from seps.retrieval.experiments.suites import ABLATION

PAGES = [ROOT / "docs/paper-versus-code.md", ROOT / "docs/zh/paper-versus-code.md"]
RAW = ROOT / "docs/results/ablation.jsonl"
AGAIN = ROOT / "docs/results/ablation-cpu.jsonl"  # runs made again
_FAMILIES = "scoring|dense|aggregation|alignment|similarity|decision|ratio|beta|top|rho|merged|pooled|default"
_SINGLE = "base|paper|published|default|detached|mean|description|triplet"
_ROW = re.compile(rf"`((?:{_FAMILIES})-[\w.-]+|{_SINGLE})`")


def rows(page: Path) -> set[str]:
    """The names of rows in a page."""
    return set(_ROW.findall(page.read_text(encoding="utf-8")))


def test_both_languages_name_the_same_rows() -> None:
    english, chinese = map(rows, PAGES)
    assert english == chinese
    assert english


@pytest.fixture
def results(tmp_path: Path) -> list[dict[str, Any]]:
    """Of both files, as `seps compare --report` reads them."""
    (tmp_path / "results.jsonl").write_bytes(RAW.read_bytes() + AGAIN.read_bytes())
    found: list[dict[str, Any]] = compare_report.finished(tmp_path / "results.jsonl")
    return found


def test_every_row_has_three_seeds(results: list[dict[str, Any]]) -> None:
    seeds = Counter(result["name"] for result in results if result["rsum"])
    assert set(seeds) == set(ABLATION) and min(seeds.values()) >= 3
    assert rows(PAGES[0]) <= set(ABLATION)
