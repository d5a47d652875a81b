"""`import seps` alone: cheap, and everything public can be reached from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import seps


def test_every_public_name_is_there():
    for name in seps.__all__:
        assert getattr(seps, name) is not None and name in dir(seps)


def test_rooms_are_reached_without_importing_them_first():
    program = (
        "import sys, seps\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(seps.metrics.cmc_map) and callable(seps.scoring.score_matrix)\n"
        "assert seps.retrieval.__name__ == 'seps.retrieval'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = seps.nothing
