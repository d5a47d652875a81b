"""Training-time noise on captions (as published) and on images.

Both are functions of their inputs and of a seed, on any device. On several ranks, draw for the whole batch
and keep your rows (captions), or say where your rows start (images): then one process and several agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seps.images.sources import DataError

# Of the tokens that are chosen: half masked, a tenth replaced, the rest dropped, as the published code does.
MASKED, REPLACED = 0.5, 0.6


def augment_tokens(
    ids: Tensor,
    mask: Tensor,
    *,
    mask_id: int,
    vocab_size: int,
    special_ids: Collection[int],
    generator: torch.Generator,
    probability: float = 0.2,
    pad_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose each token with `probability`; of those 50 % are masked, 10 % replaced at random, 40 % dropped.

    ids, mask: (batch, length), `mask` nonzero at tokens; returned in the same shapes.
    Special tokens stay and are never drawn as replacements. A caption whose tokens would all be dropped keeps
    them. Dropping closes the gaps: tokens move left, the freed end gets `pad_id` and mask 0.
    Raises DataError for shapes or a probability that make no sense.
    """
    if ids.ndim != 2 or ids.shape != mask.shape:
        raise DataError(
            f"Token ids and mask must share one shape (batch, length); got {tuple(ids.shape)} and {tuple(mask.shape)}."
        )
    if not 0.0 <= probability <= 1.0:
        raise DataError(f"The share of tokens to change must be between 0 and 1, not {probability}.")
    valid = mask.bool()
    special = torch.isin(ids, torch.tensor(sorted(special_ids), dtype=ids.dtype, device=ids.device))
    free = valid & ~special

    fate = torch.rand(ids.shape, generator=generator, device=generator.device).to(ids.device)
    chosen = free & (fate < probability)
    fate = fate / max(probability, torch.finfo(fate.dtype).tiny)

    replacement = _random_tokens(ids, vocab_size, special_ids, generator)
    changed = torch.where(chosen & (fate < MASKED), torch.full_like(ids, mask_id), ids)
    changed = torch.where(chosen & (fate >= MASKED) & (fate < REPLACED), replacement, changed)

    dropped = chosen & (fate >= REPLACED)
    emptied = (free & ~dropped).any(dim=1).logical_not()
    keep = valid & ~(dropped & ~emptied[:, None])
    # Kept tokens first, in their order, then padding.
    order = torch.argsort(keep.logical_not().to(torch.int8), dim=1, stable=True)
    kept = keep.gather(1, order)
    return changed.gather(1, order).masked_fill(~kept, pad_id), kept.to(mask.dtype)


def _random_tokens(ids: Tensor, vocab_size: int, special_ids: Collection[int], generator: torch.Generator) -> Tensor:
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    allowed[[token for token in special_ids if 0 <= token < vocab_size]] = False
    ordinary = allowed.nonzero().squeeze(1).to(ids.device)
    if not len(ordinary):
        raise DataError(f"A vocabulary of {vocab_size} with all tokens special leaves none to replace words with.")
    draw = torch.randint(len(ordinary), ids.shape, generator=generator, device=generator.device)
    return ordinary[draw.to(ids.device)].to(ids.dtype)


@dataclass(frozen=True)
class ImageAugment:
    """Random resized crop, horizontal flip and mild colour jitter of a float batch with values in 0..1.

    Plain torch and not kornia: crop, flip and resize are one affine `grid_sample` of the batch, equal to
    slicing and resizing but at the crop's edge, and on a CPU no slower than kornia's chain. The draws belong
    to the call, where kornia's move the global generator; a seed draws the same on every device and rank;
    and training needs no further package.

    size: (height, width) of the result. scale: share of the area a crop keeps. ratio: how far a crop's shape
    may stray from the image's. flip: its probability. jitter: brightness, contrast and saturation are each
    multiplied by 1 - jitter .. 1 + jitter.
    """

    size: tuple[int, int]
    scale: tuple[float, float] = (0.6, 1.0)
    ratio: float = 4 / 3
    flip: float = 0.5
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise DataError(f"size must be (height, width), both at least 1, not {self.size!r}.")
        if not 0.0 < self.scale[0] <= self.scale[1] <= 1.0:
            raise DataError(f"scale must be two shares of the area, 0 < low <= high <= 1, not {self.scale!r}.")
        if not self.ratio >= 1.0:
            raise DataError(f"ratio must be at least 1 (1 keeps the image's shape), not {self.ratio}.")
        if not 0.0 <= self.flip <= 1.0 or not 0.0 <= self.jitter < 1.0:
            raise DataError(f"flip and jitter must lie in 0..1, not {self.flip} and {self.jitter}.")

    def __call__(self, pixels: Tensor, generator_seed: int, first: int = 0) -> Tensor:
        """(batch, 3, h, w) float in 0..1 -> (batch, 3, height, width), same dtype and device.

        Row i's draws depend on the seed and on first + i alone: a rank whose rows start at `first` of the
        whole batch gets what a single process would. Decode at about `size` or slightly above:
        pixels more than twice as dense as the result would alias.
        """
        if pixels.ndim != 4 or pixels.shape[1] != 3 or not pixels.is_floating_point():
            raise DataError(
                f"Images to augment must be (batch, 3, height, width) floats in 0..1, not {pixels.dtype} "
                f"of shape {tuple(pixels.shape)}. Divide uint8 pixels by 255 first."
            )
        # On the CPU whatever the device, so that a seed means the same everywhere.
        generator = torch.Generator().manual_seed(generator_seed)
        draws = torch.rand(first + len(pixels), 8, generator=generator)[first:].to(pixels.device)
        cropped = _sample(pixels.float(), self._affine(draws), self.size)
        return _jitter(cropped, 1 + self.jitter * (2 * draws[:, 5:] - 1)).to(pixels.dtype)

    def _affine(self, draws: Tensor) -> Tensor:
        """(batch, 2, 3): where in the image, in -1..1, each crop lies; mirrored by a negative width."""
        low, high = self.scale
        area = low + (high - low) * draws[:, 0]
        shape = torch.exp((2 * draws[:, 1] - 1) * math.log(self.ratio))
        shape = torch.minimum(torch.maximum(shape, area), 1 / area)  # neither side sticks out of the image
        width, height = (area * shape).sqrt(), (area / shape).sqrt()
        mirror = torch.where(draws[:, 4] < self.flip, -1.0, 1.0)
        theta = draws.new_zeros(len(draws), 2, 3)
        theta[:, 0, 0] = width * mirror
        theta[:, 0, 2] = (1 - width) * (2 * draws[:, 2] - 1)
        theta[:, 1, 1] = height
        theta[:, 1, 2] = (1 - height) * (2 * draws[:, 3] - 1)
        return theta


def _sample(pixels: Tensor, theta: Tensor, size: tuple[int, int]) -> Tensor:
    grid = F.affine_grid(theta, [len(pixels), 3, *size], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _jitter(pixels: Tensor, factors: Tensor) -> Tensor:
    """Multiply brightness, contrast and saturation by `factors` (batch, 3); stays in 0..1."""
    brightness, contrast, saturation = (factors[:, k, None, None, None] for k in range(3))
    pixels = (pixels * brightness).clamp(0, 1)
    luma = pixels.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    mean = (pixels * luma).sum(dim=1, keepdim=True).mean(dim=(2, 3), keepdim=True)
    pixels = (mean + (pixels - mean) * contrast).clamp(0, 1)
    grey = (pixels * luma).sum(dim=1, keepdim=True)
    return (grey + (pixels - grey) * saturation).clamp(0, 1)
