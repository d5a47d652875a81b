"""The method: guidance, selection, aggregation, alignment, and the networks composed of them."""

from seps.nn.aggregation import DualTokenAggregation, TokenAggregation
from seps.nn.alignment import HRPA, mask_xattn_one_text
from seps.nn.checks import InputError
from seps.nn.image_side import ImageSide
from seps.nn.multimodal import MultiModalSDTPS
from seps.nn.pairing import score_published_pairing
from seps.nn.selection import TokenSparse
from seps.nn.slimming import PatchSlimming

__all__ = [
    "HRPA",
    "DualTokenAggregation",
    "ImageSide",
    "InputError",
    "MultiModalSDTPS",
    "PatchSlimming",
    "TokenAggregation",
    "TokenSparse",
    "mask_xattn_one_text",
    "score_published_pairing",
]
