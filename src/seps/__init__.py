"""Semantic-Enhanced Patch Slimming (arXiv 2511.01390): let the text decide which image patches matter."""

from seps.compat import CrossSparseAggrNet, create_seps_model
from seps.config import ConfigError, LossConfig, SlimmingConfig
from seps.losses import ContrastiveLoss, InfoNCELoss, RatioLoss, SEPSLoss, SigmoidLoss
from seps.nn import (
    HRPA,
    DualTokenAggregation,
    ImageSide,
    InputError,
    MultiModalSDTPS,
    PatchSlimming,
    TokenAggregation,
    TokenSparse,
    mask_xattn_one_text,
    score_published_pairing,
)

__version__ = "0.1.0"

__all__ = [
    "HRPA",
    "ConfigError",
    "ContrastiveLoss",
    "CrossSparseAggrNet",
    "DualTokenAggregation",
    "ImageSide",
    "InfoNCELoss",
    "InputError",
    "LossConfig",
    "MultiModalSDTPS",
    "PatchSlimming",
    "RatioLoss",
    "SEPSLoss",
    "SigmoidLoss",
    "SlimmingConfig",
    "TokenAggregation",
    "TokenSparse",
    "create_seps_model",
    "mask_xattn_one_text",
    "score_published_pairing",
]
