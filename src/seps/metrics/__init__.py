"""Retrieval and re-identification metrics: functions on tensors, chunked, on any device."""

from .recall import (
    DirectionMetrics,
    RetrievalMetrics,
    five_fold,
    metrics_from_ranks,
    ranks,
    ranks_chunked,
    recall,
    rsum_by_image,
)
from .reid import ReidMetrics, cmc_map, reid_metrics
from .rerank import rerank
from .verification import Roc, accept_rate, roc, threshold_at

__all__ = [
    "DirectionMetrics",
    "ReidMetrics",
    "RetrievalMetrics",
    "Roc",
    "accept_rate",
    "cmc_map",
    "five_fold",
    "metrics_from_ranks",
    "ranks",
    "ranks_chunked",
    "recall",
    "reid_metrics",
    "rerank",
    "roc",
    "rsum_by_image",
    "threshold_at",
]
