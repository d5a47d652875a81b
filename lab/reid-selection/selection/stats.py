"""Statistics of the study: paired bootstrap over identities and over data seeds, and the tables in Markdown.

Lines are those of `benchmarks.selection.runs`: for a row, a data seed and a seed the average precision of each query.
Differences are paired: the same set, the same seed, the same query. Seeds are averaged; identities are drawn anew
within each set, and, for the second p, the sets too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.selection.rows import ROWS, SWAPS, Row, keep_all_twin, random_twin

Floats = NDArray[np.float64]
Runs = dict[tuple[int, int], dict[str, Any]]
"""The lines of one row by (data seed, seed)."""
LEVEL, GOAL, GOAL_LEVEL = 0.05, 3.0, 0.01


@dataclass(frozen=True)
class Difference:
    """Of two rows, in mAP points: the mean; its standard error over the sets; two-sided p by bootstrap over
    identities, and over sets and identities; how many runs were paired."""

    mean: float
    error: float
    p_identities: float
    p_sets: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.error:.1f} ({shown(self.p_identities)}, {shown(self.p_sets)})"


def shown(p: float) -> str:
    """A p for a table."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def by_row(lines: Iterable[Mapping[str, Any]]) -> dict[str, Runs]:
    """Lines by row and run; of two lines of one run the later."""
    found: dict[str, Runs] = {}
    for line in lines:
        found.setdefault(line["row"], {})[line["data_seed"], line["seed"]] = dict(line)
    return found


def mean_error(runs: Runs, pattern: str) -> tuple[float, float] | None:
    """mAP of a row and its standard error over the sets (each the mean of its seeds)."""
    values: dict[int, list[float]] = {}
    for (data_seed, _), line in runs.items():
        if pattern in line["ap"]:
            values.setdefault(data_seed, []).append(float(np.mean(line["ap"][pattern])))
    if not values:
        return None
    means = np.array([np.mean(part) for part in values.values()])
    return float(means.mean()), _error(means)


def _error(means: Floats) -> float:
    return float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")


def identity_differences(left: Runs, right: Runs, left_pattern: str, right_pattern: str) -> dict[int, Floats]:
    """By data seed the difference of each identity: mean over its queries and over the seeds that both rows have."""
    found: dict[int, list[Floats]] = {}
    for run in sorted(left.keys() & right.keys()):
        a, b = left[run], right[run]
        if left_pattern not in a["ap"] or right_pattern not in b["ap"]:
            continue
        if a["pids"] != b["pids"]:
            raise ValueError(f"data seed {run[0]}: the rows were evaluated on other queries and cannot be paired.")
        pids = np.array(a["pids"])
        queries = np.array(a["ap"][left_pattern]) - np.array(b["ap"][right_pattern])
        counts = np.bincount(np.unique(pids, return_inverse=True)[1])
        sums = np.bincount(np.unique(pids, return_inverse=True)[1], weights=queries)
        found.setdefault(run[0], []).append(sums / counts)
    return {data_seed: np.mean(parts, axis=0) for data_seed, parts in found.items()}


def compare(
    left: Runs, right: Runs, pattern: str = "2", right_pattern: str | None = None, draws: int = 10000
) -> Difference | None:
    """`left` - `right` in mAP on a pattern; None where no run is of both."""
    differences = identity_differences(left, right, pattern, right_pattern or pattern)
    if not differences:
        return None
    sets = list(differences.values())
    means = np.array([part.mean() for part in sets])
    rng = np.random.default_rng(18)
    # Means of identities drawn anew, (draws, sets); then the mean over the sets, or over sets drawn anew.
    drawn = np.stack([part[rng.integers(len(part), size=(draws, len(part)))].mean(axis=1) for part in sets], axis=1)
    chosen = np.take_along_axis(drawn, rng.integers(len(sets), size=drawn.shape), axis=1)
    runs = len(left.keys() & right.keys())
    return Difference(float(means.mean()), _error(means), _p(drawn.mean(axis=1)), _p(chosen.mean(axis=1)), runs)


def _p(values: Floats) -> float:
    """Two-sided p that the mean is not zero."""
    below, above = (values <= 0).sum(), (values >= 0).sum()
    return float(min(1.0, 2 * (min(below, above) + 1) / (len(values) + 1)))


def helps(row: Row, rows: Mapping[str, Runs]) -> tuple[bool, bool] | None:
    """(selection helps, the goal is reached) for a row that selects without ground truth; None where a twin is missing.

    It helps if on the branch's own feature (pattern 2) it is above keeping everything and above keeping as many at
    random at the same place, both p < 0.05 over sets and identities. The goal: by at least 3 mAP, p < 0.01, and that
    above the random rows of all places: dropping before the first block at random is a weak opponent.
    """
    twin = random_twin(row)
    names = (keep_all_twin(row), twin)
    if twin is None or row.rule == "oracle" or any(name not in rows for name in (row.name, *names)):
        return None
    found = [compare(rows[row.name], rows[name]) for name in names if name is not None]
    complete = [part for part in found if part is not None]
    if len(complete) < 2:
        return None
    strongest = strongest_random(row, rows)
    hard = compare(rows[row.name], rows[strongest]) if strongest is not None else None
    return (
        all(part.mean > 0 and part.p_sets < LEVEL for part in complete),
        all(part.mean >= GOAL and part.p_sets < GOAL_LEVEL for part in (*complete, *([hard] if hard else []))),
    )


