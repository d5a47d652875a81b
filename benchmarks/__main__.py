"""`python -m benchmarks list`: every benchmark, what it measures, how long it takes and what it needs."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

HERE = Path(__file__).parent
RUNS: dict[str, tuple[str, str]] = {
    "on_gpu": ("ten minutes", "GPU"),
    "speed": ("minutes", "GPU or CPU"),
    "speed.cores": ("two minutes", "CPU"),
    "speed.defaults": ("minutes", "GPU"),
    "speed.kernel_tests": ("minutes", "GPU"),
    "speed.options": ("minutes", "CPU"),
    "speed.streaming": ("minutes", "CPU, 0.4 GB of disk"),
    "search.cold_start": ("minutes", "CPU"),
    "search.gallery": ("an hour", "CPU, data"),
    "search.million": ("hours", "CPU, data, 13 GB of disk"),
    "search.peers": ("minutes", "CPU, data, 5 GB of disk"),
    "search.serving": ("two minutes", "CPU, a store"),
    "index.environment": ("seconds", "an environment"),
    "index.indexing": ("minutes", "GPU or CPU"),
    "index.kills": ("a quarter of an hour", "CPU, data"),
    "quality.bank": ("minutes", "CPU, data"),
    "quality.duplicates": ("minutes", "CPU, data"),
    "quality.faithful": ("minutes", "CPU, data"),
    "quality.metadata": ("minutes", "CPU, data"),
    "quality.ocr": ("minutes", "CPU, data"),
    "quality.partly_described": ("minutes", "CPU, data"),
    "quality.sizes": ("minutes", "CPU, data"),
    "quality.typed": ("minutes", "CPU, data"),
    "quality.typed_forms": ("minutes", "CPU, a store"),
    "quality.typed_seeds": ("minutes", "CPU, a store"),
    "quality.typed_sheets": ("minutes", "CPU, a store"),
    "quality.vectors": ("minutes", "CPU, data"),
}
"""By module: the order of magnitude of its time on two CPU cores or one H200, and what it needs."""


def what(name: str) -> str:
    """The first line of a benchmark's docstring; the module is not imported."""
    path = HERE / name.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["list"], default="list")
    parser.parse_args()
    for name, (time, needs) in RUNS.items():
        print(f"python -m benchmarks.{name}\n    {what(name)}\n    {time}; {needs}")


if __name__ == "__main__":
    main()
