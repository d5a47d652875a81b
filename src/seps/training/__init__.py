"""Training shared by retrieval and re-identification: give `train` a task and a configuration.

Names are loaded when they are first asked for: whoever needs the settings or a checkpoint does not load the loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.training.checkpoint import CheckpointError, find_checkpoint, load_weights
    from seps.training.config import TrainConfig
    from seps.training.distributed import DistributedInfo, from_environment, process_group
    from seps.training.loop import TrainResult, train
    from seps.training.nonfinite import NonFiniteLossError
    from seps.training.task import CachedTask, Task

__all__ = [
    "CachedTask",
    "CheckpointError",
    "DistributedInfo",
    "NonFiniteLossError",
    "Task",
    "TrainConfig",
    "TrainResult",
    "find_checkpoint",
    "from_environment",
    "load_weights",
    "process_group",
    "train",
]
_HOMES = ("config", "checkpoint", "distributed", "nonfinite", "task", "loop")
"""The modules that define these names, the heaviest last."""


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"seps.training.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
