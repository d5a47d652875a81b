"""Stage 2 of SDTPS, the aggregation (Eq. 4): the kept patches are merged into a few.

The decision D enters as a weight before the softmax is normalised, `w_ik = D_i exp(L_ik) / sum_i D_i exp(L_ik)`.
The value is the softmax over the kept patches; the derivative with respect to D is of the order of the weights
themselves. (The published code subtracts `(1 - D) 1e10` from the logits, which multiplies the gradient of a
straight-through D by 1e10.)

Shapes: B images, N patches, K patches of a second set, C width, Q merged patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seps.method.checks import InputError, check_features, check_shape
from seps.method.precision import float_apply, float_matmul


def merge_factors(logits: Tensor, top: Tensor) -> Tensor:
    """`exp(L_ik - top_k)`, at most 1, to which the weight of patch i in merged patch k is proportional: (..., N, Q).

    A dropped patch may have a logit far above those of the kept patches: its weight is zero, but not its derivative.
    """
    return torch.exp((logits - top).clamp_max(0.0))  # (..., N, Q)


def merge_weights(logits_BNQ: Tensor, keep: Tensor | None = None) -> Tensor:
    """Softmax over the kept patches, `W_ik = D_i exp(L_ik) / sum_i D_i exp(L_ik)`: (B, N, Q), (..., N) -> (..., N, Q).

    L_ik is the logit of patch i in merged patch k. Float32; each column sums to 1, or is 0 where none is kept.
    """
    logits = logits_BNQ.float()  # (B, N, Q)
    if keep is None:
        return torch.softmax(logits, dim=1)  # (B, N, Q)
    keep = keep.float()[..., None]  # (..., N, 1)
    top = torch.where(keep.detach() > 0, logits.detach(), float("-inf")).amax(dim=-2, keepdim=True)  # (..., 1, Q)
    weights = keep * merge_factors(logits, top)  # (..., N, Q)
    total = weights.sum(dim=-2, keepdim=True)  # (..., 1, Q)
    return weights / torch.where(total > 0, total, float("inf"))  # (..., N, Q)


def merge(patches_BNC: Tensor, logits_BNQ: Tensor, keep_BN: Tensor | None = None) -> Tensor:
    """`vhat_k = sum_i W_ik v_i` (Eq. 4), summed in float32: (B, N, C), (B, N, Q) -> (B, Q, C) in the patches' dtype."""
    if keep_BN is not None:
        remedy = " For the kept patches alone pass D gathered at them (`TokenSparse.select(...).kept_mask`)."
        check_shape("the decision D", keep_BN, "images, patches", logits_BNQ.shape[:2], remedy=remedy)
    weights = merge_weights(logits_BNQ, keep_BN)  # (B, N, Q)
    return float_matmul(weights.transpose(1, 2), patches_BNC).to(patches_BNC.dtype)  # (B, N, Q), (B, N, C) -> (B, Q, C)


def _weight_mlp(dim: int, keeped_patches: int, dim_ratio: float) -> nn.Sequential:
    hidden = max(1, int(dim * dim_ratio))
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, keeped_patches))


def check_two_sets(first: Tensor, second: Tensor | None, second_mask: Tensor | None) -> None:
    """Raise `InputError` unless both kept sets are of the same images, and the second mask has its patches."""
    if second is not None:
        check_shape("tokens_dense", second, "images, patches, width", (len(first), None, None))
    elif second_mask is not None:
        raise InputError("mask_dense came without tokens_dense; pass the patches it belongs to.")


