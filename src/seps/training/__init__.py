"""Training shared by retrieval and re-identification: give `train` a task and a configuration."""

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


def __getattr__(name: str) -> Any:
    # On first use: the settings of a run are read, and listed by --help, without torch.
    if name in __all__:
        for home in ("config", "task", "checkpoint", "distributed", "nonfinite", "loop"):
            module = importlib.import_module(f"seps.training.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
