"""The settings of a training run as `seps train` and `seps compare` read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.retrieval.config import RunConfig


def run_config() -> type[RunConfig]:
    """The dataclass, imported when it is asked for: it takes torch along."""
    from seps.retrieval.config import RunConfig

    return RunConfig


def load_recipe(files: str | Iterable[str] | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Files, then overrides. Files that `--print_config` of the first release wrote hold two options of the command."""
    from seps import settings

    return settings.load(run_config(), files, overrides, ignore=("out", "device"))
