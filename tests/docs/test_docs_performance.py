"""The tests that need a GPU are those that `benchmarks.speed.kernel_tests` runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Benchmarks are no part of the installed package.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.speed import kernel_tests
from doc_blocks import ROOT


def test_the_gpu_tests_are_those_that_may_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernel_tests.selected()
    assert chosen[: len(kernel_tests.KERNELS)] == kernel_tests.KERNELS and len(chosen) == len(kernel_tests.KERNELS) + 3
    assert all((ROOT / name.partition("::")[0]).exists() for name in chosen)
    monkeypatch.setattr(kernel_tests.importlib.util, "find_spec", lambda name: None)
    assert set(kernel_tests.selected()) == {path for path in kernel_tests.KERNELS if "held" not in path}
    assert kernel_tests.missing() == ["torch", "triton", "pytest"]
