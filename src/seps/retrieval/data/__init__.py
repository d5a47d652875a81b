"""Retrieval data: records, the formats they come in, checks, pixels, augmentation, batches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .augment import ImageAugment, augment_tokens
    from .batches import BatchIndices, epoch_batches, mixed_seed
    from .check import CheckReport, DataFault, check_dataset, drop_bad
    from .jsonl import NothingDescribed, attach_dense, load_jsonl, save_jsonl
    from .pixels import decode_all
    from .published import load_data, load_published
    from .records import ImageRecord, RetrievalDataset

__all__ = [
    "BatchIndices",
    "CheckReport",
    "DataFault",
    "ImageAugment",
    "ImageRecord",
    "NothingDescribed",
    "RetrievalDataset",
    "attach_dense",
    "augment_tokens",
    "check_dataset",
    "decode_all",
    "drop_bad",
    "epoch_batches",
    "load_data",
    "load_jsonl",
    "load_published",
    "mixed_seed",
    "save_jsonl",
]
_HOMES = {
    "augment": ("ImageAugment", "augment_tokens"),
    "batches": ("BatchIndices", "epoch_batches", "mixed_seed"),
    "check": ("CheckReport", "DataFault", "check_dataset", "drop_bad"),
    "jsonl": ("NothingDescribed", "attach_dense", "load_jsonl", "save_jsonl"),
    "pixels": ("decode_all",),
    "published": ("load_data", "load_published"),
    "records": ("ImageRecord", "RetrievalDataset"),
}


def __getattr__(name: str) -> Any:
    # What indexing reads of a folder needs no torch, which most of these import.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"seps.retrieval.data.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
