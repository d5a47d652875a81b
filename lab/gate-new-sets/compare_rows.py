"""The rule of this study on its runs: `python compare_rows.py RUNS`, at the commit of the study's code.

RUNS holds runs.jsonl, or gate-new-sets.jsonl.gz under the name runs.jsonl.gz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from benchmarks.reid_selection import read_lines
from benchmarks.selection.stats import by_row, compare, mean_error

GATE, RANDOM = "first-pooled-25", "early-random-25"
rows = by_row(read_lines(Path(sys.argv[1]) / "runs.jsonl"))
both = sorted(rows[GATE].keys() & rows[RANDOM].keys())
gate, random = ({run: rows[name][run] for run in both} for name in (GATE, RANDOM))
print("| set | gate | random | difference |\n|---|---:|---:|---:|")
for run in both:
    first, second = (float(np.mean(runs[run]["ap"]["2"])) for runs in (gate, random))
    print(f"| {run[0]} | {first:.1f} | {second:.1f} | {first - second:+.1f} |")
for pattern in "213":
    found = compare(gate, random, pattern)
    (first, first_error), (second, second_error) = mean_error(gate, pattern), mean_error(random, pattern)
    print(
        f"pattern {pattern}: {first:.2f} ± {first_error:.2f} against {second:.2f} ± {second_error:.2f}, "
        f"{found.mean:+.2f} ± {found.error:.2f}; p {found.p_identities:.3f} over identities, "
        f"{found.p_sets:.3f} over sets and identities"
    )
for name, runs in ((GATE, gate), (RANDOM, random)):
    print(
        name,
        {kind: round(float(np.mean([run["kept"][kind] for run in runs.values()])), 2) for kind in ("figure", "blind")},
    )
