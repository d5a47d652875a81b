"""The tables of docs/performance.md are made of docs/results; tests on a GPU are recorded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Benchmarks and tools are no part of the installed package.
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarks import on_gpu
from benchmarks.speed import kernel_tests
from doc_blocks import ROOT
from figures import TABLES
from figures.raw import Results

RESULTS = ROOT / "docs/results"


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """The tables of this page."""
    return {name: make(Results(folder)) for name, make in TABLES.items()}


def test_a_report_of_pytest_is_counted_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.mark.skip\ndef test_left(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_error(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), f"--junitxml={report}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    counted = kernel_tests.counted(report)
    assert (counted["passed"], counted["failed"], counted["skipped"]) == (1, 2, 1)
    assert counted["names_of_failed"] == ["test_some::test_bad", "test_some::test_error"]
    out = tmp_path / "results/kernel-tests.json"
    common = {"date": "2026-01-02", "commit": "abc", "device": "a GPU", "torch": "2", "triton": "3"}
    kernel_tests.recorded(out, {**common, **counted, "commit": "earlier"})
    kernel_tests.recorded(out, {**common, **counted})
    shutil.copytree(RESULTS, out.parent, dirs_exist_ok=True, ignore=lambda _, names: ["kernel-tests.json"])
    made = tables(out.parent)["kernel-tests"]
    assert "`abc`" in made and "test_some::test_error" in made and "earlier" not in made


def test_the_gpu_tests_are_those_that_may_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernel_tests.selected()
    assert chosen[: len(kernel_tests.KERNELS)] == kernel_tests.KERNELS and len(chosen) == len(kernel_tests.KERNELS) + 3
    assert all((ROOT / name.partition("::")[0]).exists() for name in chosen)
    monkeypatch.setattr(kernel_tests.importlib.util, "find_spec", lambda name: None)
    assert set(kernel_tests.selected()) == {path for path in kernel_tests.KERNELS if "held" not in path}
    assert kernel_tests.missing() == ["torch", "triton", "pytest"]


@pytest.mark.parametrize("absent", [["pytest"], []])
def test_what_is_missing_is_told_in_a_sentence(
    absent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_tests", "--out", str(tmp_path / "out.json")])
    monkeypatch.setattr(kernel_tests, "missing", lambda: absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        kernel_tests.main()
    told = capsys.readouterr().err
    assert end.value.code == 2 and not (tmp_path / "out.json").exists()
    assert ("pytest" if absent else "GPU") in told


def test_a_part_that_fails_leaves_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "defaults-h200.jsonl").write_text("as it was")
    monkeypatch.setattr(on_gpu, "parts", lambda commit: {"coco": ("defaults-h200.jsonl", ["benchmarks.no_such"])})
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        on_gpu.main()
    assert end.value.code == 1 and "coco" in capsys.readouterr().err
    assert (tmp_path / "defaults-h200.jsonl").read_text() == "as it was"
