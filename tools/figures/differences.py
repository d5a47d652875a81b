"""Paper versus code, from one source for both languages: words of differences.yaml, figures of the ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from figures.raw import Results, table

SOURCE = Path(__file__).with_suffix(".yaml")
KEYS = ("dev/none", "dev/image")
"""By pixels alone, and with the description on the image's side: 964 photos kept apart from training."""


def figures_of(files: Results) -> Callable[[str, str], tuple[Any, Any]]:
    """By row and key its figure, and its difference to the row that it changes; None where not measured."""
    from seps.retrieval.experiments import report
    from seps.retrieval.experiments.suites import ABLATION

    found = {}
    for name in ("ablation.jsonl", "ablation-cpu.jsonl"):
        found.update({(run["name"], run["seed"]): run for run in files.lines(name)})
    summary = report.summarise(list(found.values()), ABLATION)

    def of(row: str, key: str) -> tuple[Any, Any]:
        figure = summary[row].get(key)
        other = summary.get(ABLATION[row].reference or "", {}).get(key)
        return figure, figure.minus(other) if figure is not None and other is not None else None

    return of


def differences(language: str, files: Results) -> str:
    """The seven differences, the paper as a whole and the published code as it is."""
    source = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    of, verdicts = figures_of(files), source["verdicts"][language]
    rows = []
    for entry in source["differences"]:
        paper, code, said, choice = entry[language]
        option = entry.get(f"{language}_option", entry["option"])
        same = verdicts["same"] if entry.get("same") else None
        cells = ["<br>".join(measured(of(name, key)[1], verdicts, same) for name in entry["rows"]) for key in KEYS]
        names = "<br>".join(f"`{name}`" for name in entry["rows"])
        number, _, rest = paper.partition(" ") if paper[:1].isdigit() else ("", "", paper)
        rows.append([number, rest, code, option, said, names, *cells, choice])
    return table(source["columns"][language], rows)


def measured(difference: Any, verdicts: Mapping[str, str], same: str | None) -> str:
    """ "+4.0 ± 0.5, significant"; the empty text where nothing was measured."""
    if difference is None:
        return ""
    verdict = same or verdicts["clear" if difference.clear else "unclear"]
    return f"{difference.mean:+.1f} ± {difference.spread:.1f}, {verdict}"


def ranges(language: str, files: Results) -> str:
    """The settings whose ranges readers ask for: rSum of each row."""
    source = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["ranges"]
    of = figures_of(files)
    rows = []
    for entry in source["rows"]:
        found = [[of(name, key)[0] for name in entry["names"]] for key in KEYS]
        cells = ["<br>".join(f"{one.mean:.1f} ± {one.spread:.1f}" if one else "" for one in column) for column in found]
        rows.append([entry["setting"], entry["asked"][language], "<br>".join(f"`{n}`" for n in entry["names"]), *cells])
    return table(source["columns"][language], rows)


def purposes(language: str, files: Results) -> str:
    """Which mode is for whom."""
    source = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["purposes"]
    rows = []
    for entry in source["rows"]:
        purpose, why = entry[language]
        rows.append([purpose, entry.get(f"{language}_mode", entry["mode"]), why])
    return table(source["columns"][language], rows)


def costs(language: str, files: Results) -> str:
    """What each option costs: more parameters, and the times of a training step and of a pair as multiples of base."""
    source = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["costs"]
    measured = {row["option"]: row for row in files.json("options-cpu.json")["rows"]}
    rows = []
    for entry in source["rows"]:
        row = measured[entry["name"]]
        more = f"{row['parameters'] - measured['base']['parameters']:+,}".replace("+0", "0")
        times = [f"x {row[f'{what}_ratio']:g}" for what in ("step", "pair")]
        rows.append([entry["number"], entry["option"], more, *times])
    return table(source["columns"][language], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "differences": partial(differences, "en"),
    "differences-zh": partial(differences, "zh"),
    "ranges": partial(ranges, "en"),
    "ranges-zh": partial(ranges, "zh"),
    "purposes": partial(purposes, "en"),
    "costs": partial(costs, "en"),
    "costs-zh": partial(costs, "zh"),
    "purposes-zh": partial(purposes, "zh"),
}
