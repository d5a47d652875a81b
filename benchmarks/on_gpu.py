"""Everything of docs/performance.md that needs a GPU, in one command.

    python -m benchmarks.on_gpu [--results FOLDER] [--commit COMMIT] [--only NAME ...]

Runs the tests of the kernels, the default call at COCO's and at Flickr30K's size, the training step and indexing, one
after the other, each into a file of its own in docs/results (or FOLDER), and then writes the page. A part that fails is
told at the end and leaves its file as it was; the others go on. About ten minutes on an H200.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parts(commit: str | None) -> dict[str, tuple[str, list[str]]]:
    """By name of a part its file, and its command but for `--out`."""
    ray = [] if importlib.util.find_spec("ray") else ["--workers"]
    step = ["--only", "training", "--batch", "128", "1024", "--precision", "float32", "bfloat16"]
    return {
        "coco": ("defaults-h200.jsonl", ["benchmarks.speed.defaults", "--skip", "profile"]),
        "flickr": (
            "defaults-f30k-h200.jsonl",
            ["benchmarks.speed.defaults", "--images", "1000", "--captions", "5000", "--skip", "profile"],
        ),
        "training": ("training-h200.json", ["benchmarks.speed", *step]),
        "indexing": ("indexing-h200.json", ["benchmarks.index.indexing", "--photos", "4000", "--rounds", "3", *ray]),
        "tests": ("kernel-tests.json", ["benchmarks.speed.kernel_tests", *(["--commit", commit] if commit else [])]),
    }


def main() -> None:
    """Run all parts, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results")
    parser.add_argument("--commit", help="the commit, where this tree is a copy without git")
    parser.add_argument("--only", nargs="+", choices=sorted(parts(None)), help="some parts alone")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    failed = []
    with tempfile.TemporaryDirectory() as work:
        for name, (file, command) in parts(options.commit).items():
            if options.only and name not in options.only:
                continue
            # The tests add to what is recorded, also where one fails; the others replace their file as a whole.
            adds = name == "tests"
            made, target = Path(work, file), options.results / file
            run = [sys.executable, "-m", *command, "--out", str(target if adds else made)]
            print(f"$ python -m {' '.join(command)}", flush=True)
            status = subprocess.run(run, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}).returncode
            if status:
                failed.append(f"{name} (status {status})")
            elif not adds:
                target.write_bytes(made.read_bytes())
    if options.results.resolve() == ROOT / "docs/results":
        subprocess.run([sys.executable, "tools/printed.py", "write"], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    parser.exit(1 if failed else 0, f"Failed: {', '.join(failed)}.\n" if failed else "All parts are done.\n")


if __name__ == "__main__":
    main()
