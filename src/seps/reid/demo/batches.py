"""Batches and augmentation as DeMo has them (`data/datasets/sampler.py` and `make_dataloader.py` of its code).

Ours differ: `data/sampler.py` deals every image of an identity, `data/transforms.py` draws once for all sensors of a
shot.

Shapes: B shots, M modalities, (H, W) pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from seps.reid.data.sampler import IdentityBatches, Ints, members_of
from seps.reid.data.transforms import Augmentation, Draw, apply

ERASE_AREA = (0.02, 1 / 3)
ERASE_ASPECT = (0.3, 1 / 0.3)
_TRIES = 10
_COUNTED_EPOCHS = 10


def published_epoch(labels: Sequence[int], identities: int, images: int, rng: np.random.Generator) -> Ints:
    """The batches of one pass, (steps, P * K) record indices; the number of steps differs from pass to pass.

    The images of a label are shuffled and cut into groups of K, of which an incomplete one is left out (a label with
    fewer than K images has one group, drawn with repetition). Each step takes the next group of P labels, drawn
    evenly among those that have one left; the pass ends when fewer than P have.
    """
    groups: list[list[Ints]] = []
    for member in members_of(labels, identities):
        drawn = rng.permutation(member) if len(member) >= images else rng.choice(member, images)
        groups.append(list(drawn[: len(drawn) - len(drawn) % images].reshape(-1, images)))
    left = list(range(len(groups)))
    batches: list[Ints] = []
    while len(left) >= identities:
        chosen = rng.choice(len(left), identities, replace=False)
        labels_of_step = [left[int(place)] for place in chosen]
        batches.append(np.concatenate([groups[label].pop(0) for label in labels_of_step]))
        left = [label for label in left if groups[label]]
    return np.stack(batches)


class PublishedBatches(IdentityBatches):
    """`published_epoch` with as many steps in every epoch: those of a pass on average, rounded.

    A pass that is longer is cut there; after one that is shorter another begins.
    """

    def __init__(self, labels: Sequence[int], *, identities: int = 16, images: int = 4, seed: int = 0) -> None:
        super().__init__(labels, identities=identities, images=images, seed=seed)
        lengths = [len(self._pass(epoch, 0)) for epoch in range(_COUNTED_EPOCHS)]
        self.steps = round(sum(lengths) / len(lengths))

    def _pass(self, epoch: int, number: int) -> Ints:
        rng = np.random.default_rng([self.seed, epoch, number])
        return published_epoch(self.labels, self.identities, self.images, rng)

    def plan(self, epoch: int) -> Ints:
        """(steps, P * K) record indices of an epoch."""
        parts: list[Ints] = []
        while sum(map(len, parts)) < self.steps:
            parts.append(self._pass(epoch, len(parts)))
        return np.concatenate(parts)[: self.steps]


def draw_per_sensor(
    batch: int, sensors: int, size: tuple[int, int], config: Augmentation, generator: torch.Generator
) -> Draw:
    """The choices for every sensor of `batch` shots by itself, (B * M) rows, from a CPU generator.

    An erased box has an area of 0.02 to 1/3 of the image and an aspect of 0.3 to 1/0.3; one that is as high or as wide
    as the image is drawn again, up to ten times in all, after which nothing is erased.
    """
    count, (height, width) = batch * sensors, size
    offsets = torch.randint(0, 2 * config.pad + 1, (count, 2), generator=generator)
    flips = torch.rand(count, generator=generator) < config.flip
    erased = torch.rand(count, generator=generator) < config.erase
    uniform = torch.rand(count, _TRIES, 2, generator=generator, dtype=torch.float64)
    places = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    area = (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * uniform[:, :, 0]) * height * width
    low, high = map(math.log, ERASE_ASPECT)
    aspect = torch.exp(low + (high - low) * uniform[:, :, 1])
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(dim=1, keepdim=True)
    tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
    top = (places[:, 0] * (height - tall + 1)).floor()
    left = (places[:, 1] * (width - wide + 1)).floor()
    kept = (erased & fits.any(dim=1))[:, None]
    boxes = torch.where(kept, torch.stack([top, left, tall, wide], 1), 0.0)
    seeds = torch.randint(0, 2**62, (count,), generator=generator)
    return Draw(offsets, flips, boxes.long(), seeds)


def apply_per_sensor(images: Tensor, choices: Draw, config: Augmentation, mean: Tensor, std: Tensor) -> Tensor:
    """Crop, flip, erase each sensor by itself: (B, M, 3, H, W) -> float32 of the same shape.

    A box is filled with noise that is normal after the encoder's normalisation by `mean` and `std`: mean + std * noise.
    """
    alone = apply(images.flatten(0, 1)[:, None], choices, config, normal=(mean.view(3), std.view(3)))
    return alone.view(images.shape)
