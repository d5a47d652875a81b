"""Tables and picture of a comparison from its lines of results alone.

Figures with spread, their difference to the row they change, and what training did.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seps.parsing import as_object, parse_json
from seps.retrieval.config import PROTOCOLS
from seps.retrieval.experiments.suites import Suite

Result = Mapping[str, Any]
_CLEAR, _UNCLEAR = "#2f6f9f", "#b9c4cc"
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t, 95 % two-sided, by degrees of freedom from 1 on; the last one serves for more."""


@dataclass(frozen=True)
class Figure:
    """A figure of each seed."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values.values())

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds, 0 of one (which is not printed: one figure has none)."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else 0.0

    @property
    def error(self) -> float:
        """How far the mean may be off, with 95 % confidence; infinite with one seed."""
        freedom = len(self.values) - 1
        if not freedom:
            return math.inf
        return _STUDENT[min(freedom, len(_STUDENT)) - 1] * self.spread / math.sqrt(len(self.values))

    @property
    def clear(self) -> bool:
        """Whether the mean differs from zero by more than its error."""
        return abs(self.mean) > self.error

    def minus(self, other: Figure) -> Figure | None:
        """The difference seed by seed: what both share (weights at the start, order of the data) cancels."""
        shared = {seed: value - other.values[seed] for seed, value in self.values.items() if seed in other.values}
        return Figure(shared) if shared else None


def finished(path: Path) -> list[dict[str, Any]]:
    """Results written before; a torn line is left out, and a run made again counts as the last time.

    Raises ValueError for a line that is whole and no result.
    """
    if not path.is_file():
        return []
    results = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            result = as_object(parse_json(line))
        except ValueError:
            continue
        if not {"name", "seed", "rsum"} <= set(result):
            raise ValueError(
                f"{path}, line {number}: not a result of seps compare. Take the line out, or choose another folder."
            )
        results[result["name"], result["seed"]] = result
    return list(results.values())


def summarise(results: Sequence[Result], suite: Suite) -> dict[str, dict[str, Figure]]:
    """By variant, in the suite's order, and "split/protocol": the figures of its seeds."""
    table: dict[str, dict[str, Figure]] = {}
    for name in suite:
        mine = [result for result in results if result["name"] == name]
        keys = sorted({key for result in mine for key in result["rsum"]}, key=key_order)
        if mine:
            table[name] = {key: Figure({r["seed"]: r["rsum"][key] for r in mine if key in r["rsum"]}) for key in keys}
    return table


def key_order(key: str) -> tuple[str, int]:
    """Where "split/protocol" stands among the columns."""
    split, protocol = key.rsplit("/", 1)
    return split, PROTOCOLS.index(protocol)


def markdown(results: Sequence[Result], suite: Suite) -> str:
    """The whole report: one table, or, for a suite with groups, one per group and one of what training did."""
    table = summarise(results, suite)
    groups = list(dict.fromkeys(variant.group for variant in suite.values()))
    if groups == [""]:
        return _plain(table, suite)
    texts = [_group(group, table, results, suite) for group in groups]
    return "\n".join([_legend(results), *filter(None, texts), _training(table, results, suite)])


def _legend(results: Sequence[Result]) -> str:
    together = "/".join(map(str, sorted({result.get("processes", 1) for result in results})))
    return (
        "rSum, mean ± standard deviation over the seeds. In brackets the difference to the row it differs from, taken "
        "seed by seed,\nwith its standard deviation; bold where a paired t-test calls it clear (95 %: of twenty "
        "changes that do nothing, one is bold).\n"
        f"Milliseconds a step are the median of a run, with {together or 1} at a time on the machine.\n"
    )


def _plain(table: Mapping[str, Mapping[str, Figure]], suite: Suite) -> str:
    """One line per variant and protocol, one column per data set."""
    splits = sorted({key.rsplit("/", 1)[0] for figures in table.values() for key in figures})
    lines = [
        table_row(["model", "protocol", *(f"rSum {split}" for split in splits)]),
        table_row(["---"] * (2 + len(splits))),
    ]
    for name, figures in table.items():
        for protocol in PROTOCOLS:
            cells = [figures.get(f"{split}/{protocol}") for split in splits]
            if any(cells):
                shown = [_with_spread(f"{cell.mean:.1f}", cell, " ") if cell else "" for cell in cells]
                lines.append(table_row([f"**{name}**: {suite[name].title}", protocol, *shown]))
    return "\n".join(lines) + "\n"


def rows_of(group: str, table: Mapping[str, Any], suite: Suite) -> list[str]:
    """The variants of a group that have results, those they refer to first."""
    members = [name for name in table if suite[name].group == group]
    references = [suite[name].reference for name in members]
    first = [name for name in dict.fromkeys(references) if name is not None and name in table]
    return [*first, *(name for name in members if name not in first)]


def _group(group: str, table: Mapping[str, Mapping[str, Figure]], results: Sequence[Result], suite: Suite) -> str:
    """rSum ± spread (difference to the reference, bold where it is clear), time and parameters."""
    names = rows_of(group, table, suite)
    if not names:
        return ""
    keys = sorted({key for name in names for key in table[name]}, key=key_order)
    keys = [key for key in keys if not key.endswith("/published") or _compared(key, names, table, suite)]
    head = ["row", "differs from", *(key.replace("/", ", ") for key in keys), "ms a step", "parameters", "seeds"]
    lines = [f"### {group}", "", table_row(head), table_row(["---"] * len(head))]
    for name in names:
        own = suite[name].group == group
        reference = suite[name].reference if own else None
        against = table.get(reference or "", {})
        mine = [result for result in results if result["name"] == name]
        cells = [_cell(table[name].get(key), against.get(key)) for key in keys]
        step = _mean(mine, lambda result: result.get("step_ms"))
        lines.append(
            table_row(
                [
                    f"**{name}**: {suite[name].title}",
                    reference or "",
                    *cells,
                    "" if step is None else f"{step:.0f}",
                    f"{mine[0].get('head_parameters', 0):,}",
                    str(len(mine)),
                ]
            )
        )
    return "\n".join(lines) + "\n"


