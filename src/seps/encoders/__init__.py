"""Pretrained vision and text encoders behind one small interface."""

from .archives import read_tensors
from .dual import DUAL_PRESETS, DualEncoder, Embedder, dual_encoder
from .freezing import freeze, parameters_by_depth, unfreeze
from .mini import EfficientNetLite0, mini_text_folder
from .registry import PRESETS, plain_vit, preset_names, text_encoder, vision_encoder
from .text import TextBatch, TextEncoder
from .vision import Preprocessing, VisionEncoder
from .vit import PruneConfig, ViT, ViTConfig
from .weights import EncoderUnavailable, to_safetensors

__all__ = [
    "DUAL_PRESETS",
    "PRESETS",
    "DualEncoder",
    "EfficientNetLite0",
    "Embedder",
    "EncoderUnavailable",
    "Preprocessing",
    "PruneConfig",
    "TextBatch",
    "TextEncoder",
    "ViT",
    "ViTConfig",
    "VisionEncoder",
    "dual_encoder",
    "freeze",
    "mini_text_folder",
    "parameters_by_depth",
    "plain_vit",
    "preset_names",
    "read_tensors",
    "text_encoder",
    "to_safetensors",
    "unfreeze",
    "vision_encoder",
]
