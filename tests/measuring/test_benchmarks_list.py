"""`python -m benchmarks list` names every benchmark."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.__main__ import HERE, RUNS, what


def test_every_benchmark_is_listed() -> None:
    programs = set()
    for path in HERE.rglob("*.py"):
        if re.search(r"^def main\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            parts = path.relative_to(HERE).with_suffix("").parts
            programs.add(".".join(part for part in parts if part != "__main__"))
    assert programs - {""} == set(RUNS)
    assert all(what(name) for name in RUNS)
