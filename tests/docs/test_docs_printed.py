"""What the pages print is what commands print and files hold: a changed digit turns the check red."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

sys.path.append(str(ROOT / "tools"))
import printed

PART = re.compile(
    r"^<!-- (?:printed|figures):[^\n]*-->\n+(?:```text\n)?(.*?)(?=^```$|^<!-- /figures -->$)"
    r"|<!-- figure: .*?-->(.*?)<!-- / -->",
    re.MULTILINE | re.DOTALL,
)
SAMPLE = 12
"""Digits that are changed on each page, in its generated parts and in its sentences."""


@pytest.fixture(scope="module")
def results() -> printed.Results:
    return printed.Results()


@pytest.fixture(scope="module")
def made(results: printed.Results) -> dict[str, str]:
    return printed.tables(results)


def test_the_pages_are_what_their_commands_and_files_give() -> None:
    assert printed.problems() == []


def digits(text: str) -> tuple[list[int], list[int]]:
    """The places of all digits in generated text blocks, tables and figures, and of those in figures of sentences."""
    generated = []
    for part in PART.finditer(text):
        group = 1 if part[1] is not None else 2
        generated += [part.start(group) + found.start() for found in re.finditer(r"\d", part[group])]
    said = printed._CLAIM.finditer(printed.sentences(text))
    return generated, [match.start() + found.start() for match in said for found in re.finditer(r"\d", match[0])]


@pytest.mark.parametrize("page", printed.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_changed_digit_is_found(page: Path, results: printed.Results, made: dict[str, str]) -> None:
    text, chance = page.read_text(encoding="utf-8"), random.Random(page.name)
    places = [place for part in digits(text) for place in chance.sample(part, min(SAMPLE, len(part)))]
    for place in places:
        other = chance.choice([digit for digit in "0123456789" if digit != text[place]])
        changed = text[:place] + other + text[place + 1 :]
        assert printed.page_problems(page, changed, results, made), text[place - 40 : place + 10]


@pytest.mark.parametrize("page", printed.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_is_not_added_unseen(page: Path, results: printed.Results, made: dict[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    for more in (
        "\n\nIt takes 7.654 s.\n",
        "\n\nOf 98,765 pairs one does.\n",
        "\n\nIt loses 4321 to 7 points.\n",
        "\n\n| a | b |\n|---|---|\n| x | 7.654 |\n",
        "\n\n```text\n1 picture\n```\n",
    ):
        assert printed.page_problems(page, text + more, results, made)


def test_a_changed_result_changes_the_page(tmp_path: Path) -> None:
    shutil.copytree(printed.RESULTS, tmp_path / "results")
    path = tmp_path / "results/cold-start-cpu.json"
    facts = json.loads(path.read_text())
    facts["rows"]["search, base"]["median_wall"] = 77.77
    path.write_text(json.dumps(facts))
    wrong = printed.problems(printed.Results(tmp_path / "results"))
    assert {sentence.partition(":")[0] for sentence in wrong} == {"docs/performance.md"}
    assert all("77.77" in sentence or "57.61" in sentence for sentence in wrong)


def test_a_reference_that_leads_nowhere_is_named(results: printed.Results) -> None:
    for reference in (
        "nosuch.json; ; a; .1f",
        "base-recipe.jsonl; name=nosuch; seed; .1f",
        "elsewhere.json; ; a > 0; .1f",
    ):
        with pytest.raises(ValueError, match=re.escape(reference)):
            results.figure(reference)


@pytest.mark.slow
def test_commands_print_what_is_recorded(results: printed.Results) -> None:
    """Each once, for all pages: about a minute, most of it encoding the shipped photos."""
    recorded = printed.records(results)
    for command, lines in printed.run(printed.commands(slow=False)):
        assert printed.alike(recorded[command], lines), f"{command}: python tools/printed.py run --only {command!r}"


def test_outputs_are_alike_but_for_rounding() -> None:
    assert printed.alike(["score 1.213, 64 of 400"], ["score 1.215, 64 of 400"])
    assert not printed.alike(["score 1.213"], ["score 0.639"])
    assert not printed.alike(["score 1.213"], ["points 1.213"])


def test_lists_written_anew_hold_each_figure_of_the_sentences() -> None:
    page = printed.ROOT / "docs/made-up.md"
    text = "# Title\n\nIt takes 1.5 s, twice 1.5 s, with 20 %.\n"
    made = printed.listed_anew(page, text)
    assert "<!-- by hand: 1.5 1.5 20 -->" in made and printed.unproved(page, made) == []
    assert printed.listed_anew(page, made) == made
    assert len(printed.unproved(page, made.replace("1.5 s, twice", "1.6 s, twice"))) == 2
