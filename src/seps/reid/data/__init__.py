"""Re-identification data: layouts, sampling, augmentation, a synthetic set."""

from seps.reid.data.layouts import LAYOUTS, load
from seps.reid.data.reader import ReidReader, read_record
from seps.reid.data.records import (
    Problem,
    ReidDataError,
    ReidDataset,
    ReidRecord,
    ReidReport,
    Source,
    holdout,
)
from seps.reid.data.sampler import IdentityBatches, epoch_plan
from seps.reid.data.sheet import contact_sheet
from seps.reid.data.synthetic import make_synthetic
from seps.reid.data.transforms import Augmentation, Draw, augment

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
    "augment",
    "contact_sheet",
    "epoch_plan",
    "holdout",
    "load",
    "make_synthetic",
    "read_record",
]
