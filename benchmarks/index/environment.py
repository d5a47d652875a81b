"""What an environment weighs: the folders of its packages, largest first.

    python -m venv fresh && fresh/bin/pip install -c constraints.txt .
    python -m benchmarks.index.environment fresh > docs/results/environment-cpu.txt
    fresh/bin/pip install -c constraints.txt ".[torch]"
    python -m benchmarks.index.environment fresh > docs/results/environment-torch.txt

Sizes are those of the files, in units of a million bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

LARGEST = 8


def weight(path: Path) -> int:
    """Bytes of all files below `path`; a link has none."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def main() -> None:
    """Print the total and the largest packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="folder of a virtual environment")
    environment = parser.parse_args().environment
    packages: dict[str, int] = {}
    for place in environment.glob("lib/python*/site-packages/*"):
        # Libraries that a wheel carries lie in NAME.libs, its metadata in NAME-VERSION.dist-info.
        name = place.name.removesuffix(".dist-info").split("-")[0].removesuffix(".libs")
        packages[name] = packages.get(name, 0) + weight(place)
    print(f"{sum(packages.values()) / 1e6:.0f} MB in all")
    for name in sorted(packages, key=packages.__getitem__, reverse=True)[:LARGEST]:
        print(f"{packages[name] / 1e6:.0f} MB {name}")


if __name__ == "__main__":
    main()
