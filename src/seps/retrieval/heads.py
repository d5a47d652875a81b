"""Heads: from the features of images and captions to their similarities, each a published way.

Shapes: B images, T texts, P prefix tokens, N patches, M words, L words of a description, C width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.config import ConfigError, SlimmingConfig
from seps.nn.checks import InputError
from seps.nn.guidance import masked_mean
from seps.nn.precision import float_matmul, without_autocast
from seps.nn.slimming import PatchSlimming
from seps.registry import OWN, registered
from seps.scoring import score_matrix, score_with_gradient
from seps.training.batches import map_tensors


@dataclass
class ImageFeatures:
    """Images in the joint space, each with its own description (if any)."""

    tokens: Tensor
    """(B, P + N, C)."""
    dense: Tensor | None = None
    """(B, L, C) words of each image's description."""
    dense_mask: Tensor | None = None
    """(B, L) bool; a row without any True is an image without description."""
    guides: Mapping[str, Tensor] | None = None
    """By name of a guide (`Head.guides`): (B, its width), zeros for an image without it."""

    def rows(self, start: int, stop: int) -> ImageFeatures:
        """Images `start` to `stop`."""
        part: ImageFeatures = map_tensors(self, itemgetter(slice(start, stop)))
        return part

    @property
    def dense_lengths(self) -> Tensor | None:
        """(B,) valid words of each description."""
        return None if self.dense_mask is None else self.dense_mask.sum(dim=1)


@dataclass
class TextFeatures:
    """Captions in the joint space. No description is, or can be put, here."""

    words: Tensor
    """(T, M, C)."""
    mask: Tensor
    """(T, M) bool."""
    counts: Sequence[int] | None = None
    """Valid words of each as numbers, where the caller knows them: to read them from a GPU is to wait for it."""

    @property
    def lengths(self) -> Tensor:
        """(T,) valid words of each caption."""
        return self.mask.sum(dim=1)

    @property
    def known_lengths(self) -> Tensor | Sequence[int]:
        """The same, as numbers where they are known."""
        return self.lengths if self.counts is None else self.counts


@dataclass
class Scores:
    """Similarities (B, T), the parts they are made of, and the decisions of a slimming head."""

    similarity: Tensor
    pixels: Tensor | None = None
    description: Tensor | None = None
    """(B, T); rows of images without description (`described`) are computed on padding and mean nothing."""
    described: Tensor | None = None
    """(B,) bool; None where no description came, or every image has one."""
    masks: tuple[Tensor, ...] = ()


def checked_scores(head: Head, found: object, images: ImageFeatures, texts: TextFeatures) -> Scores:
    """What a head's `forward` returned. Raises InputError where that is no `Scores` of these images and texts."""
    shape = (images.tokens.shape[0], texts.words.shape[0])
    if isinstance(found, Scores) and isinstance(found.similarity, Tensor) and tuple(found.similarity.shape) == shape:
        return found
    came = type(found).__name__
    if isinstance(found, Scores):
        came += f" of {tuple(getattr(found.similarity, 'shape', ()))}"
    raise InputError(
        f"The head {type(head).__name__} must return a seps.retrieval.heads.Scores with the similarities {shape} of "
        f"images and texts, and returned a {came}."
    )


