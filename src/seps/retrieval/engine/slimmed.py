"""Which patches of a picture a store keeps, and the exact score of a picture that is kept in part.

For the slimming head the dot product of the search vectors of a picture and a sentence is the pooled part of the
score, up to its weight: `(1 - g) cos(mean patch, mean word) + g cos(mean description word, mean word)`. So the
picture's vector is not scaled to length one: its length is part of the score.

Shapes: B images, P prefix tokens, N patches, M stored patches, T texts, C width.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import evaluating, values_unchecked
from seps.method.encoded import EncodedImages, Texts
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean
from seps.method.select import num_kept, rank_patches
from seps.retrieval.engine.layout import Kept, PatchLayout
from seps.retrieval.engine.mean import mixed
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.engine.queries import Queries
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.merging import mean_grid, merge_words
from seps.retrieval.model import RetrievalModel
from seps.scoring import score_matrix
from seps.scoring.blocks import scoring_memory
from seps.scoring.own_texts import can_score, images_at_once, score_own_texts
from seps.scoring.terms import other_forward

SCORING_MEMORY = 256 * 2**20


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


def text_vectors(texts: TextFeatures) -> Tensor:
    """(T, C) float32: the vector of each query, its mean word at length one."""
    return F.normalize(masked_mean(texts.words, texts.mask), dim=-1)


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


def image_side(net: PatchSlimming, images: ImageFeatures) -> EncodedImages:
    """What no caption changes of the images. Their values are not checked: that would take a quarter of the time."""
    with values_unchecked(), evaluating(net):
        return net.encode_images(
            images.tokens, dense=images.dense, dense_lengths=images.dense_lengths, guides=images.guides
        )


class PatchScorer:
    """Exact scores of pictures that are kept in this way; None: as they come from the encoder."""

    def __init__(self, model: RetrievalModel, layout: PatchLayout | None = None) -> None:
        self.model, self.layout = model, layout
        self.net = model.head.network
        """Of a slimming head, for as many patches as are kept."""
        if self.net is None or layout is None:
            return
        if layout.patches is not None or layout.means:
            # Of all patches of the store's pictures, which may be others than the model's are now.
            whole = None if layout.means else layout.grid[0] * layout.grid[1]
            self.net = fewer_patches(self.net, layout.stored, whole)
        elif layout.stored != self.net.config.num_patches:
            # A store keeps the grid it was made with; the model may have another one now.
            self.net = copy.copy(self.net)
            self.net.config = replace(self.net.config, check_num_patches=False)

    def side(self, images: ImageFeatures) -> EncodedImages:
        """What no caption changes, for a slimming head. The mean patch is that of all patches."""
        if self.net is None:
            raise ValueError(f"head={self.model.config.head!r} has no patch selection; use a model with 'slimming'.")
        side = image_side(self.net, images)
        return side if images.mean is None else replace(side, pooled=F.normalize(images.mean, dim=-1))

    @torch.no_grad()
    def score(self, images: ImageFeatures, texts: TextFeatures, memory: int | None = None) -> Tensor:
        """(B, T) similarities; the lowest of all for images that have nothing of what the head scores."""
        if self.layout is None:
            return self.model.score(images, texts, memory=memory)
        if not self.model.head.uses_pixels and images.dense is None:
            return texts.words.new_full((len(images.tokens), len(texts.words)), -self.model.head.score_range)
        memory = scoring_memory(images.tokens.device, SCORING_MEMORY)
        if self.net is None:
            return self.model.score(images, texts, memory=memory)
        if len(texts.words) == 1 and other_forward(self.net) is None:
            # `score_matrix` prepares for many captions; for a single one the network itself is several times faster.
            length = int(texts.mask[0].sum())
            with evaluating(self.net):
                return self.net.score(self.side(images), Texts.of(texts.words[:, :length])).similarity
        scores = score_matrix(self.net, self.side(images), texts.words, texts.lengths, memory=memory)
        return cast(Tensor, scores)  # not the best alone

    @torch.no_grad()
    def score_chosen(self, pictures: PatchPictures, queries: Queries, chosen: Tensor, memory: int | None) -> Tensor:
        """(B, K) exact scores of each picture with `chosen` (B, K) queries of its own.

        Some pictures are scored at once where the network is a known one.
        """
        found, left = torch.zeros_like(chosen, dtype=torch.float32), list(range(len(chosen)))
        if self.net is not None and can_score(self.net):
            left = []
            step = images_at_once(chosen.device)
            for start in range(0, len(chosen), step):
                some = chosen[start : start + step]
                side = self.side(pictures.rows(start, start + len(some)).features)
                scores, unsafe = score_own_texts(self.net, side, queries.pool, some)
                found[start : start + step] = scores
                left += [start + i for i, flag in enumerate(unsafe.tolist()) if flag]
        for i in left:
            words = cast(TextFeatures, queries.rows(chosen[i]).words)
            found[i] = self.score(pictures.rows(i, i + 1).features, words, memory)[0]
        return found


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
    words = text_vectors(TextFeatures(images.dense.float(), images.dense_mask)).cpu().numpy()
    own, described = pixels.cpu().numpy(), images.dense_mask.any(dim=1).cpu().numpy()
    means = [vector[None] if has else None for vector, has in zip(own, described, strict=True)]
    return Kept(mixed(own, words, described, weight), means=means)


def fewer_patches(net: PatchSlimming, stored: int, whole: int | None = None) -> PatchSlimming:
    """The network for images with only `stored` patches: it selects as many of them as it would of all, or `whole`."""
    config = net.config
    kept = min(stored, num_kept(whole or config.num_patches, config.sparse_ratio))
    ratio = kept / stored
    slim = copy.deepcopy(net)
    # The number of merged patches belongs to the weights and stays as it is.
    aggregation = min(1.0, (config.num_merged + 0.5) / kept)
    slim.config = replace(config, num_patches=stored, sparse_ratio=ratio, aggr_ratio=aggregation)
    slim.sparse_net_cap.sparse_ratio = ratio
    if config.uses_dense_branch:
        slim.sparse_net_long.sparse_ratio = ratio
    return slim
