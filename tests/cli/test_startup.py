"""What a command does not load: pandas; the other imports are in tests/test_imports.py."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    """What a fresh process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_pandas_cannot_be_imported_and_can_be_looked_for() -> None:
    """torch looks for a list of packages by `importlib.util.find_spec` as soon as transformers is used."""
    code = (
        "from seps.cli.shared.startup import without_pandas\n"
        "without_pandas()\n"
        "import importlib.util, sys\n"
        "importlib.util.find_spec('pandas')\n"
        "for name in ('pandas', 'pandas.core'):\n"
        "    try:\n        __import__(name)\n    except ModuleNotFoundError as error:\n        print(error.name)\n"
        "assert 'pandas' not in sys.modules"
    )
    assert run(code).split() == ["pandas", "pandas"]


def test_pandas_that_is_imported_stays() -> None:
    code = (
        "import sys, types; sys.modules['pandas'] = types.ModuleType('pandas')\n"
        "from seps.cli.shared.startup import without_pandas\n"
        "without_pandas(); import pandas; print(pandas.__name__)"
    )
    assert run(code) == "pandas"
