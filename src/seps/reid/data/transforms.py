"""One random draw of crop, flip and erasure per shot, the same for all its modalities.

Shapes: B shots, M modalities, (H, W) pixels. Pixels leave in [0, 1]; normalisation belongs to the encoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seps.reid.data.records import ReidDataError


@dataclass(frozen=True)
class Augmentation:
    """Padding of the random crop (pixels), probabilities of flip and erasure, extent of the erased box."""

    pad: int = 10
    flip: float = 0.5
    erase: float = 0.5
    erase_area: tuple[float, float] = (0.02, 0.4)
    erase_aspect: tuple[float, float] = (0.3, 1 / 0.3)

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ReidDataError(f"pad must be >= 0 pixels, not {self.pad}")
        for name, value in (("flip", self.flip), ("erase", self.erase)):
            if not 0 <= value <= 1:
                raise ReidDataError(f"{name} must be a probability in [0, 1], not {value}")
        if not 0 < self.erase_area[0] <= self.erase_area[1] < 1:
            raise ReidDataError(f"erase_area must be 0 < smallest <= largest < 1, not {self.erase_area}")
        if not 0 < self.erase_aspect[0] <= self.erase_aspect[1]:
            raise ReidDataError(f"erase_aspect must be 0 < smallest <= largest, not {self.erase_aspect}")


@dataclass(frozen=True)
class Draw:
    """The random choices of B shots.

    offsets (B, 2) rows, columns; flips (B,); boxes (B, 4) top, left, height, width (height 0: none); seeds
    (B,) of the noise in the box. Draw for the global batch and slice: the augmentation of a shot is then the
    same on any number of processes.
    """

    offsets: Tensor
    flips: Tensor
    boxes: Tensor
    seeds: Tensor

    def __getitem__(self, part: slice) -> Draw:
        return Draw(self.offsets[part], self.flips[part], self.boxes[part], self.seeds[part])


def draw(batch: int, size: tuple[int, int], config: Augmentation, generator: torch.Generator) -> Draw:
    """The choices for `batch` shots of `size` (H, W), from a CPU generator."""
    height, width = size
    offsets = torch.randint(0, 2 * config.pad + 1, (batch, 2), generator=generator)
    uniform = torch.rand(batch, 6, generator=generator, dtype=torch.float64)
    low, high = config.erase_area
    area = (low + (high - low) * uniform[:, 1]) * height * width
    low, high = map(math.log, config.erase_aspect)
    aspect = torch.exp(low + (high - low) * uniform[:, 2])
    tall = (area * aspect).sqrt().round().clamp(1, height)
    wide = (area / aspect).sqrt().round().clamp(1, width)
    top = (uniform[:, 3] * (height - tall + 1)).floor()
    left = (uniform[:, 4] * (width - wide + 1)).floor()
    boxes = torch.stack([top, left, tall, wide], 1) * (uniform[:, 5] < config.erase)[:, None]
    seeds = torch.randint(0, 2**62, (batch,), generator=generator)
    return Draw(offsets, uniform[:, 0] < config.flip, boxes.long(), seeds)


def apply(images: Tensor, choices: Draw, config: Augmentation, normal: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Crop, flip, erase: (B, M, 3, H, W) uint8 or float in [0, 1] -> float32 in [0, 1] of the same shape.

    Outside the image a crop is black; an erased box is filled with uniform noise, the same
    box in every modality. With `normal`, mean and std (3,), it is mean + std * normal noise, which may leave [0, 1].
    Raises ReidDataError for another shape or a draw of another batch size.
    """
    if images.ndim != 5 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise ReidDataError(f"expected (B, M, 3, H, W) uint8 or float pixels, got {tuple(images.shape)} {images.dtype}")
    if len(choices.flips) != len(images):
        raise ReidDataError(f"a draw for {len(choices.flips)} shots cannot serve {len(images)}")
    height, width = images.shape[-2:]
    device = images.device
    rows = torch.arange(height)[None] + choices.offsets[:, :1] - config.pad
    columns = torch.arange(width).repeat(len(images), 1)
    columns = torch.where(choices.flips[:, None], width - 1 - columns, columns)
    columns = columns + choices.offsets[:, 1:] - config.pad
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
    flat = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    flat = flat.to(device).view(len(images), 1, 1, -1).expand(-1, *images.shape[1:3], -1)
    moved = unit_float(images.flatten(-2).gather(-1, flat).view(images.shape))
    moved *= inside.to(device)[:, None, None]
    for shot, (top, left, tall, wide) in enumerate(choices.boxes.tolist()):
        if tall:
            noise = torch.Generator().manual_seed(int(choices.seeds[shot]))
            shape = (*images.shape[1:3], tall, wide)
            if normal is None:
                fill = torch.rand(*shape, generator=noise)
            else:
                mean, std = (values.cpu().view(1, 3, 1, 1) for values in normal)
                fill = mean + std * torch.randn(*shape, generator=noise)
            moved[shot, :, :, top : top + tall, left : left + wide] = fill.to(device)
    return moved


def unit_float(images: Tensor) -> Tensor:
    """Pixels as float32 in [0, 1], a new tensor: bytes are divided by 255, floats taken as they are."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.to(torch.float32, copy=True)
