"""All pairs of images x texts, exactly: one function with interchangeable backends."""

from seps.scoring.api import Choice, ImageBlock, choose_backend, explain_choice, score_matrix, score_state
from seps.scoring.gradient import GradientScores, score_with_gradient
from seps.scoring.state import (
    count_images,
    join_states,
    load_state,
    move_state,
    save_state,
    state_nbytes,
    take_images,
)
from seps.scoring.topk import TopK

__all__ = [
    "Choice",
    "GradientScores",
    "ImageBlock",
    "TopK",
    "choose_backend",
    "count_images",
    "explain_choice",
    "join_states",
    "load_state",
    "move_state",
    "save_state",
    "score_matrix",
    "score_state",
    "score_with_gradient",
    "state_nbytes",
    "take_images",
]
