"""Ratio loss (Eq. 7): keeps the share of kept patches near a target.

It can act only where the *number* kept is learned (`decision="binary"`). With top-K the mean of D is K / N
whatever the network does; the loss is then a constant, and warns once.

Shapes: T texts, B images, N patches, R rows of a mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seps.method.checks import InputError
from seps.method.config import RatioForm


def ratio_loss(
    masks: Sequence[Tensor],
    *,
    target: float,
    form: RatioForm,
    lambda_sparse: float = 1.0,
    lambda_dense: float = 1.0,
) -> Tensor:
    """The ratio loss in its three published forms, from the decisions D_s and (if any) D_d -> scalar.

    - "unified": `(mean(D_s + D_d) - rho)^2`, the published code's;
    - "separate": `l1 (mean D_s - rho)^2 + l2 (mean D_d - rho)^2`, the dual-mode code's;
    - "printed": `(rho - l1 mean D_s - l2 mean D_d)^2`, the paper's Eq. 7 as printed.

    D_s are the decisions of the caption's branch, D_d those of the description's; rho is `target`, l1 `lambda_sparse`,
    l2 `lambda_dense`.
    """
    if not 1 <= len(masks) <= 2:
        raise InputError(f"the ratio loss takes one or two masks, but {len(masks)} came.")
    # Step 1, means: D_s and D_d, each (..., N) -> the share of kept patches, a scalar each
    means = [mask.float().mean() for mask in masks]
    # Step 2, distance to rho: the shares -> a scalar
    if form == "unified":
        return (torch.stack(means).sum() - target) ** 2
    weights = [lambda_sparse, lambda_dense][: len(means)]
    if form == "printed":
        return (target - torch.stack([w * m for w, m in zip(weights, means, strict=True)]).sum()) ** 2
    return torch.stack([w * (m - target) ** 2 for w, m in zip(weights, means, strict=True)]).sum()


_ENOUGH_ROWS = 16
"""This many equal counts are taken as a fixed number."""


def number_is_fixed(masks: Sequence[Tensor]) -> bool | None:
    """Whether a ratio loss on these decisions cannot act: they carry no gradient, or keep the same number in every row.

    None where these masks cannot tell: without gradient mode, or too few rows of one count.
    """
    if not torch.is_grad_enabled():
        return None
    fixed: bool | None = True
    for mask in masks:
        counts = mask.detach().float().sum(dim=-1).flatten()  # (..., N) -> (R,)
        if mask.requires_grad and bool((counts != counts[:1]).any()):
            return False
        if mask.requires_grad and counts.numel() < _ENOUGH_ROWS:
            fixed = None
    return fixed


class RatioLoss(nn.Module):
    """Ratio loss over the decision masks of a batch (Eq. 7); warns once if the masks keep a fixed number.

    Flow::

        D_s, D_d (T, B, N), 1 at kept patches -> mean of each, a scalar -> L_ratio, a scalar
        L_ratio = l1 (mean D_s - rho)^2 + l2 (mean D_d - rho)^2     "separate"; `ratio_loss` has all three forms

    Args:
        target_ratio: rho, the share of the patches that should be kept.
        lambda_sparse, lambda_dense: l1 and l2, the weights of the caption's and the description's branch.
        form: "unified", "separate" or "printed", see `ratio_loss`; None takes "separate" for a tuple of masks and
            "unified" for a single tensor, as the published systems do.
    """

    def __init__(
        self,
        target_ratio: float = 0.5,
        lambda_sparse: float = 1.0,
        lambda_dense: float = 1.0,
        form: RatioForm | None = None,
    ) -> None:
        super().__init__()
        self.target_ratio, self.lambda_sparse, self.lambda_dense = target_ratio, lambda_sparse, lambda_dense
        self.form: RatioForm | None = form
        self._checked = False

    def forward(self, score_mask: Tensor | Sequence[Tensor]) -> Tensor:
        """D, or a tuple (D_s, D_d), each (..., N) with 1 at kept patches -> scalar loss."""
        masks: list[Any] = list(score_mask) if isinstance(score_mask, (list, tuple)) else [score_mask]  # each (..., N)
        self._check_once(masks)
        # Steps 1 and 2, `ratio_loss`: D_s and D_d, each (..., N) -> a scalar
        form = self.form or ("unified" if isinstance(score_mask, Tensor) else "separate")
        weights = {"lambda_sparse": self.lambda_sparse, "lambda_dense": self.lambda_dense}
        return ratio_loss(masks, target=self.target_ratio, form=form, **weights)

    def _check_once(self, masks: Sequence[Tensor]) -> None:
        """Warn once where the loss cannot act."""
        for mask in masks:
            if not isinstance(mask, Tensor):
                raise InputError(f"score_mask must hold tensors (texts, images, patches), but got {mask!r}.")
        if self._checked:
            return
        fixed = number_is_fixed(masks)
        self._checked = fixed is not None
        if fixed:
            warnings.warn(
                "The ratio loss cannot act: this decision keeps a fixed number of patches, so the loss is a constant. "
                "Set its weight to 0, or use a decision that learns the number.",
                UserWarning,
            )
