"""docs/catalogue.md has every option and value of the configuration, and the figures of their files."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
from doc_blocks import ROOT

from seps.method import config

PAGE = ROOT / "docs/catalogue.md"
COSTS = ROOT / "docs/results/options-cpu.json"
CLASSES = {"SlimmingConfig": config.SlimmingConfig, "LossConfig": config.LossConfig}
SENSOR_FIELDS = ("guides", "own_guide")
_CELL = re.compile(r"`([^`]+)`")
_FIGURE = re.compile(r"(?<![\d.])\d{2,3}\.\d(?!\d)|[+-]\d+\.\d(?!\d)")


def sections() -> dict[tuple[str, str], str]:
    """The text of each option, by the class of its chapter and the name of the field."""
    found = {}
    for chapter in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = chapter.splitlines()[0]
        owner = _CELL.search(title)
        assert owner is not None, title
        for section in re.split(r"^### ", chapter, flags=re.MULTILINE)[1:]:
            for name in _CELL.findall(section.splitlines()[0]):
                found[owner[1], name] = section
    return found


def options() -> list[tuple[str, str]]:
    """Every field of the configuration with its class, and the options across sensors."""
    own = [(name, field.name) for name, kind in CLASSES.items() for field in fields(kind)]
    return own + [("MultiModalSDTPS", name) for name in SENSOR_FIELDS]


def choices() -> dict[str, tuple[str, ...]]:
    """The values of every choice in `seps.method.config`, by the name of its type."""
    return {name: get_args(kind) for name, kind in vars(config).items() if get_origin(kind) is Literal}


PLACES = {
    "Scoring": ("SlimmingConfig", "scoring"),
    "DenseRole": ("SlimmingConfig", "dense"),
    "Aggregation": ("SlimmingConfig", "aggregation"),
    "Alignment": ("SlimmingConfig", "alignment"),
    "Similarity": ("SlimmingConfig", "similarity"),
    "DecisionKind": ("SlimmingConfig", "decision"),
    "GuideKind": ("MultiModalSDTPS", "guides"),
    "RatioForm": ("LossConfig", "ratio_form"),
    "LossKind": ("LossConfig", "kind"),
}
"""The section of each type of choice."""


def test_the_catalogue_has_every_option_and_no_other() -> None:
    assert sorted(sections()) == sorted(options())


@pytest.mark.parametrize("kind", sorted(choices()))
def test_every_value_of_a_choice_is_in_its_section(kind: str) -> None:
    text = sections()[PLACES[kind]]
    assert [value for value in choices()[kind] if f'"{value}"' not in text] == []


def rows() -> list[tuple[str, list[str]]]:
    """(option, cells) of every row of the cost tables, the option as the benchmark names it."""
    found = []
    for (_, name), text in sections().items():
        for line in re.findall(r"^\| (`.*?) \|$", text, re.MULTILINE):
            cells = line.split(" | ")
            value = _CELL.findall(cells[0])[-1].strip('"')
            option = value.replace('"', "") if "=" in value else f"{name}={value}"
            option = re.sub(r"=\{(\w+): .*\}$", r"=\1", option.replace('"', ""))
            if (option, cells) not in found:
                found.append((option, cells))
    return found


def test_costs_are_those_of_the_benchmark() -> None:
    measured = {row["option"]: row for row in json.loads(COSTS.read_text(encoding="utf-8"))["rows"]}
    base = measured["base"]["parameters"]
    checked = set()
    for option, cells in rows():
        line = measured.get(option)
        if line is None or ("(default)" in cells[0] and not option.startswith("ratio_form")):
            continue
        checked.add(option)
        if "pair_ratio" in line:
            assert cells[1:4] == [
                f"{line['parameters'] - base:+,}".replace("+0", "0"),
                f"x {line['step_ratio']:g}",
                f"x {line['pair_ratio']:g}",
            ], option
        elif "step_ratio" in line:
            assert cells[1:3] == [
                f"{line['parameters'] - measured['sensors']['parameters']}",
                f"x {line['step_ratio']:g}",
            ]
        else:
            assert cells[1:3] == [f"{line['parameters']}", f"{line['step_ms']:.1f}"], option
    presets = {"preset=paper", "preset=default"}
    told = {name for name in measured if name not in {"base", "sensors", "sensors, decision=relaxed", *presets}}
    assert checked == told


def test_parameters_are_counted_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    spec = importlib.util.spec_from_file_location("catalogue_benchmark", ROOT / "benchmarks/speed/options.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for row in json.loads(COSTS.read_text(encoding="utf-8"))["rows"]:
        assert benchmark.count(row["option"]) == row["parameters"], row["option"]


def measured_figures() -> dict[str, set[str]]:
    """The figures of each row of the ablation's tables, and of the table of the variants across sensors."""
    found: dict[str, set[str]] = {}
    for page in ("paper-versus-code.md", "../lab/reid-synthetic/reid-synthetic.md"):
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
            name = re.match(r"\| (?:\*\*)?([\w.-]+)", line)
            if name is not None:
                found.setdefault(name[1], set()).update(_FIGURE.findall(line))
    return found


def test_worth_is_that_of_the_named_row() -> None:
    known, seen = measured_figures(), 0
    for option, cells in rows():
        name = _CELL.findall(cells[-1])
        if not name:
            continue
        figures = [figure for cell in cells[-3:-1] for figure in _FIGURE.findall(cell)]
        seen += len(figures)
        assert figures and set(figures) <= known[name[0]], (option, figures)
    assert seen


def test_figures_of_the_text_are_those_of_the_rows_it_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"^\|[^\n]*$|^```.*?^```$|\$\$.*?\$\$", "", text, flags=re.MULTILINE | re.DOTALL)
    known, seen = measured_figures(), 0
    for paragraph in text.split("\n\n"):
        named = [name for name in _CELL.findall(paragraph) if name in known]
        if named:
            figures = {figure for figure in _FIGURE.findall(paragraph) if figure[0] in "+-"}
            seen += len(figures)
            assert figures <= set().union(*(known[name] for name in named)), paragraph
    assert seen
