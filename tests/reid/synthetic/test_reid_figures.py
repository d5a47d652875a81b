"""The figures of re-identification on the pages are those of the raw file."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

# Benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.reid_report import report
from benchmarks.reid_synthetic import VARIANTS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
SENSORS = {"RGB + NI + TI": 3, "RGB + NI": 2, "RGB + TI": 2, "NI + TI": 2, "RGB": 1, "NI": 1, "TI": 1}


def read_runs() -> list[dict]:
    lines = (RESULTS / "reid-synthetic.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda run: (list(VARIANTS).index(run["variant"]), run["seed"]))


def figures_of(variant: str, sensors: str = "RGB + NI + TI", handling: str = "leave-out") -> list[float]:
    """mAP of every seed with all the features of a variant."""
    pattern = 1 if variant == "concat" else 3
    return [
        row["mAP"]
        for run in read_runs()
        if run["variant"] == variant
        for row in run["rows"]
        if (" + ".join(row["present"]), row["missing"], row["pattern"]) == (sensors, handling, pattern)
    ]


def dev_figures_of(variant: str) -> list[float]:
    return [run["dev_mAP"] for run in read_runs() if run["variant"] == variant]


def rows_below(head: str) -> list[list[str]]:
    """The cells of the table of the page whose first line begins with `head`."""
    lines = (ROOT / "docs" / "re-identification.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    table = lines[start : lines.index("", start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])]


def spread(values: list[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.1f} ± {statistics.stdev(values):.1f}"


def test_the_tables_of_the_results_are_made_from_the_raw_file() -> None:
    recipe = json.loads((RESULTS / "reid-synthetic-recipe.json").read_text(encoding="utf-8"))
    text = report({"recipe": recipe, "runs": read_runs()}, list(VARIANTS))
    assert text == (RESULTS / "reid-synthetic.md").read_text(encoding="utf-8")


def test_the_table_of_sensors_on_the_page() -> None:
    head, *rows = rows_below("| sensors | missing ones | concat")
    sensors, seen = "", []
    for row in rows:
        sensors = row[0] or sensors
        handling = "leave-out" if row[1] == "-" else row[1]
        seen.append((sensors, handling))
        assert row[2:] == [spread(figures_of(variant, sensors, handling)) for variant in head[2:]], (sensors, handling)
    every = [(name, how) for name, count in SENSORS.items() for how in ("zero", "leave-out") if count < 3]
    assert seen == [("RGB + NI + TI", "leave-out"), *every]


def test_the_paired_differences_on_the_page() -> None:
    _, *rows = rows_below("| difference | seed 0")
    for name, *cells in rows:
        first, second = (part.strip("`") for part in name.split(" - "))
        test = [a - b for a, b in zip(figures_of(first), figures_of(second), strict=True)]
        dev = [a - b for a, b in zip(dev_figures_of(first), dev_figures_of(second), strict=True)]
        assert cells == [*(f"{value:+.1f}" for value in test), spread(test, "+"), spread(dev, "+")], name
    assert len(rows) == 9


def test_the_readme_states_the_same() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    means = {variant: statistics.mean(figures_of(variant)) for variant in ("concat", "keep-all", "topk")}
    selection = [a - b for a, b in zip(figures_of("topk"), figures_of("keep-all"), strict=True)]
    assert f"concatenation {means['concat']:.1f} mAP, selection {means['topk']:.1f}" in text
    assert f"of those {means['topk'] - means['concat']:.1f} points {means['keep-all'] - means['concat']:.1f} " in text
    assert spread(selection) in text
