"""Run the tests that need a GPU and record the result.

    python -m benchmarks.speed.kernel_tests [--out docs/results/kernel-tests.json]

Runs the tests of all kernels, and of the metrics those on a GPU, in several processes where pytest-xdist is, and adds
to the file: date, commit, device, versions, how many passed, failed and were skipped, and the names of those that
failed. docs/performance.md shows the last run. Needs pytest beside torch and triton, and
says so where one is missing; without hypothesis the tests that use it are left out. Its exit status is pytest's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
KERNELS = [
    *(f"tests/scoring/gpu/test_scoring_{name}.py" for name in ("kernels", "held", "pairs", "step_kernels")),
    *(f"tests/scoring/test_scoring_{name}.py" for name in ("maxima", "gradient")),
]
PROCESSES = 8
METRICS = "tests/metrics"
NEEDED = ("torch", "triton", "pytest")


def selected() -> list[str]:
    """What pytest is asked to run: every test of the kernels, and of the metrics those on a GPU."""
    if importlib.util.find_spec("hypothesis") is None:
        return [path for path in KERNELS if "hypothesis" not in (ROOT / path).read_text(encoding="utf-8")]
    found = [
        path for path in sorted((ROOT / METRICS).glob("test_*.py")) if "def test_gpu_equals_cpu" in path.read_text()
    ]
    return [*KERNELS, *(f"{path.relative_to(ROOT)}::test_gpu_equals_cpu" for path in found)]


def missing() -> list[str]:
    """Packages that the tests need and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def counted(report: Path) -> dict[str, Any]:
    """Passed, failed and skipped tests of a JUnit report, and which failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "names_of_failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def commit() -> str:
    """The commit of this tree, "unknown" where git cannot tell; `+` after it where files were changed."""
    try:
        told = [
            subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told[0] + ("+" if told[1] else "")


def recorded(out: Path, run: dict[str, Any]) -> None:
    """Add a run to the file."""
    known = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"runs": [*known, run]}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/kernel-tests.json")
    parser.add_argument("--commit", help="the commit, where this tree is a copy without git")
    options = parser.parse_args()
    absent = missing()
    if absent:
        parser.exit(2, f"The tests of the kernels need {' and '.join(absent)}, not installed here. Nothing was run.\n")
    import torch
    import triton

    if not torch.cuda.is_available():
        parser.exit(2, "There is no GPU here, and these tests are about one. Nothing was run.\n")
    tests = selected()
    with tempfile.TemporaryDirectory() as work:
        report = Path(work, "report.xml")
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        apart = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") else []
        command = [sys.executable, "-m", "pytest", "-q", *apart, *tests, f"--junitxml={report}"]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}).returncode
        if not report.exists():
            parser.exit(2, f"pytest ended with status {status} before any test ran. Nothing was recorded.\n")
        run = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": options.commit or commit(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "tests": tests,
            "exit_status": status,
            **counted(report),
        }
    recorded(options.out, run)
    print(f"{run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped on {run['device']}: {options.out}")
    sys.exit(status)


if __name__ == "__main__":
    main()
