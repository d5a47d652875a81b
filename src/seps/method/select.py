"""Stage 2 of SDTPS, the decision: which patches are kept (D of Eq. 4), and what becomes of the others.

Four decisions. `topk` keeps the K best. `gumbel` samples K patches in training, with probabilities that rise with the
scores, and takes the gradient of a relaxation that sums to K, as D does. `relaxed` keeps the K best too, so that the
forward pass is the same in every call; the noise is in the relaxation alone, whose gradient D carries. `binary` decides
per patch, so that the number of kept patches is learned and a ratio loss can act on it.

Shapes: B images, N patches, C width, K kept patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from seps.method.checks import InputError, check_features, check_ratio, check_tensor, is_compiling
from seps.method.config import DecisionKind
from seps.method.precision import float_apply, float_matmul
from seps.method.relaxation import FAR, soft_topk
from seps.method.score import combine_scores, min_max, score_predictor


def num_kept(num_patches: int, ratio: float) -> int:
    """K = max(1, ceil(ratio N))."""
    return max(1, math.ceil(num_patches * ratio))


def kept_counts(scores_BN: Tensor, ratio: float, valid_BN: Tensor | None) -> Tensor:
    """K of each row, counted over its valid patches: (B, 1)."""
    if valid_BN is None:
        count = num_kept(scores_BN.shape[-1], ratio)
        return torch.full_like(scores_BN[..., :1], count, dtype=torch.long)  # (B, N) -> (B, 1)
    return torch.ceil(valid_BN.sum(dim=-1, keepdim=True).double() * ratio).long().clamp_min(1)  # (B, N) -> (B, 1)


def rank_patches(scores_BN: Tensor) -> Tensor:
    """Patch indices from the best score to the worst, (B, N); of equal scores the lower index comes first."""
    if torch.onnx.is_in_onnx_export():
        # ONNX has no stable sort; its TopK is defined to put the lower index first, which torch.topk is not.
        return torch.topk(scores_BN, scores_BN.shape[-1], dim=-1).indices
    return torch.sort(scores_BN, dim=-1, descending=True, stable=True).indices  # (B, N)


def keep_best(scores_BN: Tensor, count_B1: Tensor) -> Tensor:
    """1 at the `count` best-scored patches of each row, 0 elsewhere: (B, N), (B, 1) -> (B, N) float32."""
    positions = torch.arange(scores_BN.shape[-1], device=scores_BN.device).expand_as(scores_BN)  # (B, N)
    chosen = (positions < count_B1).float()  # (B, N)
    return torch.zeros_like(scores_BN, dtype=torch.float32).scatter(-1, rank_patches(scores_BN), chosen)  # (B, N)


def hard_topk(scores_BN: Tensor, ratio: float, valid_BN: Tensor | None = None) -> Tensor:
    """D: 1 at the K best-scored valid patches, 0 elsewhere, (B, N) float32, without gradient."""
    scores = scores_BN.detach().float()  # (B, N)
    if valid_BN is None and not (is_compiling() or torch.onnx.is_in_onnx_export()):
        return _keep_best_of_all(scores, num_kept(scores.shape[-1], ratio))  # (B, N)
    if valid_BN is not None:
        scores = scores.masked_fill(~valid_BN, float("-inf"))  # (B, N)
    return keep_best(scores, kept_counts(scores, ratio, valid_BN))  # (B, N)


def _keep_best_of_all(scores_BN: Tensor, count: int) -> Tensor:
    """`keep_best` with one K for all rows, without sorting them: (B, N) -> (B, N) float32."""
    if count >= scores_BN.shape[-1]:
        return torch.ones_like(scores_BN)  # (B, N)
    least = _nth_smallest(scores_BN, scores_BN.shape[-1] - count)  # (B, 1)
    if scores_BN.device.type == "cpu":
        keep = scores_BN >= least  # (B, N)
        if int(keep.sum()) * scores_BN.shape[-1] == count * scores_BN.numel():
            return keep.to(scores_BN.dtype)  # (B, N)
    above, level = scores_BN > least, scores_BN == least  # (B, N), (B, N)
    room = count - above.sum(dim=-1, keepdim=True)  # (B, N) -> (B, 1)
    return (above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))).to(scores_BN.dtype)  # (B, N)


def _nth_smallest(scores_BN: Tensor, place: int) -> Tensor:
    """The value at `place`, counted from 0, of each row in rising order: (B, N) -> (B, 1)."""
    if scores_BN.device.type == "cpu":
        try:
            values = scores_BN.clone().numpy()
            # NumPy is eight times as fast here: it compares many values at once.
            values.partition(place, axis=-1)
            return torch.from_numpy(values)[..., place : place + 1]  # (B, N) -> (B, 1)
        except RuntimeError:  # torch without NumPy, or inside a transform such as vmap
            pass
    return scores_BN.kthvalue(place + 1, dim=-1, keepdim=True).values  # (B, N) -> (B, 1)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform noise inside (0, 1), so that its logarithms are finite."""
    noise = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)  # (..., N)
    return noise.clamp(1e-6, 1 - 1e-6)  # (..., N)


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())  # (..., N)


