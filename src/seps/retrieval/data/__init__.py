"""Retrieval data: records, the formats they come in, checks, pixels, augmentation, batches."""

from .augment import ImageAugment, augment_tokens
from .batches import BatchIndices, epoch_batches, mixed_seed
from .check import CheckReport, DataFault, check_dataset, drop_bad
from .images import ImageReader, Mode, decode_all, read_image
from .jsonl import NothingDescribed, attach_dense, load_jsonl, save_jsonl
from .published import load_data, load_published
from .records import DataError, ImageRecord, ImageSource, RetrievalDataset
from .shards import UnreadableImage, read_source, shard_is_whole, shard_members

__all__ = [
    "BatchIndices",
    "CheckReport",
    "DataError",
    "DataFault",
    "ImageAugment",
    "ImageReader",
    "ImageRecord",
    "ImageSource",
    "Mode",
    "NothingDescribed",
    "RetrievalDataset",
    "UnreadableImage",
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
    "read_image",
    "read_source",
    "save_jsonl",
    "shard_is_whole",
    "shard_members",
]