def _compared(key: str, names: Sequence[str], table: Mapping[str, Mapping[str, Figure]], suite: Suite) -> bool:
    """Whether some row and the row it differs from both have this figure."""
    return any(key in table[name] and key in table.get(suite[name].reference or "", {}) for name in names)


def _cell(figure: Figure | None, reference: Figure | None) -> str:
    if figure is None:
        return ""
    difference = None if reference is None else figure.minus(reference)
    shown = _with_spread(f"{figure.mean:.1f}", figure)
    if difference is None:
        return shown
    mark = "**" if difference.clear else ""
    return f"{shown} ({_with_spread(f'{mark}{difference.mean:+.1f}{mark}', difference)})"


def _with_spread(mean: str, figure: Figure, space: str = "\N{NO-BREAK SPACE}") -> str:
    """ "mean ± deviation", or the mean alone where there is one seed: one figure has no deviation.

    With non-breaking spaces a narrow column breaks between figures, not within one.
    """
    return f"{mean}{space}±{space}{figure.spread:.1f}" if len(figure.values) > 1 else mean


def _training(table: Mapping[str, Any], results: Sequence[Result], suite: Suite) -> str:
    """What training did: means over the seeds, "first -> last" where a figure moves."""
    columns: dict[str, Callable[[list[Result]], str]] = {
        "gradient at patches": lambda mine: _number(mine, lambda r: (r.get("gradient") or {}).get("norm"), "{:.2g}"),
        "patches reached": lambda mine: _number(mine, lambda r: (r.get("gradient") or {}).get("share"), "{:.1%}"),
        "gradient norm, median": lambda mine: _number(mine, lambda r: r.get("median_gradient"), "{:.2g}"),
        "largest": lambda mine: _number(mine, lambda r: r.get("largest_gradient"), "{:.2g}"),
        "loss": lambda mine: _moved(mine, "loss"),
        "kept": lambda mine: _moved(mine, "kept"),
        "kept, description's branch": lambda mine: _moved(mine, "kept_dense"),
        "kept at test": lambda mine: _number(mine, lambda r: r.get("kept_at_test"), "{:.3f}"),
        "ratio loss": lambda mine: _moved(mine, "ratio"),
        "not finite": lambda mine: str(sum(r.get("nonfinite") is not None for r in mine) or ""),
    }
    lines = ["### what training did", "", table_row(["row", *columns]), table_row(["---"] * (1 + len(columns)))]
    for name in table:
        mine = [result for result in results if result["name"] == name]
        lines.append(table_row([name, *(show(mine) for show in columns.values())]))
    return "\n".join(lines) + "\n"


def _mean(results: Sequence[Result], get: Callable[[Result], float | None]) -> float | None:
    values = [value for value in map(get, results) if value is not None]
    return statistics.fmean(values) if values else None


def _number(results: Sequence[Result], get: Callable[[Result], float | None], form: str) -> str:
    value = _mean(results, get)
    return "" if value is None else form.format(value)


def _moved(results: Sequence[Result], name: str) -> str:
    pairs = [result[name] for result in results if name in result]
    if not pairs:
        return ""
    first, last = (statistics.fmean(pair[end] for pair in pairs) for end in (0, 1))
    return f"{first:.3f} → {last:.3f}"


def table_row(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def plot_differences(results: Sequence[Result], suite: Suite, path: Path) -> bool:
    """Write the bars to `path`; False without matplotlib, or when no row has a reference to differ from."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return False
    table = summarise(results, suite)
    names = [name for name in table if (suite[name].reference or "") in table]
    splits = sorted({key.rsplit("/", 1)[0] for name in names for key in table[name]})
    keys = [f"{split}/{protocol}" for split in splits for protocol in PROTOCOLS[:2]]
    if not names:
        return False
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    size = (3 + 3 * len(keys), 1.5 + 0.24 * len(names))
    figure, axes = pyplot.subplots(1, len(keys), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, key in zip(axes[0], keys, strict=True):
        _bars(axis, key, names, table, suite)
    axes[0][0].set_yticks(range(len(names)), [f"{name}  (from {suite[name].reference})" for name in names], fontsize=7)
    axes[0][0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(
        "Difference in rSum to the row it changes, seed by seed, with its standard deviation; dark: clear (95 %)",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _bars(axis: Any, key: str, names: Sequence[str], table: Any, suite: Suite) -> None:
    axis.axvline(0, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        own, reference = table[name].get(key), table[suite[name].reference].get(key)
        if place and suite[name].group != suite[names[place - 1]].group:
            axis.axhline(place - 0.5, color="#d0d0d0", linewidth=0.6)
        if own is None or reference is None:
            continue
        difference = own.minus(reference)
        if difference is None:
            continue
        colour = _CLEAR if difference.clear else _UNCLEAR
        axis.barh(place, difference.mean, xerr=difference.spread, color=colour, error_kw={"linewidth": 0.8})
    split, protocol = key.rsplit("/", 1)
    axis.set_title(f"{split}, {'no description' if protocol == 'none' else 'description with the image'}", fontsize=8)
    # A description is worth a hundred times what most other changes are: linear near zero, logarithmic beyond.
    axis.set_xscale("symlog", linthresh=10)
    ticks = (-100, -10, -5, 0, 5, 10, 100)
    axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=7)
    axis.minorticks_off()
