"""The picture of a comparison: each row's difference to its reference, with spread, a panel a data set and protocol."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seps.experiments.entries import Suite
from seps.experiments.report import PROTOCOLS, Result, summarise

_CLEAR, _UNCLEAR = "#2f6f9f", "#b9c4cc"


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
