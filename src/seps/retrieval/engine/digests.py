"""Digests of our models' weights: of what makes a picture's state, and of what reads texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from seps.retrieval.model import RetrievalModel

TEXT_SIDE = ("text.", "project_words.")
"""Beginnings of the names of the weights that read sentences and descriptions."""
SHORT_SIDE = ("project_short.",)
"""Of those that only short queries are read by: nothing in a store depends on them."""


def model_hash(model: RetrievalModel) -> str:
    """Hex digest of all weights but the text side's, and of their names: models with one give an image one state."""
    return _digest(model, lambda name: not name.startswith(TEXT_SIDE + SHORT_SIDE))


def text_hash(model: RetrievalModel) -> str:
    """Hex digest of the weights that read sentences and descriptions: the text encoder and its projection."""
    return model.stated_text_hash or _digest(model, lambda name: name.startswith(TEXT_SIDE))


def short_hash(model: RetrievalModel) -> str:
    """Hex digest of the projection of short queries."""
    return _digest(model, lambda name: name.startswith(SHORT_SIDE))


def _digest(model: RetrievalModel, of: Callable[[str], bool]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if of(name):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
