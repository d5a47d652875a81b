"""`tools/identity.py`: what counts as a difference, and by how much values differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Tools are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from probes.plants import PLANTS, Plant
from probes.registry import AREAS, probes_of
from probes.values import Prose, compare, leaves, read, write

TOOL = Path(__file__).resolve().parents[2] / "tools" / "identity.py"
RECORD: dict[str, Any] = {
    "area/one/scores": np.array([1.0, 2.0, 4.0], np.float32),
    "area/one/path": "a\nb",
    "area/one/text": Prose("first\nsecond"),
    "area/two/scores": np.array([0.5]),
    "area/two/count": 3,
}


def changed(**values: Any) -> list[tuple[str, str, str]]:
    """What differs from the record where one value is another; None takes it out."""
    after = {key: value for key, value in {**RECORD, **values}.items() if value is not None}
    return [(one.kind, one.place, one.told) for one in compare(RECORD, after)]


def test_a_record_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    write(tmp_path / "record", RECORD)
    back = read(tmp_path / "record")
    assert list(compare(RECORD, back)) == []
    assert isinstance(back["area/one/text"], Prose) and not isinstance(back["area/one/path"], Prose)


def test_numbers_differ_by_so_much() -> None:
    ((kind, place, told),) = changed(**{"area/one/scores": np.array([1.0, 2.0, 4.5], np.float32)})
    assert (kind, place) == ("value", "area/one/scores")
    assert "1 of 3" in told and "absolute 0.5" in told and "relative 0.111" in told


@pytest.mark.parametrize(
    "after",
    [np.array([1.0, 2.0, 4.0]), np.array([[1.0, 2.0, 4.0]], np.float32), np.array([-0.0, 2.0, 4.0], np.float32)],
)
def test_another_type_shape_or_sign_is_a_difference(after: np.ndarray) -> None:
    assert [kind for kind, *_ in changed(**{"area/one/scores": after})] == ["value"]


def test_text_names_its_first_line_and_prose_is_apart() -> None:
    ((kind, _, told),) = changed(**{"area/one/path": "a\nc"})
    assert kind == "value" and "line 2" in told and "'c' after" in told
    ((kind, *_),) = changed(**{"area/one/text": Prose("first\nthird")})
    assert kind == "prose"


def test_a_probe_that_is_gone_is_one_difference_with_its_reason() -> None:
    ((kind, place, told),) = changed(
        **{"area/one/scores": None, "area/one/path": None, "area/one/text": None, "area/one": "gone: no such option"}
    )
    assert (kind, place) == ("gone", "area/one") and "no such option" in told


def test_a_renamed_array_is_recognised_by_its_values() -> None:
    ((kind, place, told),) = changed(
        **{"area/one/scores": None, "area/one/marks": RECORD["area/one/scores"]},
    )
    assert (kind, place) == ("renamed", "area/one/scores") and "area/one/marks" in told


def test_rows_become_columns() -> None:
    rows = [{"path": "a", "score": 0.5}, {"path": "b", "score": 0.25}]
    found = dict(leaves({"rows": rows}, "area/one"))
    assert found["area/one/rows/path"] == "a\nb"
    assert found["area/one/rows/score"].tolist() == [0.5, 0.25]


def test_every_area_has_probes() -> None:
    assert all(probes_of(area) for area in AREAS)


@pytest.mark.slow
def test_a_planted_number_is_seen_and_the_same_tree_is_the_same(tmp_path: Path) -> None:
    """The command itself, on one area."""
    command = [sys.executable, str(TOOL)]
    chosen = ["--only", "sensors/module default", "sensors/module binary"]
    record = tmp_path / "before.zip"
    subprocess.run([*command, "record", str(record), *chosen], check=True, timeout=300)
    again = subprocess.run([*command, "compare", str(record), *chosen], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout
    values = read(record)
    assert any(isinstance(value, np.ndarray) and value.size > 100 for value in values.values())
    key = next(key for key, value in values.items() if isinstance(value, np.ndarray) and value.dtype.kind == "f")
    values[key] = np.nextafter(values[key], np.inf)
    write(record, values)
    red = subprocess.run([*command, "compare", str(record), *chosen], capture_output=True, text=True, timeout=300)
    assert red.returncode == 1 and key in red.stdout


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.about)
def test_a_planted_fault_still_fits(plant: Plant) -> None:
    """Where the text is gone, the plant needs another one: otherwise nothing shows that its probes see anything."""
    sources = (path.read_text(encoding="utf-8") for path in (TOOL.parents[1] / "src").rglob("*.py"))
    assert any(plant.old in source for source in sources)
    assert {probe.partition("/")[0] for probe in plant.probes} <= set(AREAS)


def test_every_area_has_a_planted_fault() -> None:
    assert {probe.partition("/")[0] for plant in PLANTS for probe in plant.probes} == set(AREAS)
