"""What the process of a command need not load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NoPandas(MetaPathFinder, Loader):
    """Finds pandas, and fails to import it.

    It must not fail where it is only looked for: torch calls `importlib.util.find_spec` for a list of packages and
    expects an answer.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of this one package."""
        return ModuleSpec(name, self) if name == "pandas" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Refuse, as for a package that is not installed."""
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Never called: there is no module."""


def without_pandas() -> None:
    """Let `import pandas` fail in this process: PyArrow imports it wherever it is installed, and nothing here uses it.

    For a process that runs one short command. Not for one that others' code shares.
    """
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas())
