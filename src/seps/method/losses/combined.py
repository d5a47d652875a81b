"""The whole objective: `L = L_align + w L_ratio` (Eq. 6-7).

Shapes: B pairs of image and text, T texts, N patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seps.method.config import LossConfig, RatioForm
from seps.method.losses.contrastive import InfoNCELoss, SigmoidLoss
from seps.method.losses.ratio import RatioLoss
from seps.method.losses.triplet import ContrastiveLoss


class SEPSLoss(nn.Module):
    """Alignment loss plus `ratio_weight` times the ratio loss; a call returns (total, align, ratio).

    Flow::

        similarities (B, B) -> L_align (Eq. 6), a scalar    triplet, or another loss in its place
        masks D (T, B, N)   -> L_ratio (Eq. 7), a scalar    (mean D - rho)^2 in one of three forms
        L = L_align + w L_ratio

    Args:
        margin, max_violation: of the triplet loss (Eq. 6), see `ContrastiveLoss`.
        target_ratio, ratio_weight, lambda_sparse, lambda_dense, ratio_form: of the ratio loss (Eq. 7), see `RatioLoss`.
        align: an alignment loss in place of the triplet, called `align(scores, img_ids)`.
    """

    def __init__(
        self,
        margin: float = 0.2,
        target_ratio: float = 0.5,
        ratio_weight: float = 2.0,
        max_violation: bool = False,
        lambda_sparse: float = 1.0,
        lambda_dense: float = 1.0,
        *,
        ratio_form: RatioForm | None = None,
        align: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.contrastive_loss = align or ContrastiveLoss(margin, max_violation)
        self.ratio_loss = RatioLoss(target_ratio, lambda_sparse, lambda_dense, ratio_form)
        self.ratio_weight = ratio_weight

    @classmethod
    def from_config(cls, config: LossConfig) -> SEPSLoss:
        """The objective a `LossConfig` describes."""
        align: nn.Module | None = None
        if config.kind == "infonce":
            align = InfoNCELoss(config.temperature)
        elif config.kind == "sigmoid":
            align = SigmoidLoss(config.temperature)
        return cls(
            config.margin,
            config.target_ratio,
            config.ratio_weight,
            config.hardest,
            config.lambda_sparse,
            config.lambda_dense,
            ratio_form=config.ratio_form,
            align=align,
        )

    def set_max_violation(self, max_violation: bool = True) -> None:
        """Switch the triplet loss between the hardest negative and the sum; other losses ignore it."""
        if isinstance(self.contrastive_loss, ContrastiveLoss):
            self.contrastive_loss.max_violation = max_violation

    def forward(
        self,
        similarity_matrix: Tensor,
        score_mask: Tensor | Sequence[Tensor],
        img_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Similarities (B, B), decision masks D, image ids (B,) -> (total, align, ratio) scalars."""
        # Step 1, alignment (Eq. 6): S (B, B) -> a scalar
        align: Tensor = self.contrastive_loss(similarity_matrix, img_ids)
        if not self.ratio_weight:
            return align, align, torch.zeros((), device=align.device)
        # Step 2, ratio (Eq. 7): D (T, B, N), or one for each branch -> a scalar
        ratio: Tensor = self.ratio_loss(score_mask)
        # Step 3, total: L = L_align + w L_ratio, a scalar
        return align + self.ratio_weight * ratio, align, ratio