class Head(nn.Module):
    """A way to score. `forward` carries gradients; `score` does not and is cut to a memory budget."""

    uses_pixels = True
    uses_description = False
    score_range = 1.0
    """The largest possible score: losses with a temperature take it relative to this."""
    learns_number = False
    """Whether it learns how many patches to keep; that number is then reported while it trains."""
    guides: tuple[str, ...] = ()
    """Names of the guides whose vectors come with the images, in `ImageFeatures.guides`."""

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        """Similarities of every image with every caption, with gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def score(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Tensor:
        """Similarities (B, T) float32 of every image with every caption."""
        per_image = self.bytes_per_image(images, texts)
        step = max(1, memory // max(1, per_image))
        parts = [images.rows(start, start + step) for start in range(0, images.tokens.shape[0], step)]
        blocks = [checked_scores(self, self(part, texts), part, texts).similarity for part in parts]
        return torch.cat(blocks).float()

    def bytes_per_image(self, images: ImageFeatures, texts: TextFeatures) -> int:
        """Memory that one image takes beside all captions."""
        return 4 * texts.words.shape[0] * texts.words.shape[1] * (images.tokens.shape[1] + 8)


class MeanHead(Head):
    """Cosine of the mean patch and the mean word (VSE++ style pooling)."""

    def __init__(self, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        """See `Head.forward`."""
        patches = F.normalize(images.tokens[:, self.num_prefix_tokens :].float().mean(dim=1), dim=-1)
        words = F.normalize(masked_mean(texts.words, texts.mask), dim=-1)
        similarity = float_matmul(patches, words.T)
        return Scores(similarity, pixels=similarity)


class ScanHead(Head):
    """Stacked cross attention (SCAN, Lee et al. 2018) with average pooling.

    Each word attends to the patches and is compared with what it saw ("t2i"), each patch likewise to the words
    ("i2t"), or both are added. `sharpness` is the inverse temperature of the attention.
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


class SlimmingHead(Head):
    """Patch slimming (`seps.nn.PatchSlimming`) through the exact scorer; `net` is a network of your own, if any."""

    def __init__(self, config: SlimmingConfig, net: PatchSlimming | None = None) -> None:
        super().__init__()
        self.own_network = net is not None
        self.net = PatchSlimming(config) if net is None else net
        config = self.net.config
        self.guides = self.net.guides.from_data
        self.uses_description = config.dense != "none"
        self.score_range = 2.0 + config.pooled
        self.learns_number = config.decision == "binary"

    def forward(
        self,
        images: ImageFeatures,
        texts: TextFeatures,
        *,
        want_masks: bool = False,
        paired: TextFeatures | None = None,
    ) -> Scores:
        """See `Head.forward`. `paired` are query-side descriptions, one per caption (leaky)."""
        scored = score_with_gradient(
            self.net,
            images.tokens,
            texts.words,
            texts.known_lengths,
            dense=images.dense,
            dense_lengths=images.dense_lengths,
            paired_dense=None if paired is None else paired.words,
            paired_dense_lengths=None if paired is None else paired.known_lengths,
            guides=images.guides,
            want_masks=want_masks,
        )
        pixels = scored.similarity if scored.patches is None else scored.patches
        return Scores(scored.similarity, pixels, scored.description, scored.described, scored.masks)

    @torch.no_grad()
    def score(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Tensor:
        """See `Head.score`."""
        scores = score_matrix(
            self.net,
            images.tokens,
            texts.words,
            texts.lengths,
            dense=images.dense,
            dense_lengths=images.dense_lengths,
            guides=images.guides,
            # On a GPU the fused kernels take half-precision products; the selection is float32 either way.
            precision="half" if images.tokens.is_cuda else "float32",
            memory=memory,
        )
        return cast(Tensor, scores)  # not the best alone


def make_head(kind: str, num_prefix_tokens: int, slimming: SlimmingConfig) -> Head:
    """The head of that name; of the built-in ones `slimming` matters to "slimming" alone.

    Raises ConfigError for a registered head that is none, and for "own", which stands for an object.
    """
    if kind == OWN:
        raise ConfigError(
            f"head={OWN!r} stands for a head that came as an object; pass it again: from_pretrained(folder, head=...)."
        )
    own = registered("head").get(kind)
    if own is not None:
        head = own.thing(slimming)
        if not isinstance(head, Head):
            raise ConfigError(f"The head {kind!r} is a {type(head).__name__}; make it a seps.retrieval.heads.Head.")
        return head
    if kind == "mean":
        return MeanHead(num_prefix_tokens)
    if kind == "description":
        return DescriptionHead()
    if kind == "slimming":
        return SlimmingHead(slimming)
    return ScanHead(num_prefix_tokens, kind)
