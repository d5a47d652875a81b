"""Pretrained vision and text encoders behind one small interface."""

from .freezing import freeze, unfreeze
from .mini import EfficientNetLite0, mini_text_folder
from .registry import PRESETS, preset_names, text_encoder, vision_encoder
from .text import TextBatch, TextEncoder
from .vision import Preprocessing, VisionEncoder
from .weights import EncoderUnavailable, to_safetensors

__all__ = [
    "PRESETS",
    "EfficientNetLite0",
    "EncoderUnavailable",
    "Preprocessing",
    "TextBatch",
    "TextEncoder",
    "VisionEncoder",
    "freeze",
    "mini_text_folder",
    "preset_names",
    "text_encoder",
    "to_safetensors",
    "unfreeze",
    "vision_encoder",
]
