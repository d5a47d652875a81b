"""Training shared by retrieval and re-identification: give `train` a task and a configuration."""

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