def gumbel_topk(
    scores_BN: Tensor,
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
        return hard_topk(scores_BN, ratio, valid_BN)  # (B, N)
    logits = _gumbel_logits(scores_BN, sharpness, valid_BN, generator)  # (B, N)
    soft = soft_topk(logits, kept_counts(logits, ratio, valid_BN), temperature)  # (B, N)
    return _straight_through(hard_topk(logits if sample else scores_BN, ratio, valid_BN), soft)  # (B, N)


def _gumbel_logits(
    scores_BN: Tensor, sharpness: float, valid_BN: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Scores times `sharpness` with Gumbel noise, (B, N) float32; padding far below everything."""
    logits = scores_BN.float() * sharpness  # (B, N)
    logits = logits - torch.log(-torch.log(_uniform(logits, generator)))  # (B, N)
    return logits if valid_BN is None else logits.masked_fill(~valid_BN, FAR)  # (B, N)


def binary_decision(
    scores_BN: Tensor,
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
    logits = (scores_BN.float() - threshold) * sharpness  # (B, N)
    if valid_BN is not None:
        logits = logits.masked_fill(~valid_BN, FAR)  # (B, N)
    if not training:
        expected = torch.sigmoid(logits).sum(dim=-1, keepdim=True).round().clamp_min(1)  # (B, N) -> (B, 1)
        return keep_best(logits.detach(), expected)  # (B, N)
    noise = _uniform(logits, generator)  # (B, N)
    logits = logits + torch.log(noise) - torch.log1p(-noise)  # (B, N)
    best = keep_best(logits.detach(), torch.ones_like(logits[..., :1]))  # (B, N)
    hard = torch.maximum((logits.detach() > 0).float(), best)  # (B, N)
    return _straight_through(hard, torch.sigmoid(logits / temperature))  # (B, N)


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
          score   s = (1 - 2b) s^p + b (s_st + s_dt + 2 s_im)     learned, each attention min-max normalised
                  s = a_im + a_st                                  sum of cosines (the published code)
          decide  D (B, N): 1 at the K = max(1, ceil(ratio N)) best patches, ties to the lower index
          gather  select_tokens (B, K, C), best first
          merge   extra_token (B, 1, C): softmax of the discarded patches' scores on their features

    s^p is the predictor's score of a patch; s_im, s_st and s_dt say how well it fits the image's own mean, the caption
    (sparse text) and the description (dense text); a_im, a_st and a_dt are the same before normalisation.

    Args:
        embed_dim: width C of the patches.
        sparse_ratio: part of the patches that is kept, in (0, 1].
        use_paper_version: learned scoring with the predictor s^p (Eq. 1), otherwise the sum.
        decision: "topk" (the K best), "gumbel" (K sampled in training), "relaxed" (the K best, with the gradient of a
            noisy relaxation) or "binary" (per patch, the number is learned); or any name, with `decide_by`.
        temperature, sharpness: of the relaxations; scores are multiplied by `sharpness` first.
        decide_by: a decision of your own, `decide_by(scores, count, valid)` -> D; see `seps.register_decision`.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        sparse_ratio: float = 0.6,
        use_paper_version: bool = False,
        *,
        decision: DecisionKind | str = "topk",
        temperature: float = 1.0,
        sharpness: float = 10.0,
        decide_by: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_ratio("sparse_ratio", sparse_ratio)
        if decide_by is None and decision not in get_args(DecisionKind):
            raise InputError(f"decision must be one of {get_args(DecisionKind)}, but {decision!r} came.")
        for name, value in (("temperature", temperature), ("sharpness", sharpness)):
            if not 0 < value < math.inf:
                raise InputError(f"{name} must be positive and finite, but {value!r} came.")
        self.embed_dim = embed_dim
        self.sparse_ratio = sparse_ratio
        self.use_paper_version = use_paper_version
        self.decision = decision
        self.decide_by = decide_by
        self.temperature = temperature
        self.sharpness = sharpness
        if use_paper_version:
            self.score_predictor = score_predictor(embed_dim)
        if decision == "binary":
            self.threshold = nn.Parameter(torch.tensor(0.5))

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
        if self.decide_by is not None:
            return self._own_decision(self.decide_by, scores, valid)  # (..., N)
        if self.decision == "topk":
            return hard_topk(scores, self.sparse_ratio, valid)  # (B, N)
        if self.decision in ("gumbel", "relaxed"):
            return gumbel_topk(  # (B, N)
                scores,
                self.sparse_ratio,
                temperature=self.temperature,
                sharpness=self.sharpness,
                training=self.training,
                sample=self.decision == "gumbel",
                valid_BN=valid,
            )
        return binary_decision(  # (B, N)
            scores / full_score if self.use_paper_version else min_max(scores, valid),
            self.threshold,
            temperature=self.temperature,
            sharpness=self.sharpness,
            training=self.training,
            valid_BN=valid,
        )

    def _own_decision(
        self, decide: Callable[[Tensor, Tensor, Tensor | None], Tensor], scores: Tensor, valid: Tensor | None
    ) -> Tensor:
        keep = decide(scores.float(), kept_counts(scores, self.sparse_ratio, valid), valid)  # (..., N)
        if not isinstance(keep, Tensor) or keep.shape != scores.shape:
            raise InputError(
                f"The decision {self.decision!r} must return D of the scores' shape {tuple(scores.shape)}, and "
                f"returned {tuple(keep.shape) if isinstance(keep, Tensor) else type(keep).__name__}."
            )
        # Padding is never kept, whatever the idea does with it.
        return keep.float() if valid is None else keep.float() * valid  # (..., N)

    def forward(
        self,
        tokens: Tensor,
        attention_x: Tensor,
        attention_y: Tensor,
        attention_y_dense: Tensor | None = None,
        beta: float = 0.25,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score, decide and gather, in the call shape of the published module: the first three of `select`."""
        return self.select(  # (B, K, C), (B, 1, C), (B, N)
            tokens, attention_x, attention_y, attention_y_dense, beta=beta, use_gumbel=use_gumbel, gumbel_tau=gumbel_tau
        )[:3]

    def select(
        self,
        tokens: Tensor,
        attention_x: Tensor,
        attention_y: Tensor,
        attention_y_dense: Tensor | None = None,
        *,
        beta: float = 0.25,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
    ) -> Selection:
        """Score, decide and gather.

        Args:
            tokens: (B, N, C) patches.
            attention_x: (B, N) cosines with the image's own global vector, `a_im`.
            attention_y: (B, N) cosines with the caption, `a_st`.
            attention_y_dense: (B, N) cosines with the dense text, `a_dt`; learned scoring only.
            beta: b of Eq. 3.
            use_gumbel, gumbel_tau: in this call D carries the gradient of the Gumbel relaxation of
                `(score + noise) / gumbel_tau`, as published; the kept set is that of the plain top-K ("relaxed").

        Raises:
            InputError: for attentions that do not fit, and where the number kept differs between images.
        """
        if self.decision == "binary" or self.decide_by is not None:
            raise InputError(
                f"decision={self.decision!r} may keep another number of patches in each image, so they cannot be "
                "gathered into one tensor; use decide() and the masked aggregation instead."
            )
        scores = self._scores(tokens, attention_x, attention_y, attention_y_dense, beta)  # (B, N)
        if use_gumbel and self.decision == "topk":
            keep = gumbel_topk(  # (B, N)
                scores,
                self.sparse_ratio,
                temperature=gumbel_tau,
                sharpness=1.0,
                training=self.training,
                sample=False,
            )
        else:
            keep = self.decide(scores)  # (B, N)
        return self._gather(tokens, scores, keep)  # (B, K, C), (B, 1, C), (B, N), (B, K), (B, K)

    def _scores(
        self, tokens: Tensor, attention_x: Tensor, attention_y: Tensor, attention_y_dense: Tensor | None, beta: float
    ) -> Tensor:
        """s of Eq. 3, or the sum of the cosines: (B, N, C), attentions (B, N) -> (B, N)."""
        check_features("tokens", tokens, "images, patches, width", self.embed_dim, values=False)
        given = {"attention_x": attention_x, "attention_y": attention_y}
        if attention_y_dense is not None:
            given["attention_y_dense"] = attention_y_dense
        for name, attention in given.items():
            check_tensor(name, attention, "images, patches")
            if attention.shape != tokens.shape[:2]:
                raise InputError(
                    f"{name} must have the shape (images, patches) of tokens, {tuple(tokens.shape[:2])}, but its "
                    f"shape is {tuple(attention.shape)}."
                )
        attentions = {"image": attention_x, "caption": attention_y}  # each (B, N)
        if not self.use_paper_version:
            return combine_scores(attentions, {"image": 1.0, "caption": 1.0})  # (B, N)
        if attention_y_dense is not None:
            attentions["dense"] = attention_y_dense
        return combine_scores(  # (B, N)
            attentions,
            {"image": 2 * beta, "caption": beta, "dense": beta},
            predicted_BN=self.predict(tokens),
            predictor_weight=1 - 2 * beta,
            normalise=True,
        )

    def _gather(self, tokens: Tensor, scores: Tensor, keep: Tensor) -> Selection:
        """The kept patches, best first, and the extra token: (B, N, C), (B, N), D (B, N) -> `Selection`."""
        kept_first = torch.where(keep.detach() > 0.5, scores.detach(), float("-inf"))  # (B, N)
        indices = rank_patches(kept_first)[:, : num_kept(tokens.shape[1], self.sparse_ratio)]  # (B, N) -> (B, K)
        select_tokens = torch.gather(tokens, 1, indices[..., None].expand(-1, -1, tokens.shape[-1]))  # (B, K, C)
        return Selection(  # (B, K, C), (B, 1, C), (B, N), (B, K), (B, K)
            select_tokens, extra_token(tokens, scores, keep), keep, indices, torch.gather(keep, 1, indices)
        )
