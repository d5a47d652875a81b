"""What the process of a command need not load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Refuse:
    """A finder for which some packages are not installed."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def without_pandas() -> None:
    """Let pandas count as not installed in this process: PyArrow imports it wherever it is, and nothing here uses it.

    For a process that runs one short command. Not for one that others' code shares.
    """
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _Refuse("pandas"))
