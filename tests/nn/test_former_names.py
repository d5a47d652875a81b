"""Modules that moved are still found under the names of the first release."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from seps._moved import MOVED, present_name


@pytest.mark.parametrize("former", [*MOVED, "retrieval.dense_text.config"])
def test_a_former_name_gives_the_same_objects(former: str) -> None:
    sys.modules.pop(f"seps.{former}", None)
    with pytest.warns(DeprecationWarning, match="now; import it from there"):
        module = importlib.import_module(f"seps.{former}")
    present = importlib.import_module(present_name(f"seps.{former}") or "")
    names = [name for name in vars(present) if not name.startswith("_")]
    assert names and all(getattr(module, name) is getattr(present, name) for name in names)


def test_imports_by_name_and_names_that_never_were() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from seps.retrieval.search import Searcher\n"
        "from seps.retrieval.dense_text.config import CaptionConfig\n"
        "from seps.hub import hub_folder\n"
        "from seps.retrieval.explain import shares\n"
        "import seps.retrieval.index.search as new\n"
        "assert Searcher is new.Searcher\n"
        "try:\n    import seps.retrieval.nonsense\nexcept ModuleNotFoundError:\n    print('right')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "right"
