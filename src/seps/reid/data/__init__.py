"""Re-identification data: layouts, reading, sampling, augmentation."""

from seps.reid.data.layouts import LAYOUTS, load
from seps.reid.data.reader import ReidReader, read_record
from seps.reid.data.records import Problem, ReidDataError, ReidDataset, ReidRecord, ReidReport, Source, holdout
from seps.reid.data.sampler import IdentityBatches, epoch_plan
from seps.reid.data.transforms import Augmentation, Draw

__all__ = [
    "LAYOUTS",
    "Augmentation",
    "Draw",
    "IdentityBatches",
    "Problem",
    "ReidDataError",
    "ReidDataset",
    "ReidReader",
    "ReidRecord",
    "ReidReport",
    "Source",
    "epoch_plan",
    "holdout",
    "load",
    "read_record",
]
