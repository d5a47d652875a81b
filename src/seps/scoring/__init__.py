"""All pairs of images x texts, exactly: one function with interchangeable backends."""

from seps.scoring.api import Choice, TopK, choose_backend, score_matrix
from seps.scoring.inputs import ImageBlock, count_images, take_images
from seps.scoring.train import score_with_gradient

__all__ = [
    "Choice",
    "ImageBlock",
    "TopK",
    "choose_backend",
    "count_images",
    "score_matrix",
    "score_with_gradient",
    "take_images",
]
