"""What a process of one command holds beside its own data."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_numpy_starts_no_threads_in_a_process_of_one_command() -> None:
    """Threads of NumPy's library that wait for each other took 3 ms of every indexed photo."""
    count = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    start = "from seps.memory import hold_little_memory; hold_little_memory(); "
    free = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    found = subprocess.run([sys.executable, "-c", start + count], env=free, check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["1"]
    chosen = {**free, "OPENBLAS_NUM_THREADS": "2"}
    made = start + "print(os.environ['OPENBLAS_NUM_THREADS'])"
    found = subprocess.run(
        [sys.executable, "-c", "import os; " + made], env=chosen, check=True, capture_output=True, text=True
    )
    assert found.stdout.split() == ["2"]
