"""Each statement of "paper versus code" points to a row of the ablation that there is, in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_blocks import ROOT

PAGES = [ROOT / "docs/paper-versus-code.md", ROOT / "docs/zh/paper-versus-code.md"]
_FAMILIES = "scoring|dense|aggregation|alignment|similarity|decision|ratio|beta|top|rho|merged"
_ROW = re.compile(rf"`((?:{_FAMILIES})-[\w.]+|paper|published|default)`")


def rows(page: Path) -> set[str]:
    """The names of rows in a page."""
    return set(_ROW.findall(page.read_text(encoding="utf-8")))


def test_both_languages_name_the_same_rows() -> None:
    english, chinese = map(rows, PAGES)
    assert english == chinese
    assert len(english) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_each_difference_points_to_a_row(page: Path) -> None:
    paragraphs = re.findall(r"^\*\*([1-7])\..*?(?=\n\n)", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert paragraphs == list("1234567")
    for found in re.finditer(r"^\*\*[1-7]\..*?(?=\n\n)", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        assert _ROW.search(found[0]), found[0]


def test_the_rows_are_those_of_the_ablation() -> None:
    ablation = pytest.importorskip("seps.retrieval.ablation")
    assert rows(PAGES[0]) <= set(ablation.ABLATION)
