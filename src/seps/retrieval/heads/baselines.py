"""Heads that select no patches: the ways to score beside which slimming is measured.

Shapes: B images, T texts, P prefix tokens, N patches, M words, K tokens, L words of a description, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.config import ConfigError, SlimmingConfig
from seps.method.precision import float_matmul, without_autocast
from seps.method.score import masked_mean
from seps.retrieval.config import HEAD_OPTIONS
from seps.retrieval.heads.base import Head, ImageFeatures, Scores, TextFeatures


class MeanHead(Head):
    """Cosine of the mean patch and the mean word (VSE++ style pooling)."""

    def __init__(self, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        """See `Head.forward`."""
        words = F.normalize(masked_mean(texts.words, texts.mask), dim=-1)
        similarity = float_matmul(images.mean_patch(self.num_prefix_tokens), words.T)
        return Scores(similarity, pixels=similarity)


class MaxSimHead(Head):
    """Every word chooses its own patch: the largest cosine of each word with a patch, averaged over the words (MaxSim).

    Beside it `pooled` times the cosine of mean patch and mean word. With `dense="tokens"` each word likewise chooses a
    word of the image's description: S = (1 - g) S_patches + g S_words, g learned; S_patches for an image without one.
    Other options of `SlimmingConfig` do not matter: no patch is left out or merged.
    """

    selects_patches = True

    def __init__(self, config: SlimmingConfig) -> None:
        super().__init__()
        if config.dense not in ("none", "tokens"):
            raise ConfigError(f"head='maxsim' has no dense={config.dense!r}; choose 'none' or 'tokens'.")
        self.config = config
        self.uses_description = config.dense == "tokens"
        self.score_range = 1.0 + config.pooled
        self.trust = nn.Parameter(torch.zeros(())) if self.uses_description else None

    @property
    def options(self) -> dict[str, Any]:
        """See `Head.options`."""
        return {name: getattr(self.config, name) for name in HEAD_OPTIONS["maxsim"]}

    @property
    def description_logit(self) -> Tensor | None:
        """See `Head.description_logit`."""
        return self.trust

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        """See `Head.forward`."""
        return self._scores(images, texts, _mean_nearest)

    def _without_gradient(self, images: ImageFeatures, texts: TextFeatures) -> Scores:
        return self._scores(images, texts, _mean_nearest_unpadded)

    def _scores(self, images: ImageFeatures, texts: TextFeatures, align: Alignment) -> Scores:
        prefix = self.config.num_prefix_tokens
        pixels = self._similarity(images.tokens[:, prefix:], None, images.mean_patch(prefix), texts, align)
        if self.trust is None or images.dense is None or images.dense_mask is None:
            return Scores(pixels, pixels=pixels)
        described = images.dense_mask.any(dim=1)
        mean = F.normalize(masked_mean(F.normalize(images.dense.float(), dim=-1), images.dense_mask), dim=-1)
        description = self._similarity(images.dense, images.dense_mask, mean, texts, align)
        mixed = pixels + torch.sigmoid(self.trust.float()) * (description - pixels)
        return Scores(torch.where(described[:, None], mixed, pixels), pixels, description, described)

    def _similarity(
        self, tokens: Tensor, valid: Tensor | None, mean: Tensor, texts: TextFeatures, align: Alignment
    ) -> Tensor:
        """(B, T) of tokens (B, K, C), of which `valid` (B, K) count, and their mean (B, C) at length one."""
        with without_autocast(tokens):
            aligned = align(F.normalize(tokens.float(), dim=-1), valid, texts)
        caption = F.normalize(masked_mean(texts.words, texts.mask), dim=-1)
        return aligned + self.config.pooled * float_matmul(mean, caption.T)

    def bytes_per_image(self, images: ImageFeatures, texts: TextFeatures) -> int:
        """Memory that one image takes beside all captions."""
        return 8 * int(texts.mask.sum()) * (images.tokens.shape[1] + 8)


Alignment = Callable[[Tensor, Tensor | None, TextFeatures], Tensor]
"""From tokens (B, K, C) of length one, those that are valid (B, K), and texts to the mean (B, T) over the words."""


def _mean_nearest(tokens: Tensor, valid: Tensor | None, texts: TextFeatures) -> Tensor:
    """The largest cosine of each word with a token, averaged over the words."""
    cosines = torch.einsum("bkc,tmc->btmk", tokens, F.normalize(texts.words.float(), dim=-1))
    if valid is not None:
        cosines = cosines.masked_fill(~valid[:, None, None], -1.0)
    best = cosines.max(dim=3).values
    return (best * texts.mask).sum(dim=2) / texts.mask.sum(dim=1)


def _mean_nearest_unpadded(tokens: Tensor, valid: Tensor | None, texts: TextFeatures) -> Tensor:
    """The same with no product for padding: for many captions of different length, where no gradient is needed."""
    words = F.normalize(texts.words[texts.mask].float(), dim=-1)  # (W, C): the words of all texts
    cosines = tokens @ words.T  # (B, K, W)
    if valid is not None:
        cosines = cosines.masked_fill(~valid[:, :, None], -1.0)
    sums = cosines.new_zeros(len(tokens), len(texts.words))
    sums.index_add_(1, texts.mask.nonzero()[:, 0], cosines.amax(dim=1))
    return sums / texts.mask.sum(dim=1)


class ScanHead(Head):
    """Stacked cross attention (SCAN, Lee et al. 2018) with average pooling.

    Each word attends to the patches and is compared with what it saw ("t2i"), each patch likewise to the words ("i2t"),
    or both are added. `sharpness` is the inverse temperature of the attention.
    """

    def __init__(self, num_prefix_tokens: int, direction: str, sharpness: float = 9.0) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.direction = direction
        self.sharpness = sharpness
        self.score_range = 2.0 if direction == "scan" else 1.0

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        """See `Head.forward`."""
        patches = F.normalize(images.tokens[:, self.num_prefix_tokens :].float(), dim=-1)
        words = F.normalize(texts.words.float(), dim=-1)
        with without_autocast(patches):
            cosines = torch.einsum("bnc,tmc->btnm", patches, words)
        cosines = cosines.masked_fill(~texts.mask[None, :, None, :], 0.0)
        total = torch.zeros(cosines.shape[:2], device=cosines.device)
        if self.direction in ("scan-t2i", "scan"):
            total = total + self._words_to_patches(cosines, patches, texts.mask)
        if self.direction in ("scan-i2t", "scan"):
            total = total + self._patches_to_words(cosines, words, texts.mask)
        return Scores(total, pixels=total)

    def _words_to_patches(self, cosines: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
        # Each patch's cosines are normalised over the words, then each word attends over the patches.
        scores = F.normalize(F.leaky_relu(cosines, 0.1), dim=3)
        weights = torch.softmax(self.sharpness * scores, dim=2)
        dots = (weights * cosines).sum(dim=2)
        norms = _weighted_norm(weights.transpose(2, 3), float_matmul(patches, patches.transpose(1, 2))[:, None])
        relevance = dots / norms.clamp_min(1e-8)
        return relevance.masked_fill(~mask[None], 0.0).sum(dim=-1) / mask.sum(dim=-1)

    def _patches_to_words(self, cosines: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        scores = F.normalize(F.leaky_relu(cosines, 0.1), dim=2)
        scores = (self.sharpness * scores).masked_fill(~mask[None, :, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=3)
        dots = (weights * cosines).sum(dim=3)
        norms = _weighted_norm(weights, float_matmul(words, words.transpose(1, 2))[None])
        return (dots / norms.clamp_min(1e-8)).mean(dim=-1)

    def bytes_per_image(self, images: ImageFeatures, texts: TextFeatures) -> int:
        """Memory that one image takes beside all captions."""
        return 5 * super().bytes_per_image(images, texts)


def _weighted_norm(weights: Tensor, gram: Tensor) -> Tensor:
    """|sum_i w_i v_i| from the Gram matrix: (..., X, N), (..., N, N) -> (..., X)."""
    return (float_matmul(weights, gram) * weights).sum(dim=-1).clamp_min(1e-12).sqrt()


class DescriptionHead(Head):
    """The caption's words against the image's own description, no pixels: the baseline every table must carry."""

    uses_pixels = False
    uses_description = True
    score_range = 4.0

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        """See `Head.forward`. An image without description scores lowest."""
        if images.dense is None or images.dense_mask is None:
            raise ValueError(
                "head='description' scores the images' descriptions, and there are none; give the data descriptions "
                "and use protocol 'image'."
            )
        words, dense = F.normalize(texts.words.float(), dim=-1), F.normalize(images.dense.float(), dim=-1)
        with without_autocast(words):
            cosines = torch.einsum("tmc,blc->btml", words, dense)
        rows = cosines.masked_fill(~images.dense_mask[:, None, None], -1.0).amax(dim=3)
        columns = cosines.masked_fill(~texts.mask[None, :, :, None], -1.0).amax(dim=2)
        forward = (rows * texts.mask).sum(dim=2) / texts.mask.sum(dim=1)
        backward = (columns * images.dense_mask[:, None]).sum(dim=2) / images.dense_mask.sum(dim=1).clamp_min(1)[
            :, None
        ]
        means = F.normalize(masked_mean(images.dense, images.dense_mask), dim=-1)
        pooled = float_matmul(means, F.normalize(masked_mean(texts.words, texts.mask), dim=-1).T)
        similarity = forward + backward + 2.0 * pooled
        described = images.dense_mask.any(dim=1)
        similarity = similarity.masked_fill(~described[:, None], -4.0)
        return Scores(similarity, description=similarity, described=described)

    def bytes_per_image(self, images: ImageFeatures, texts: TextFeatures) -> int:
        """Memory that one image takes beside all captions."""
        longest = 1 if images.dense is None else images.dense.shape[1]
        return 12 * texts.words.shape[0] * texts.words.shape[1] * longest
