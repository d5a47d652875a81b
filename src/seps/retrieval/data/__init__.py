"""Retrieval data: records, the formats they come in, checks, pixels, augmentation, batches."""

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
