"""Rows of a comparison against each other, image by image.

Of two rows that were trained with the same seeds the difference of what each image adds to rSum is averaged over the
seeds; a bootstrap over the images says how far its mean may be off. It knows the chance of the images, and that of
training as far as the seeds show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seps.retrieval.experiments.report import Result, key_order, table_row

DRAWS, _DRAWS_AT_ONCE = 10_000, 250


@dataclass(frozen=True)
class Difference:
    """How much higher one row is than another."""

    mean: float
    error: float
    """Standard error of the mean over the images."""
    p: float
    """Two-sided, of a paired bootstrap over the images; at least 1 in `DRAWS`."""
    seeds: int


def difference(results: Sequence[Result], row: str, other: str, key: str) -> Difference | None:
    """Of `row` over `other` in the figure `key` ("split/protocol"); None where no seed has both, image by image."""
    ours, theirs = (
        {result["seed"]: result["by_image"][key] for result in results if _has(result, name, key)}
        for name in (row, other)
    )
    seeds = sorted(seed for seed in ours if len(ours[seed]) == len(theirs.get(seed, ())))
    if not seeds:
        return None
    gaps = np.mean([np.subtract(ours[seed], theirs[seed]) for seed in seeds], axis=0)
    generator = np.random.default_rng(0)
    sizes = (_DRAWS_AT_ONCE, len(gaps))
    means = np.concatenate(
        [gaps[generator.integers(0, len(gaps), sizes)].mean(axis=1) for _ in range(DRAWS // _DRAWS_AT_ONCE)]
    )
    tail = min(float((means <= 0).mean()), float((means >= 0).mean()))
    return Difference(float(gaps.mean()), float(means.std()), min(1.0, max(2 * tail, 1 / DRAWS)), len(seeds))


def _has(result: Result, name: str, key: str) -> bool:
    return result["name"] == name and key in result.get("by_image", {})


def against(results: Sequence[Result], rows: Sequence[str], others: Sequence[str]) -> str:
    """One table per figure: those of `rows` that have results, and how much higher each is than each of `others`.

    Raises ValueError where a row of `others` has no result image by image.
    """
    known = {result["name"] for result in results if result.get("by_image")}
    missing = [name for name in others if name not in known]
    if missing:
        raise ValueError(
            f"--against {' '.join(missing)}: there is no result of it that says what each image adds to rSum. "
            "Train it, or name another row."
        )
    keys = sorted({key for result in results for key in result.get("by_image", {})}, key=key_order)
    return "\n".join([_LEGEND, *(_table(results, rows, others, key) for key in keys)])


_LEGEND = (
    "Differences in rSum image by image, averaged over the seeds that both rows have (in brackets how many), ± the\n"
    "standard error over the images, and p of a paired bootstrap over the images.\n"
)


def _table(results: Sequence[Result], rows: Sequence[str], others: Sequence[str], key: str) -> str:
    split, protocol = key.rsplit("/", 1)
    head = ["row", *(f"against {other}" for other in others)]
    lines = [f"### {split}, {protocol}", "", table_row(head), table_row(["---"] * len(head))]
    for name in rows:
        cells = [_cell(None if name == other else difference(results, name, other, key)) for other in others]
        if any(cells):
            lines.append(table_row([name, *cells]))
    return "\n".join(lines) + "\n"


def _cell(gain: Difference | None) -> str:
    if gain is None:
        return ""
    p = "p < 0.001" if gain.p < 0.001 else f"p = {gain.p:.3f}"
    return f"{gain.mean:+.1f} ± {gain.error:.1f}, {p} ({gain.seeds})"
