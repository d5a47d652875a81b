"""docs/catalogue.md has every option and value of the configuration; their costs are those of the benchmark."""

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


def test_parameters_are_counted_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    spec = importlib.util.spec_from_file_location("catalogue_benchmark", ROOT / "benchmarks/speed/options.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for row in json.loads(COSTS.read_text(encoding="utf-8"))["rows"]:
        assert benchmark.count(row["option"]) == row["parameters"], row["option"]
