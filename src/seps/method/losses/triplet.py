"""Triplet alignment loss (Eq. 6): the right pair above every wrong one by a margin, in both directions.

Shapes: B pairs of image and text.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seps.method.checks import InputError, check_features, check_shape


def check_square(scores: Tensor, img_ids: Tensor | None) -> None:
    """Raise `InputError` unless `scores` is (B, B), B at least 1, pair i on the diagonal, with B image ids if any."""
    check_features("scores", scores, "images, texts", values=False)
    if scores.shape[0] != scores.shape[1]:
        raise InputError(
            f"scores must be square, image i and text i being a pair, but its shape is {tuple(scores.shape)}."
        )
    if img_ids is not None:
        check_shape("img_ids", img_ids, "images", scores.shape[:1])


def same_image(scores: Tensor, img_ids: Tensor | None) -> Tensor:
    """(B, B) bool: pairs that are not negatives: the diagonal, and pairs that share an image id."""
    same = torch.eye(scores.shape[0], dtype=torch.bool, device=scores.device)  # (B, B)
    return same if img_ids is None else same | (img_ids[:, None] == img_ids[None, :])  # (B, B)


def triplet_loss(scores: Tensor, img_ids: Tensor | None = None, *, margin: float, hardest: bool) -> Tensor:
    """`sum_i [m - S_ii + S_ij]_+ + [m - S_ii + S_ji]_+` (Eq. 6): (B, B) -> scalar.

    S_ij is the score of image i and text j, m the `margin`, `[x]_+ = max(x, 0)`. For each i, j is the hardest negative
    of the batch, or with `hardest=False` all of them are added.
    """
    check_square(scores, img_ids)
    # Step 1, right pairs: S (B, B) -> its diagonal (B,), and which pairs are no negatives (B, B)
    scores = scores.float()  # (B, B)
    positive = scores.diagonal()  # (B, B) -> (B,)
    excluded = same_image(scores, img_ids)  # (B, B)
    # Step 2, violations: S (B, B) and the diagonal (B,) -> [m - S_ii + S_ij]_+ (B, B), for texts and for images
    texts = (margin + scores - positive[:, None]).clamp_min(0).masked_fill(excluded, 0.0)  # (B, B)
    images = (margin + scores - positive[None, :]).clamp_min(0).masked_fill(excluded, 0.0)  # (B, B)
    # Step 3, sum: the largest of each row and column (B,), or all of (B, B) -> a scalar
    if hardest:
        return texts.amax(dim=1).sum() + images.amax(dim=0).sum()
    return texts.sum() + images.sum()


def check_margin(margin: object) -> None:
    """Raise `InputError` unless the margin is a number: the published call has the options in its place."""
    if not isinstance(margin, (int, float)):
        raise InputError(
            f"margin must be a number, but got a {type(margin).__name__}; pass the published options by name: "
            "ContrastiveLoss(opt=opt, margin=..., max_violation=...)."
        )


class ContrastiveLoss(nn.Module):
    """Triplet loss with the hardest negative of the batch, or the sum of all violations (Eq. 6).

    Flow::

        S (B, B), image i and text i being a pair
          text negatives   [m - S_ii + S_ij]_+ (B, B) -> hardest j, or all -> (B,) -> sum
          image negatives  [m - S_ii + S_ji]_+ (B, B) -> hardest j, or all -> (B,) -> sum
        L_align = both sums, a scalar

    Pairs that share an image id are not negatives of each other.

    Args:
        margin: by how much a right pair must score above a wrong one.
        max_violation: use the hardest negative alone; switch with `max_violation_on()` / `max_violation_off()`.
        opt: the published options, of which `mask_repeat` is read: with False image ids are ignored.
    """

    def __init__(self, margin: float = 0.2, max_violation: bool = False, *, opt: object = None) -> None:
        super().__init__()
        check_margin(margin)
        options = opt if isinstance(opt, Mapping) else vars(opt) if opt is not None else {}
        self.mask_repeat = bool(options.get("mask_repeat", True))
        self.margin = margin
        self.max_violation = max_violation

    def max_violation_on(self) -> None:
        """Use the hardest negative alone."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """Use the sum over all negatives."""
        self.max_violation = False

    def forward(self, scores: Tensor, img_ids: Tensor | None = None) -> Tensor:
        """(B, B) similarities, image i and text i being a pair -> scalar loss, summed over the batch."""
        ids = img_ids if self.mask_repeat else None
        # Steps 1 to 3, `triplet_loss`: S (B, B) -> a scalar
        return triplet_loss(scores, ids, margin=self.margin, hardest=self.max_violation)
