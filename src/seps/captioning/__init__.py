"""Dense text: one description an image, written by a vision-language model, bound to the image by id and hash."""

from seps.ray_cluster import RayConfig

from .backends import Answer, Backend
from .config import BackendConfig, CaptionConfig, Sampling
from .quality import fault_of
from .run import caption_images
from .sources import Item, list_images

__all__ = [
    "Answer",
    "Backend",
    "BackendConfig",
    "CaptionConfig",
    "Item",
    "RayConfig",
    "Sampling",
    "caption_images",
    "fault_of",
    "list_images",
]
