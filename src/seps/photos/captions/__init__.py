"""Captioning: one description per image, written by a vision-language model, bound to the image by id and hash."""

from seps.ray_cluster import RayConfig

from .backends import Answer, Backend
from .config import BackendConfig, CaptionConfig, Sampling
from .images import Item, list_images
from .quality import answer_problem
from .run import caption_images

__all__ = [
    "Answer",
    "Backend",
    "BackendConfig",
    "CaptionConfig",
    "Item",
    "RayConfig",
    "Sampling",
    "answer_problem",
    "caption_images",
    "list_images",
]
