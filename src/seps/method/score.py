"""Stage 1 of SDTPS, semantic scoring (Eq. 1-3): how well each patch fits each guide (image, caption, description).

Shapes: B images, N patches, C width, L positions that a mean is taken over.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def masked_mean(features_BLC: Tensor, mask_BL: Tensor | None) -> Tensor:
    """`E`, the mean over the valid positions, in float32: (B, L, C), (B, L) -> (B, C); zero where none is valid."""
    features = features_BLC.float()  # (B, L, C)
    if mask_BL is None:
        return features.mean(dim=1)  # (B, L, C) -> (B, C)
    total = features.masked_fill(~mask_BL[..., None], 0.0).sum(dim=1)  # (B, L, C) -> (B, C)
    return total / mask_BL.sum(dim=1, keepdim=True).clamp_min(1)  # (B, C)


@torch.no_grad()
def cosine_attention(patches_BNC: Tensor, vector_BC: Tensor) -> Tensor:
    """`a_i = cos(v_i, E)` (Eq. 2), float32 and without gradient: (B, N, C), (B or 1, C) -> (B, N).

    v_i is patch i; E is the global vector of a guide: the mean of the patches, of the words or of another sensor.
    """
    patches = F.normalize(patches_BNC.detach().float(), dim=-1)  # (B, N, C)
    vector = F.normalize(vector_BC.detach().float(), dim=-1)  # (B or 1, C)
    return (patches * vector[:, None, :]).sum(dim=-1)  # (B, N, C) -> (B, N)


def min_max(attention_XN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """Scale each row to [0, 1] over its valid patches: `s = (a - min a) / (max a - min a + 1e-8)`, (B, N) -> (B, N)."""
    if valid_BN is None:
        low, high = (
            attention_XN.amin(dim=-1, keepdim=True),
            attention_XN.amax(dim=-1, keepdim=True),
        )  # (..., 1), (..., 1)
        return (attention_XN - low) / (high - low + 1e-8)  # (..., N)
    low = attention_XN.masked_fill(~valid_BN, float("inf")).amin(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
    high = attention_XN.masked_fill(~valid_BN, float("-inf")).amax(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
    return ((attention_XN - low) / (high - low + 1e-8)).masked_fill(~valid_BN, 0.0)  # (..., N)


def score_predictor(embed_size: int) -> nn.Sequential:
    """`s^p = sigmoid(Linear(GELU(Linear(v))))` (Eq. 1): (..., C) -> (..., 1)."""
    hidden = embed_size // 4
    return nn.Sequential(nn.Linear(embed_size, hidden), nn.GELU(), nn.Linear(hidden, 1), nn.Sigmoid())


def combine_scores(
    attentions: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    fixed_BN: Tensor | None = None,
    predicted_BN: Tensor | None = None,
    predictor_weight: float = 0.0,
    normalise: bool = False,
    valid_BN: Tensor | None = None,
) -> Tensor:
    """Eq. 3 for any set of guides g: `s = w_p s^p + sum_g w_g s_g` -> (B, N), float32.

    s^p is the predictor's score (`predicted_BN`), w_p its weight, s_g the attention of guide g, w_g its weight.

    `attentions` maps a guide's name to its cosines (B, N); a guide that has a weight but no attention (no
    description came) contributes nothing. With `normalise` each attention is min-max scaled first. `fixed_BN` is a sum
    made earlier, to which the guides are added.
    """
    terms = []
    if fixed_BN is not None:
        terms.append(fixed_BN.float())
    if predicted_BN is not None and predictor_weight:
        terms.append(predictor_weight * predicted_BN.float())
    for name, attention in attentions.items():
        if name in weights:
            guide = min_max(attention, valid_BN) if normalise else attention  # (..., N)
            terms.append(weights[name] * guide)
    total = terms[0]  # (..., N)
    for term in terms[1:]:
        total = total + term  # (..., N)
    return total
