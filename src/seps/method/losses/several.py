"""InfoNCE for texts with many right images: what people type names what is in hundreds of photos.

Shapes: T texts, B images.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import InputError


def several_infonce(scores: Tensor, scale: Tensor | float, right: Tensor, unknown: Tensor | None = None) -> Tensor:
    """Each right image of a text against all wrong ones, of `z = scale * scores`: (T, B) -> scalar.

    `L_t = -1 / |R_t| sum_{r in R_t} log(exp z_tr / (exp z_tr + sum_{w wrong} exp z_tw))`, the mean over the texts that
    have a right and a wrong image, 0 where none has. Right images do not compete with each other. With one right image
    per text it is the cross-entropy of InfoNCE's rows.

    right, unknown: (T, B) bool. Unknown images take no part; one that is marked as both is unknown.
    Raises InputError for marks of another shape or kind.
    """
    for name, marks in (("right", right), ("unknown", unknown)):
        if marks is not None and (marks.shape != scores.shape or marks.dtype != torch.bool):
            raise InputError(
                f"{name} must be bool and have the shape {tuple(scores.shape)} of the scores, but "
                f"{tuple(marks.shape)} {marks.dtype} came."
            )
    wrong = ~right  # (T, B)
    if unknown is not None:
        right, wrong = right & ~unknown, wrong & ~unknown  # (T, B), (T, B)
    counts = right.sum(dim=1)  # (T,)
    asked = (counts > 0) & wrong.any(dim=1)  # (T,)
    logits = scores.float() * scale  # (T, B)
    # A finite floor: the logarithm of an empty sum has no gradient.
    against = logits.masked_fill(~wrong, torch.finfo(logits.dtype).min).logsumexp(dim=1)  # (T, B) -> (T,)
    losses = F.softplus(against[:, None] - logits).masked_fill(~right, 0.0)  # (T, B)
    means = losses.sum(dim=1) / counts.clamp_min(1)  # (T,)
    return means.masked_fill(~asked, 0.0).sum() / asked.sum().clamp_min(1)