def strongest_random(row: Row, rows: Mapping[str, Runs]) -> str | None:
    """The best row that keeps as many at random, at whatever place; None where there is none."""
    found = [name for name, one in ROWS.items() if one.rule == "random" and one.ratio == row.ratio and name in rows]
    return max(found, key=lambda name: (mean_error(rows[name], "2") or (0.0, 0.0))[0], default=None)


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """The study in Markdown."""
    rows = by_row(lines)
    trained = [ROWS[name] for name in ROWS if name in rows]
    parts = ["# Does dropping patches pay?", _intro(rows), _main_table(trained, rows), _swap_table(rows)]
    parts += [_branch_table(trained, rows), _strongest_table(trained, rows), _verdict(trained, rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _intro(rows: Mapping[str, Runs]) -> str:
    runs = {run for found in rows.values() for run in found}
    sets, seeds = sorted({run[0] for run in runs}), sorted({run[1] for run in runs})
    lacking = {name: len(runs) - len(rows.get(name, {})) for name in ROWS if len(rows.get(name, {})) < len(runs)}
    missing = ", ".join(f"{name} ({number})" for name, number in lacking.items()) or "none"
    return (
        f"Data seeds {sets}, seeds {seeds}. Runs that are missing: {missing}. mAP in percent on the test identities, "
        "± standard error over the data seeds. Differences are paired by set, seed and query; in brackets two-sided p "
        "of a bootstrap over identities, then over data seeds and identities."
    )


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def _figure(runs: Runs, pattern: str) -> str:
    found = mean_error(runs, pattern)
    return "-" if found is None else f"{found[0]:.1f} ± {found[1]:.1f}"


def _kept(runs: Runs, kind: str) -> str:
    values = [line["kept"][kind] for line in runs.values() if line.get("kept")]
    return f"{100 * np.mean(values):.0f}%" if values else "-"


def _difference(left: Runs | None, right: Runs | None, pattern: str = "2", right_pattern: str | None = None) -> str:
    if left is None or right is None or left is right:
        return "-"
    return str(compare(left, right, pattern, right_pattern) or "-")


def _main_table(trained: Sequence[Row], rows: Mapping[str, Runs]) -> str:
    head = ["row", "kept", "of figure", "of blind", "original (1)", "branch (2)", "both (3)",
            "(2) - keep-all", "(2) - random", "(3) - concat"]  # fmt: skip
    lines = []
    for row in trained:
        runs, twin = rows[row.name], random_twin(row)
        keep_all = rows.get(keep_all_twin(row)) if row.branch != "none" else None
        last = "3" if row.branch != "none" else "1"
        lines.append([
            f"`{row.name}`", *(_kept(runs, kind) for kind in ("all", "figure", "blind")),
            *(_figure(runs, pattern) for pattern in "123"),
            _difference(runs, keep_all) if row.name != keep_all_twin(row) else "-",
            _difference(runs, rows.get(twin)) if twin else "-",
            _difference(runs, rows.get("concat"), last, "1") if row.name != "concat" else "-",
        ])  # fmt: skip
    return "## Rows\n\n" + _table(head, lines)


def _swap_table(rows: Mapping[str, Runs]) -> str:
    lines = [
        [f"`{swap.name}`", _figure(rows[swap.name], "2"), _difference(rows[swap.name], rows.get(swap.of)),
         _difference(rows[swap.name], rows.get(swap.row.name))]
        for swap in SWAPS if swap.name in rows
    ]  # fmt: skip
    if not lines:
        return ""
    head = ["weights evaluated as", "branch (2)", "- as trained", "- trained as evaluated"]
    return "## Trained one way, evaluated another\n\n" + _table(head, lines)


def _branch_table(trained: Sequence[Row], rows: Mapping[str, Runs]) -> str:
    """What the branch adds at test to the original feature of the same network."""
    lines = [
        [f"`{row.name}`", _figure(rows[row.name], "1"), _figure(rows[row.name], "3"),
         str(compare(rows[row.name], rows[row.name], "3", "1") or "-")]
        for row in trained if row.branch != "none"
    ]  # fmt: skip
    return "## What the branch adds at test\n\n" + _table(["row", "original (1)", "both (3)", "(3) - (1)"], lines)


def _strongest_table(trained: Sequence[Row], rows: Mapping[str, Runs]) -> str:
    """Rows that choose without the drawing, beside the best random row of their ratio."""
    lines = []
    for row in trained:
        strongest = strongest_random(row, rows)
        if row.rule in ("all", "random", "oracle", "sighted") or strongest is None:
            continue
        compared = _difference(rows[row.name], rows[strongest])
        lines.append([f"`{row.name}`", _figure(rows[row.name], "2"), f"`{strongest}`", compared])
    if not lines:
        return ""
    head = ["row", "branch (2)", "best random row", "difference"]
    return "## Against the best random row of the same ratio, at whatever place\n\n" + _table(head, lines)


def _verdict(trained: Sequence[Row], rows: Mapping[str, Runs]) -> str:
    judged = [(row, helps(row, rows)) for row in trained]
    found = [(row, verdict) for row, verdict in judged if verdict is not None]
    if not found:
        return ""
    lines = [
        f"- `{row.name}`: {'selection helps' if good else 'not shown to help'}{', the goal is met' if goal else ''}."
        for row, (good, goal) in found
    ]
    return (
        '## Verdict\n\n"Selection helps" is said if the branch\'s own feature (2) is above keep-all and above random '
        f"at the same place, both p < {LEVEL:g} over data seeds and identities; the goal: {GOAL:g} mAP above both and "
        f"above the random rows of all places, p < {GOAL_LEVEL:g}.\n\n" + "\n".join(lines)
    )
