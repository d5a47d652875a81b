"""What passes between the steps of the network: the image's side, made once, and the score of one text.

Shapes: B images, P prefix tokens, N patches, L words of a description, C width, Q merged patches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class ImageSide:
    """The part of the score of B images that is the same for every caption; `encode_images` computes it once.

    The tokens of the images, the terms of Eq. 3 that come from the image and its description, the aggregation logits
    (Eq. 4) and, where images have descriptions, the descriptions' words. Each field's shape is told beside it.
    """

    prefix: Tensor
    """(B, P, C) prefix tokens such as CLS."""
    patches: Tensor
    """(B, N, C) spatial patches."""
    valid: Tensor | None
    """(B, N) bool: patches that are not padding; None when all are."""
    fixed_scores: dict[str, Tensor]
    """By branch: (B, N), the part of Eq. 3 that no caption changes: `w_p s^p` and all guides but the caption."""
    full_score: Tensor
    """(B, 1): the sum of Eq. 3's weights over the guides this image has, the scale of a learned threshold."""
    logits: dict[str, Tensor]
    """By branch: (B, N, Q) aggregation logits L."""
    pooled: Tensor
    """(B, C) L2-normalised mean patch."""
    dense_words: Tensor | None = None
    """(B, L, C) L2-normalised words of the description, where they are tokens of the image."""
    dense_mask: Tensor | None = None
    """(B, L) bool: valid words of the description; a row of False is an image without description. None: no image has
    one. (None also in a state of "branch" saved before this mask existed; there all images are described.)"""
    attentions: dict[str, Tensor] = field(default_factory=dict)
    """By guide: (B, N) cosines, where a scoring of somebody's own needs them with each caption; empty elsewhere."""

    @property
    def described(self) -> Tensor | None:
        """(B,) bool: images that have a description; None where no mask came."""
        return None if self.dense_mask is None else self.dense_mask.any(dim=-1)  # (B, L) -> (B,)


@dataclass
class TextScore:
    """One text against B images."""

    similarity: Tensor
    """(B,) S of Eq. 5."""
    masks: tuple[Tensor, ...]
    """D of each branch, (B, N)."""
    patches: Tensor | None = None
    """(B,) S of the patches alone, before the description is added; None where S has one part."""
    description: Tensor | None = None
    """(B,) S of the description alone; not defined for an image without description."""
