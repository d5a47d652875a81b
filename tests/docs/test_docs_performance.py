"""The tables of docs/performance.md are made of docs/results; tests on a GPU are recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import on_gpu
from benchmarks.page import TABLES
from benchmarks.page.raw import Results
from benchmarks.speed import kernel_tests
from doc_blocks import ROOT

_ANSWERS = {"**yes**", "yes, but for the model", "no", "—"}


RESULTS = ROOT / "docs/results"


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """The tables of this page."""
    return {name: make(Results(folder)) for name, make in TABLES.items() if name != "ablation"}


def test_every_row_says_whether_it_is_the_default_call() -> None:
    jobs = [name for name in tables() if name not in ("kernels", "gradients", "indexing-steps", "kernel-tests")]
    for name, made in tables().items():
        lines = [
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in made.splitlines() if line[:1] == "|"
        ]
        if name in jobs:
            place = lines[0].index("default call?")
            assert len(lines) > 3 and {line[place] for line in lines[2:]} <= _ANSWERS, name
            assert all(len(line) == len(lines[0]) for line in lines), name


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
    assert "| 2026-01-02 | `abc` | a GPU | 1 | 2 | 1 |" in made and "test_some::test_error" in made
    assert "earlier" not in made
    out.write_text('{"runs": []}')
    assert "not recorded yet" in tables(out.parent)["kernel-tests"]


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
    assert ("need pytest, not installed here" if absent else "There is no GPU here") in told


def test_a_part_that_fails_leaves_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "defaults-h200.jsonl").write_text("as it was")
    monkeypatch.setattr(on_gpu, "parts", lambda commit: {"coco": ("defaults-h200.jsonl", ["benchmarks.no_such"])})
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        on_gpu.main()
    assert end.value.code == 1 and "Failed: coco (status 1)." in capsys.readouterr().err
    assert (tmp_path / "defaults-h200.jsonl").read_text() == "as it was"


def test_plain_maxsim_of_the_same_run_replaces_what_was_measured_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results/defaults-h200.jsonl"
    own = [line for line in path.read_text().splitlines() if '"peer"' not in line]
    few = {"images": 5000, "captions": 25000, "peak_mib": 900.0, "largest_difference": 2e-3}

    def made(*peers: dict[str, object]) -> str:
        path.write_text("\n".join([*own, *(json.dumps({**few, **peer}) for peer in peers)]) + "\n")
        return tables(tmp_path / "results")["coco"]

    torch_row = {"peer": "torch 2.11", "package": "torch", "tokens": 197, "seconds": 3.0, "captions_timed": 2500}
    peer = {**torch_row, "peer": "late-interaction-kernels 0.4.6", "package": "late-interaction-kernels"}
    assert "6.26" in made() and "the same run" not in made()
    assert "6.26" in made(torch_row) and "timed on 2,500 captions and scaled | — | 3.00 |" in made(torch_row)
    both = made(torch_row, {**peer, "seconds": 5.55, "captions_timed": 25000})
    assert "6.26" not in both and "published code" in both and "at most 2.0e-03" in both
    row = next(line for line in both.splitlines() if "5.55" in line)
    assert "197 tokens per image | — | 5.55 | 900 MiB |" in row and "the same run, [raw]" in row


def test_indexing_on_a_gpu_shows_its_steps_and_its_limit(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results/indexing-h200.json"
    path.unlink(missing_ok=True)
    (tmp_path / "results/indexing-cpu.json").write_text('{"rows": []}')
    assert "not recorded yet" in tables(tmp_path / "results")["indexing-steps"]
    steps = {"decoding": 6.5, "waiting": 1.25, "encoding": 0.31, "levels": 0.4, "packing": 0.2, "writing": 0.1}
    row = {"model": "base", "workers": None, "photos": 4000, "photos_per_second": 800.0, "steady": 1500.5}
    row |= {"starting": 1.5, "finishing": 0.6, "step_ms": steps, "device_waits": 0.25, "processor_ms": 9.0}
    both = [row, {**row, "model": "mini", "steady": None}]
    path.write_text(json.dumps({"rows": both, "encoder_alone": {"base": 9876.4}}))
    made = tables(tmp_path / "results")
    assert "| 800.0 | 1500.5 | 1.00 | 1.00 | 25% |" in made["indexing"] and "| 800.0 |  |" in made["indexing"]
    assert "alone, batches of 32 in the memory of the GPU | — | one H200 | 9,876 |" in made["indexing"]
    assert "was not computed" not in made["indexing"]
    told = "| `base`, one H200, 4,000 photos | 6.50 | 1.25 | 0.31 | 0.40 | 0.20 | 0.10 | 1.5 s | 0.6 s |"
    assert told in made["indexing-steps"]
