"""What is known of an image before any caption comes, as a plain object: choose and split images.

The object is `seps.nn.ImageSide`; scoring starts from it without the image encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from seps.nn.slimming import ImageSide


def map_tensors(side: Any, change: Callable[[Any], Any]) -> Any:
    """A state with `change` applied to each of its tensors."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(tensor) for name, tensor in value.items()}
        return None if value is None else change(value)

    return ImageSide(**{field.name: changed(getattr(side, field.name)) for field in fields(ImageSide)})


def count_images(side: ImageSide) -> int:
    """B, the number of images in the state."""
    return side.patches.shape[0]


def take_images(side: ImageSide, chosen: slice | Tensor) -> ImageSide:
    """The chosen images, by slice (views) or by index tensor (copies)."""
    taken: ImageSide = map_tensors(side, lambda tensor: tensor[chosen])
    return taken


def split_state(side: ImageSide, size: int) -> list[ImageSide]:
    """Parts of `size` images, in order. `split` hands gradients back in one piece, slices one padded copy each."""
    columns = map_tensors(side, lambda tensor: torch.split(tensor, size))
    return [map_tensors(columns, lambda pieces, i=i: pieces[i]) for i in range(len(columns.patches))]


def convert_state(side: ImageSide, dtype: torch.dtype) -> ImageSide:
    """The state with features of this dtype; the selection's scores are float32 always."""
    if side.patches.dtype == dtype:
        return side
    converted: ImageSide = map_tensors(side, lambda t: t.to(dtype) if t.is_floating_point() else t)
    converted.fixed_scores = {name: scores.float() for name, scores in side.fixed_scores.items()}
    return converted
