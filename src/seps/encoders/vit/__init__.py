"""A plain vision transformer of our own, its pruning, and the weights it takes from elsewhere."""

from .converted import FAMILIES, from_transformers, our_names
from .files import fit_positions, vit_from_file
from .focus import focus_encoder, read_focus_weights
from .model import Block, ViT, ViTConfig
from .pruning import PruneConfig
from .saved import VIT_FILE, build_vit, describe_vit, load_vit, save_vit

__all__ = [
    "FAMILIES",
    "VIT_FILE",
    "Block",
    "PruneConfig",
    "ViT",
    "ViTConfig",
    "build_vit",
    "describe_vit",
    "fit_positions",
    "focus_encoder",
    "from_transformers",
    "load_vit",
    "our_names",
    "read_focus_weights",
    "save_vit",
    "vit_from_file",
]
