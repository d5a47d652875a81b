"""Stage 2 of SDTPS, the decision: which patches are kept (D of Eq. 4), and what becomes of the others.

Four decisions. `topk` keeps the K best. `gumbel` samples K patches in training, with probabilities that rise with the
scores, and takes the gradient of a relaxation that sums to K, as D does. `relaxed` keeps the K best too, so that the
forward pass is the same in every call; the noise is in the relaxation alone, whose gradient D carries. `binary` decides
per patch, so that the number of kept patches is learned and a ratio loss can act on it.

Shapes: B images, N patches, C width, K kept patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from seps.method.checks import InputError, check_attentions, check_features, check_ratio, is_compiling
from seps.method.config import DecisionKind
from seps.method.precision import float_apply, float_matmul
from seps.method.relaxation import FAR, soft_topk
from seps.method.score import combine_scores, min_max, score_predictor


def num_kept(num_patches: int, ratio: float) -> int:
    """K = max(1, ceil(ratio N))."""
    return max(1, math.ceil(num_patches * ratio))


def kept_counts(scores_XN: Tensor, ratio: float, valid_BN: Tensor | None) -> Tensor:
    """K of each row, counted over its valid patches: (B, 1)."""
    if valid_BN is None:
        count = num_kept(scores_XN.shape[-1], ratio)
        return torch.full_like(scores_XN[..., :1], count, dtype=torch.long)  # (..., N) -> (..., 1)
    return torch.ceil(valid_BN.sum(dim=-1, keepdim=True).double() * ratio).long().clamp_min(1)  # (..., N) -> (..., 1)


def rank_patches(scores_XN: Tensor) -> Tensor:
    """Patch indices from the best score to the worst, (B, N); of equal scores the lower index comes first."""
    if torch.onnx.is_in_onnx_export():
        # ONNX has no stable sort; its TopK is defined to put the lower index first, which torch.topk is not.
        return torch.topk(scores_XN, scores_XN.shape[-1], dim=-1).indices
    return torch.sort(scores_XN, dim=-1, descending=True, stable=True).indices  # (..., N)


def keep_best(scores_XN: Tensor, count_X1: Tensor) -> Tensor:
    """1 at the `count` best-scored patches of each row, 0 elsewhere: (B, N), (B, 1) -> (B, N) float32."""
    positions = torch.arange(scores_XN.shape[-1], device=scores_XN.device).expand_as(scores_XN)  # (..., N)
    chosen = (positions < count_X1).float()  # (..., N)
    return torch.zeros_like(scores_XN, dtype=torch.float32).scatter(-1, rank_patches(scores_XN), chosen)  # (..., N)


def hard_topk(scores_XN: Tensor, ratio: float, valid_BN: Tensor | None = None) -> Tensor:
    """D: 1 at the K best-scored valid patches, 0 elsewhere, (B, N) float32, without gradient."""
    scores = scores_XN.detach().float()  # (..., N)
    if valid_BN is not None:
        scores = scores.masked_fill(~valid_BN, float("-inf"))  # (..., N)
    elif not (is_compiling() or torch.onnx.is_in_onnx_export()):
        # One K for all rows, which then need no sorting.
        count, size = num_kept(scores.shape[-1], ratio), scores.shape[-1]
        if count >= size:
            return torch.ones_like(scores)  # (..., N)
        place = size - count
        try:  # on a CPU, where NumPy is eight times as fast: it compares many values at once
            values = scores.numpy().copy()
            values.partition(place, axis=-1)
            least = torch.from_numpy(values)[..., place : place + 1]  # (..., 1)
        except (TypeError, RuntimeError):  # on a GPU, in torch without NumPy, or inside a transform such as vmap
            least = scores.kthvalue(place + 1, dim=-1, keepdim=True).values
        if scores.device.type == "cpu":
            keep = scores >= least  # (..., N)
            if int(keep.sum()) * size == count * scores.numel():
                return keep.to(scores.dtype)  # (..., N)
        above, level = scores > least, scores == least  # (..., N), (..., N)
        room = count - above.sum(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
        return (above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))).to(scores.dtype)  # (..., N)
    return keep_best(scores, kept_counts(scores, ratio, valid_BN))  # (..., N)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform noise inside (0, 1), so that its logarithms are finite."""
    noise = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)  # (..., N)
    return noise.clamp(1e-6, 1 - 1e-6)  # (..., N)


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())  # (..., N)


