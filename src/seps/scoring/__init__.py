"""All pairs of images x texts, exactly: one function with interchangeable backends."""

from typing import Any

from seps.scoring.api import Choice, TopK, choose_backend, score_matrix, score_state
from seps.scoring.inputs import ImageBlock, count_images, take_images
from seps.scoring.train import GradientScores, score_with_gradient

__all__ = [
    "Choice",
    "GradientScores",
    "ImageBlock",
    "TopK",
    "choose_backend",
    "count_images",
    "score_matrix",
    "score_state",
    "score_with_gradient",
    "take_images",
]

_REMOVED = {
    "explain_choice": "choose_backend(...) returns the backend and the reason",
    "join_states": "pass the list of states to score_matrix as the gallery",
    "load_state": "a store (seps.photos.store) stores images on disk",
    "move_state": "dataclasses.replace changes the tensors of an ImageSide",
    "save_state": "a store (seps.photos.store) stores images on disk",
    "state_nbytes": "sum tensor.nbytes over the tensors of the ImageSide",
}


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise AttributeError(f"seps.scoring.{name} was removed; {_REMOVED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