class TokenAggregation(nn.Module):
    """Merge patches with one learned weight matrix (Eq. 4 with a single kept set).

    Flow::

        1 logits  x (B, N, C) -> LayerNorm, Linear, GELU, Linear, times scale -> L (B, N, Q)
        2 merge   softmax of L over the kept patches -> W (B, N, Q), W^T x -> (B, Q, C)

    Args:
        dim: width C.
        keeped_patches: number Q of merged patches.
        dim_ratio: hidden width of the MLP as a part of `dim`.
    """

    def __init__(self, dim: int = 512, keeped_patches: int = 64, dim_ratio: float = 0.2) -> None:
        super().__init__()
        if keeped_patches < 1:
            raise InputError(f"keeped_patches must be at least 1, but {keeped_patches!r} came; raise the ratios.")
        self.weight = _weight_mlp(dim, keeped_patches, dim_ratio)
        self.scale = nn.Parameter(torch.ones(1, 1, 1))
        self.keeped_patches = keeped_patches

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        return f"kept -> {self.keeped_patches} merged patches"

    def logits(self, x: Tensor) -> Tensor:
        """Logits L of the merge weights: (B, N, C) -> (B, N, Q) float32. They depend on the image alone."""
        check_features("patches", x, "images, patches, width", values=False)
        return float_apply(self.weight, x) * self.scale.float()  # (B, N, C) -> (B, N, Q)

    def forward(self, x: Tensor, keep_policy: Tensor | None = None, logits: Tensor | None = None) -> Tensor:
        """Merge `x` into (B, Q, C): all patches (B, N, C) with D (B, N), or the kept ones (B, K, C).

        `keep_policy` is D, or for the kept patches D gathered at them (B, K): all ones, but the gradient of a relaxed
        decision passes through it either way. `logits` are those of an earlier call of `logits`, which no text changes.
        """
        # Step 1, logits: x (B, N, C) -> L (B, N, Q), a column for each merged patch
        logits = self.logits(x) if logits is None else logits  # (B, N, Q)
        # Step 2, merge: softmax of L over the patches where D (B, N) is 1 -> W (B, N, Q), and W^T x -> (B, Q, C)
        return merge(x, logits, keep_policy)  # (B, N, C), (B, N, Q) -> (B, Q, C)


class DualTokenAggregation(nn.Module):
    """Merge two kept sets with a weight matrix each and add the results (Eq. 4 as printed).

    Flow::

        tokens_sparse (B, N, C) -> W_s \\
                                         W_s^T v^s + W_d^T v^d -> (B, Q, C)
        tokens_dense (B, N', C) -> W_d /

    Both MLPs share one `scale`. Arguments as in `TokenAggregation`.
    """

    def __init__(self, dim: int = 512, keeped_patches: int = 64, dim_ratio: float = 0.2) -> None:
        super().__init__()
        if keeped_patches < 1:
            raise InputError(f"keeped_patches must be at least 1, but {keeped_patches!r} came; raise the ratios.")
        self.weight_sparse = _weight_mlp(dim, keeped_patches, dim_ratio)
        self.weight_dense = _weight_mlp(dim, keeped_patches, dim_ratio)
        self.scale = nn.Parameter(torch.ones(1, 1, 1))
        self.keeped_patches = keeped_patches

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        return f"two kept sets -> {self.keeped_patches} merged patches"

    def logits(self, x: Tensor, branch: str) -> Tensor:
        """Logits of `branch`, "caption" or "dense" (the description's): (B, N, C) -> (B, N, Q) float32."""
        mlp = self.weight_sparse if branch == "caption" else self.weight_dense
        check_features("patches", x, "images, patches, width", values=False)
        return float_apply(mlp, x) * self.scale.float()  # (B, N, C) -> (B, N, Q)

    def forward(
        self,
        tokens_sparse: Tensor,
        tokens_dense: Tensor | None = None,
        mask_sparse: Tensor | None = None,
        mask_dense: Tensor | None = None,
        logits: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Merge both sets into (B, Q, C); the masks D (B, N) leave patches out. With one set W_s works alone.

        `logits` are those of earlier calls of `logits` for both branches, which no text changes.
        """
        check_two_sets(tokens_sparse, tokens_dense, mask_dense)
        # Step 1, sparse text: tokens (B, N, C) -> logits (B, N, Q) -> softmax where D_s is 1 -> (B, Q, C)
        first = self.logits(tokens_sparse, "caption") if logits is None else logits[0]  # (B, N, Q)
        sparse = merge(tokens_sparse, first, mask_sparse)  # (B, N, C), (B, N, Q) -> (B, Q, C)
        if tokens_dense is None:
            return sparse  # (B, Q, C)
        # Step 2, dense text: the same with W_d and D_d -> (B, Q, C)
        second = self.logits(tokens_dense, "dense") if logits is None else logits[1]  # (B, K, Q)
        dense = merge(tokens_dense, second, mask_dense)  # (B, K, C), (B, K, Q) -> (B, Q, C)
        # Step 3, sum of both: (B, Q, C)
        return sparse + dense  # (B, Q, C)