def gumbel_topk(
    scores_XN: Tensor,
    ratio: float,
    *,
    temperature: float,
    sharpness: float,
    training: bool,
    sample: bool = True,
    valid_BN: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Straight-through Gumbel top-K: D (B, N) with K ones, its gradient that of `soft_topk`.

    `z = sharpness s - log(-log U)`, U uniform in (0, 1); D is 1 at the K largest z or, without `sample`, at the K
    largest s, so that the forward pass is the same in every call and the noise is in the gradient alone.
    In evaluation there is no noise, and D is that of `hard_topk`.
    """
    if not training:
        return hard_topk(scores_XN, ratio, valid_BN)  # (..., N)
    logits = _gumbel_logits(scores_XN, sharpness, valid_BN, generator)  # (..., N)
    soft = soft_topk(logits, kept_counts(logits, ratio, valid_BN), temperature)  # (..., N)
    return _straight_through(hard_topk(logits if sample else scores_XN, ratio, valid_BN), soft)  # (..., N)


def _gumbel_logits(
    scores_XN: Tensor, sharpness: float, valid_BN: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Scores times `sharpness` with Gumbel noise, (B, N) float32; padding far below everything."""
    logits = scores_XN.float() * sharpness  # (..., N)
    logits = logits - torch.log(-torch.log(_uniform(logits, generator)))  # (..., N)
    return logits if valid_BN is None else logits.masked_fill(~valid_BN, FAR)  # (..., N)


def binary_decision(
    scores_XN: Tensor,
    threshold: Tensor,
    *,
    temperature: float,
    sharpness: float,
    training: bool,
    valid_BN: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Keep or drop each patch by itself, `P(keep) = sigmoid(sharpness (s - threshold))`, at least one: D (B, N).

    In training D is a sample (logistic noise), and its gradient that of `sigmoid((logit + noise) / temperature)`.
    In evaluation the best patches are kept, as many as are expected to be: `round(sum P(keep))`.
    """
    logits = (scores_XN.float() - threshold) * sharpness  # (..., N)
    if valid_BN is not None:
        logits = logits.masked_fill(~valid_BN, FAR)  # (..., N)
    if not training:
        expected = torch.sigmoid(logits).sum(dim=-1, keepdim=True).round().clamp_min(1)  # (..., N) -> (..., 1)
        return keep_best(logits.detach(), expected)  # (..., N)
    noise = _uniform(logits, generator)  # (..., N)
    logits = logits + torch.log(noise) - torch.log1p(-noise)  # (..., N)
    best = keep_best(logits.detach(), torch.ones_like(logits[..., :1]))  # (..., N)
    hard = torch.maximum((logits.detach() > 0).float(), best)  # (..., N)
    return _straight_through(hard, torch.sigmoid(logits / temperature))  # (..., N)


def extra_weights(scores_XN: Tensor, keep_XN: Tensor, valid_XN: Tensor | None = None) -> Tensor:
    """Softmax of the raw scores of the discarded patches, (..., N) float32; zeros if none is discarded.

    `w_i = (1 - D_i) exp(s_i) / sum_i (1 - D_i) exp(s_i)`.
    """
    scores = scores_XN.float()  # (..., N)
    dropped = 1 - keep_XN.float()  # (..., N)
    if valid_XN is not None:
        dropped = dropped.masked_fill(~valid_XN, 0.0)  # (..., N)
    top = scores.detach().masked_fill(dropped.detach() <= 0, float("-inf")).amax(dim=-1, keepdim=True)  # (..., 1)
    weights = dropped * torch.exp((scores - top.clamp_min(-1e4)).clamp_max(0.0))  # (..., N)
    total = weights.sum(dim=-1, keepdim=True)  # (..., N) -> (..., 1)
    # With none discarded, D may still carry a gradient, and normalising the zero vector later sends one of 1e12
    # back: divided by infinity it ends here.
    return weights / torch.where(total > 0, total, float("inf"))  # (..., N)


def extra_token(patches_BNC: Tensor, scores_BN: Tensor, keep_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """One token for all discarded patches, `sum_i w_i v_i` with w of `extra_weights`: (B, N, C), (B, N) -> (B, 1, C).

    If none is discarded it is the zero vector.
    """
    weights = extra_weights(scores_BN, keep_BN, valid_BN)  # (B, N)
    return float_matmul(weights[:, None, :], patches_BNC).to(patches_BNC.dtype)  # (B, N), (B, N, C) -> (B, 1, C)


class Selection(NamedTuple):
    """What `TokenSparse` decided about B images."""

    tokens: Tensor
    """(B, K, C) kept patches, best first."""
    extra: Tensor
    """(B, 1, C) the discarded patches as one."""
    mask: Tensor
    """D (B, N): 1 at the kept patches."""
    indices: Tensor
    """(B, K) places of the kept patches among all."""
    kept_mask: Tensor
    """(B, K) D at the kept patches: ones, with D's gradient."""


class TokenSparse(nn.Module):
    """SDTPS, stages 1 and 2: score the patches and keep the best (Eq. 1-3 and the decision D).

    Flow::

        tokens (B, N, C), attentions (B, N)
          1 predict  s^p (B, N) = sigmoid(MLP(v))                  learned scoring alone (Eq. 1)
          2 score    s = (1 - 2b) s^p + b (s_st + s_dt + 2 s_im)   learned, each attention min-max normalised (Eq. 2-3)
                     s = a_im + a_st                               sum of cosines (the published code)
          3 top-K    D (B, N): 1 at the K = max(1, ceil(ratio N)) best patches, ties to the lower index
          4 gather   select_tokens (B, K, C), best first
          5 extra    extra_token (B, 1, C): softmax of the dropped patches' scores on their features

    s^p is the predictor's score of a patch; s_im, s_st and s_dt say how well it fits the image's own mean, the caption
    (sparse text) and the description (dense text); a_im, a_st and a_dt are the same before normalisation.

    Args:
        embed_dim: width C of the patches.
        sparse_ratio: part of the patches that is kept, in (0, 1].
        use_paper_version: learned scoring with the predictor s^p (Eq. 1), otherwise the sum.
        decision: "topk" (the K best), "gumbel" (K sampled in training), "relaxed" (the K best, with the gradient of a
            noisy relaxation) or "binary" (per patch, the number is learned).
        temperature, sharpness: of the relaxations; scores are multiplied by `sharpness` first.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        sparse_ratio: float = 0.6,
        use_paper_version: bool = False,
        *,
        decision: DecisionKind = "topk",
        temperature: float = 1.0,
        sharpness: float = 10.0,
    ) -> None:
        super().__init__()
        self.check_settings(sparse_ratio, decision, temperature, sharpness)
        self.embed_dim, self.sparse_ratio, self.use_paper_version = embed_dim, sparse_ratio, use_paper_version
        self.decision, self.temperature, self.sharpness = decision, temperature, sharpness
        if use_paper_version:
            self.score_predictor = score_predictor(embed_dim)
        if decision == "binary":
            self.threshold = nn.Parameter(torch.tensor(0.5))

    @staticmethod
    def check_settings(sparse_ratio: float, decision: str, temperature: float, sharpness: float) -> None:
        """Raise `InputError` for settings that cannot work."""
        check_ratio("sparse_ratio", sparse_ratio)
        if decision not in get_args(DecisionKind):
            raise InputError(f"decision must be one of {get_args(DecisionKind)}, but {decision!r} came.")
        for name, value in (("temperature", temperature), ("sharpness", sharpness)):
            if not 0 < value < math.inf:
                raise InputError(f"{name} must be positive and finite, but {value!r} came.")

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        return f"embed_dim={self.embed_dim}, sparse_ratio={self.sparse_ratio}, decision={self.decision!r}"

    def predict(self, tokens: Tensor) -> Tensor | None:
        """`s^p` of Eq. 1, (B, N, C) -> (B, N) float32, or None where scoring is the plain sum."""
        if not self.use_paper_version:
            return None
        return float_apply(self.score_predictor, tokens).squeeze(-1)  # (B, N, C) -> (B, N)

    def decide(self, scores: Tensor, valid: Tensor | None = None, full_score: Tensor | float = 1.0) -> Tensor:
        """D (B, N) for `scores` (B, N), by this module's decision.

        `full_score` is the largest possible score (the sum of Eq. 3's weights); the learned threshold of "binary"
        is a fraction of it. A sum of cosines has no such scale and is min-max scaled instead.
        """
        if self.decision == "topk":
            return hard_topk(scores, self.sparse_ratio, valid)  # (..., N)
        relaxed: dict[str, Any] = {"temperature": self.temperature, "sharpness": self.sharpness}
        relaxed["training"] = self.training
        if self.decision == "binary":
            scaled = scores / full_score if self.use_paper_version else min_max(scores, valid)  # (..., N)
            return binary_decision(scaled, self.threshold, **relaxed, valid_BN=valid)  # (..., N)
        return gumbel_topk(
            scores, self.sparse_ratio, sample=self.decision == "gumbel", valid_BN=valid, **relaxed
        )  # (..., N)

    def forward(
        self,
        tokens: Tensor,
        attention_x: Tensor,
        attention_y: Tensor,
        attention_y_dense: Tensor | None = None,
        beta: float = 0.25,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
        *,
        predicted: Tensor | None = None,
        full: bool = False,
    ) -> tuple[Tensor, ...]:
        """Kept patches (B, K, C), best first, the extra token (B, 1, C) and D (B, N).

        Args:
            tokens: (B, N, C) patches.
            attention_x: (B, N) cosines with the image's own global vector, `a_im`.
            attention_y: (B, N) cosines with the caption, `a_st`.
            attention_y_dense: (B, N) cosines with the dense text, `a_dt`; learned scoring only.
            beta: b of Eq. 3.
            use_gumbel, gumbel_tau: in this call D carries the gradient of the Gumbel relaxation of
                `(score + noise) / gumbel_tau`, as published; the kept set is that of the plain top-K ("relaxed").
            predicted: (B, N) `s^p` of an earlier `predict`, which no text changes.
            full: return a `Selection`, which has more.

        Raises:
            InputError: for attentions that do not fit, and where the number kept differs between images.
        """
        self.check_gathers()
        check_features("tokens", tokens, "images, patches, width", self.embed_dim, values=False)
        check_attentions(tokens, attention_x, attention_y, attention_y_dense)
        attentions = {"image": attention_x, "caption": attention_y, "dense": attention_y_dense}  # each (B, N)
        # Step 1, predict (Eq. 1): tokens (B, N, C) -> s^p (B, N); the plain sum has no predictor
        predicted = self.predict(tokens) if predicted is None else predicted  # (B, N)
        # Step 2, score (Eq. 2-3): s^p and attentions (B, N) -> scores (B, N)
        scores = self.score(attentions, predicted, beta)  # (B, N)
        # Step 3, top-K: scores (B, N) -> D (B, N), 1 at the K best
        if use_gumbel and self.decision == "topk":
            gumbel: dict[str, Any] = {"temperature": gumbel_tau, "sharpness": 1.0, "training": self.training}
            keep = gumbel_topk(scores, self.sparse_ratio, sample=False, **gumbel)  # (B, N)
        else:
            keep = self.decide(scores)  # (B, N)
        # Step 4, gather: tokens (B, N, C) where D is 1 -> kept patches (B, K, C), best first
        count = num_kept(tokens.shape[1], self.sparse_ratio)
        first = torch.where(keep.detach() > 0.5, scores.detach(), float("-inf"))  # (B, N)
        indices = rank_patches(first)[:, :count]  # (B, N) -> (B, K)
        select_tokens = torch.gather(tokens, 1, indices[..., None].expand(-1, -1, tokens.shape[-1]))  # (B, K, C)
        # Step 5, extra token: tokens (B, N, C) where D is 0, by the softmax of their scores -> (B, 1, C)
        extra = extra_token(tokens, scores, keep)  # (B, N, C), (B, N) -> (B, 1, C)
        if not full:
            return select_tokens, extra, keep  # (B, K, C), (B, 1, C), (B, N)
        return Selection(select_tokens, extra, keep, indices, torch.gather(keep, 1, indices))  # (B, K, C), ...

    def select(self, *arguments: Any, **options: Any) -> Selection:
        """What `forward` returns, and the places of the kept patches; arguments as there."""
        chosen: Selection = self(*arguments, full=True, **options)  # (B, K, C), ...
        return chosen

    def score(self, attentions: Mapping[str, Tensor | None], predicted: Tensor | None, beta: float) -> Tensor:
        """s of Eq. 3, or the sum of the cosines: by guide its attention (B, N), s^p (B, N) -> (B, N)."""
        given = {name: attention for name, attention in attentions.items() if attention is not None}  # each (B, N)
        if not self.use_paper_version:
            return combine_scores(given, {"image": 1.0, "caption": 1.0})  # (B, N)
        weights = {"image": 2 * beta, "caption": beta, "dense": beta}
        rest = 1 - 2 * beta
        return combine_scores(given, weights, predicted_BN=predicted, predictor_weight=rest, normalise=True)  # (B, N)

    def check_gathers(self) -> None:
        """Raise `InputError` where the number of kept patches may differ between images."""
        if self.decision == "binary":
            raise InputError(
                f"decision={self.decision!r} may keep another number of patches in each image, so they cannot be "
                "gathered into one tensor; use decide() and the masked aggregation instead."
            )
