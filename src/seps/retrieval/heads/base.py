"""What every head takes and gives, the class `Head`, and the head of patch slimming.

Shapes: B images, T texts, P prefix tokens, N patches, M words, L words of a description, C width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.method.encoded import Scores as Scores
from seps.method.encoded import map_tensors
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean
from seps.scoring import score_matrix, score_with_gradient


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
    mean: Tensor | None = None
    """(B, C) mean of all patches, where `tokens` hold some of them; None: they hold all."""

    def rows(self, start: int, stop: int) -> ImageFeatures:
        """Images `start` to `stop`."""
        part: ImageFeatures = map_tensors(self, itemgetter(slice(start, stop)))
        return part

    def mean_patch(self, num_prefix_tokens: int) -> Tensor:
        """(B, C) float32 mean of all patches at length one."""
        mean = self.tokens[:, num_prefix_tokens:].float().mean(dim=1) if self.mean is None else self.mean.float()
        return F.normalize(mean, dim=-1)

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
    def mean_word(self) -> Tensor:
        """(T, C) float32: the mean word of each at length one, the vector that a sentence is searched by."""
        return F.normalize(masked_mean(self.words, self.mask), dim=-1)

    @property
    def known_lengths(self) -> Tensor | Sequence[int]:
        """The same, as numbers where they are known."""
        return self.lengths if self.counts is None else self.counts


def checked_scores(head: Head, returned: object, images: ImageFeatures, texts: TextFeatures) -> Scores:
    """What a head's `forward` returned. Raises InputError where that is no `Scores` of these images and texts."""
    shape = (images.tokens.shape[0], texts.words.shape[0])
    own = getattr(returned, "similarity", None)
    if isinstance(returned, Scores) and isinstance(own, Tensor) and tuple(own.shape) == shape:
        return returned
    came = type(returned).__name__
    if isinstance(returned, Scores):
        came += f" of {tuple(getattr(returned.similarity, 'shape', ()))}"
    raise InputError(
        f"The head {type(head).__name__} must return a seps.retrieval.heads.Scores with the similarities {shape} of "
        f"images and texts, and returned a {came}."
    )


class Head(nn.Module):
    """A way to score. `forward` carries gradients; `score` does not and is cut to a memory budget."""

    uses_pixels = True
    uses_description = False
    own_network = False
    """Whether its network is a custom object."""
    selects_patches = False
    """Whether the score is a sum over pairs of words and patches though the head has no `network`."""
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
        return torch.cat([scores.similarity for scores in self._blocks(images, texts, memory)]).float()

    @torch.no_grad()
    def score_parts(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Scores:
        """`score`, with the parts by pixels and by description beside it."""
        blocks = list(self._blocks(images, texts, memory))

        def joined(name: str) -> Tensor | None:
            parts = [getattr(block, name) for block in blocks]
            return None if any(part is None for part in parts) else torch.cat(parts)

        similarity = torch.cat([block.similarity for block in blocks])
        return Scores(similarity, joined("pixels"), joined("description"), joined("described"))

    def _blocks(self, images: ImageFeatures, texts: TextFeatures, memory: int) -> Iterator[Scores]:
        step = max(1, memory // max(1, self.bytes_per_image(images, texts)))
        for start in range(0, images.tokens.shape[0], step):
            part = images.rows(start, start + step)
            yield checked_scores(self, self._without_gradient(part, texts), part, texts)

    def _without_gradient(self, images: ImageFeatures, texts: TextFeatures) -> object:
        """`forward` for some images where no gradient is needed; for heads that have a faster way then."""
        return self(images, texts)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `SlimmingConfig` that this head reads, with their values."""
        return {}

    @property
    def description_logit(self) -> Tensor | None:
        """Logit of the description's weight g in S = (1 - g) S_patches + g S_words; None where S has no such parts."""
        return None

    @property
    def network(self) -> PatchSlimming | None:
        """The network of a head that selects patches by slimming; None for any other."""
        return None

    def bytes_per_image(self, images: ImageFeatures, texts: TextFeatures) -> int:
        """Memory that one image takes beside all captions."""
        return 4 * texts.words.shape[0] * texts.words.shape[1] * (images.tokens.shape[1] + 8)


class SlimmingHead(Head):
    """Patch slimming (`seps.method.PatchSlimming`) through the exact scorer; `net` is a network of your own, if any."""

    def __init__(self, config: SlimmingConfig, net: PatchSlimming | None = None) -> None:
        super().__init__()
        self.own_network = net is not None
        self.net = PatchSlimming(config) if net is None else net
        config = self.net.config
        self.guides = self.net.guides.from_data
        self.uses_description = config.dense != "none"
        self.score_range = 2.0 + config.pooled
        self.learns_number = config.decision == "binary"

    @property
    def options(self) -> dict[str, Any]:
        """See `Head.options`."""
        return asdict(self.net.config)

    @property
    def network(self) -> PatchSlimming:
        """See `Head.network`."""
        return self.net

    @property
    def description_logit(self) -> Tensor | None:
        """See `Head.description_logit`."""
        return self.net.trust if self.net.config.dense == "tokens" else None

    def forward(
        self,
        images: ImageFeatures,
        texts: TextFeatures,
        *,
        want_masks: bool = False,
        paired: TextFeatures | None = None,
    ) -> Scores:
        """See `Head.forward`. `paired` are query-side descriptions, one per caption (leaky)."""
        return score_with_gradient(
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

    @torch.no_grad()
    def score_parts(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Scores:
        """See `Head.score_parts`; the scorer cuts the work by itself."""
        return self.forward(images, texts)

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
