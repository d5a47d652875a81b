"""What a store keeps of pictures of our models: their vectors, and all, some or means of their patches.

For the slimming head the dot product of the search vectors of a picture and a sentence is the pooled part of the
score, up to its weight: `(1 - g) cos(mean patch, mean word) + g cos(mean description word, mean word)`. So the
picture's vector is not scaled to length one: its length is part of the score.

Shapes: B images, N patches, C width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.score import masked_mean
from seps.method.select import rank_patches
from seps.retrieval.engine.layout import Kept, PatchLayout
from seps.retrieval.engine.mean import mixed
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.merging import mean_grid, merge_words
from seps.retrieval.model import RetrievalModel


def image_vectors(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    """(B, C) float32: the vector of each image; zero where the head looks at descriptions alone and it has none."""
    patches = F.normalize(images.tokens[:, model.vision.num_prefix_tokens :].float().mean(dim=1), dim=-1)
    if not model.head.uses_description:
        return patches
    if images.dense is None or images.dense_mask is None:
        return patches if model.head.uses_pixels else torch.zeros_like(patches)
    described = F.normalize(masked_mean(F.normalize(images.dense.float(), dim=-1), images.dense_mask), dim=-1)
    if not model.head.uses_pixels:
        return described
    weight = model.description_weight
    if weight is None:
        return patches
    mixed = (1 - weight) * patches + weight * described
    return torch.where(images.dense_mask.any(dim=1, keepdim=True), mixed, patches)


def fixed_patch_scores(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    """(B, N): how much each patch matters before any caption is known."""
    if model.head.network is not None:
        side = model.head.network.encode_images(
            images.tokens, dense=images.dense, dense_lengths=images.dense_lengths, guides=images.guides
        )
        return side.sets[0].fixed
    patches = images.tokens[:, model.vision.num_prefix_tokens :].float()
    return F.cosine_similarity(patches, patches.mean(dim=1, keepdim=True), dim=-1)


def patches_to_keep(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    """(B, count) places of the patches that a store keeps, in the order of the grid, before any caption is known.

    The first half of them matter most (`fixed_patch_scores`), the others are spread evenly over the rest of the
    picture: captions also name what is round a subject (docs/retrieval-results.md). Of a head that selects no patches
    by a score all are spread: those most like their mean, by which one could go, are background.
    """
    tokens = images.tokens
    order = spread(model.vision.grid_for(*model.image_size)).to(tokens.device).repeat(len(tokens), 1)
    if model.head.network is None:
        return order.argsort(dim=1, stable=True)[:, :count].sort(dim=1).values
    first = rank_patches(fixed_patch_scores(model, images))[:, : count - count // 2]
    others = order.scatter_(1, first, 1.0).argsort(dim=1, stable=True)[:, : count // 2]
    return torch.cat([first, others], dim=1).sort(dim=1).values


def spread(grid: tuple[int, int]) -> Tensor:
    """(cells,) a number in [0, 1) per cell of a grid, row by row: the cells below any bound are spread evenly over it.

    A lattice of the plastic number p (p^3 = p + 1), whose points keep apart in two dimensions: row / p + column / p^2,
    without the whole part.
    """
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in grid)
    plastic = 1.3247179572447460
    return ((rows[:, None] / plastic + columns / plastic**2) % 1).flatten()


@torch.no_grad()
def kept_patches(model: RetrievalModel, images: ImageFeatures, layout: PatchLayout) -> Kept:
    """What a store with this layout keeps of the images, chosen on the model's device: the rest is not copied."""
    tokens, words, mask = images.tokens, images.dense, images.dense_mask
    vectors = image_vectors(model, images)
    prefix, keep = model.vision.num_prefix_tokens, layout.patches
    best = means = None
    slim = keep is not None and keep < tokens.shape[1] - prefix
    if slim or layout.means:
        # One image at a time: sums over a whole batch are rounded in another order.
        means = torch.stack([rows[prefix:].mean(dim=0, keepdim=True) for rows in tokens])
    if layout.means:
        cells = mean_grid(tokens[:, prefix:], model.vision.grid_for(*model.image_size), layout.grid)
        tokens = torch.cat([tokens[:, :prefix], cells.to(tokens.dtype)], dim=1)
    if slim:
        best = patches_to_keep(model, images, cast(int, keep))
        chosen = tokens[:, prefix:].gather(1, best[:, :, None].expand(-1, -1, tokens.shape[-1]))
        tokens = torch.cat([tokens[:, :prefix], chosen], dim=1)
    if layout.keep_words is not None and words is not None and mask is not None:
        words, mask = merge_words(words, mask, layout.keep_words)
    there = (None if value is None else value.cpu() for value in (best, means, words, mask))
    return Kept(vectors.cpu(), tokens.cpu(), *there)


def vector_weight(model: RetrievalModel) -> float:
    """Weight of the description in the one vector of a described picture."""
    return model.description_weight or 0.0 if model.head.uses_pixels else 1.0


@torch.no_grad()
def kept_mean(model: RetrievalModel, images: ImageFeatures) -> Kept:
    """What a store with one vector per picture keeps of the images."""
    pixels = F.normalize(images.tokens[:, model.vision.num_prefix_tokens :].float().mean(dim=1), dim=-1)
    if not model.head.uses_pixels:
        pixels = torch.zeros_like(pixels)
    weight = vector_weight(model)
    if not weight or images.dense is None or images.dense_mask is None:
        return Kept(pixels.cpu())
    words = TextFeatures(images.dense.float(), images.dense_mask).mean_word.cpu().numpy()
    own, described = pixels.cpu().numpy(), images.dense_mask.any(dim=1).cpu().numpy()
    means = [vector[None] if has else None for vector, has in zip(own, described, strict=True)]
    return Kept(mixed(own, words, described, weight), means=means)
