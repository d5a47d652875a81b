"""What a command does not load: torch before its options are known, the training loop for a search, pandas."""

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


def test_options_are_known_without_torch() -> None:
    """The choices of these commands are those of the settings, which load in a moment."""
    code = "import sys; from seps.cli.main import parser_of; [*map(parser_of, ('eval', 'index', 'train', 'reid'))]; "
    code += "import seps.retrieval.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_search_does_not_load_the_training_loop() -> None:
    code = "import sys, seps.retrieval.index.search, seps.retrieval.pretrained; "
    code += "sys.exit('seps.training.loop' in sys.modules or 'seps.retrieval.train.run' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
