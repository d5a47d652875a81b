"""Why an image has its score: one number per pair of a word and a patch, and all of them sum to the score.

Once the selection and the maxima of Eq. 5 are fixed, the score is linear in the patches. A merged token is a weighted
sum of patches, so its cosine with a word is a sum with one term per patch; the means of Eq. 5 add up these cosines; the
pooled cosine is a sum over all pairs of word and patch. The MLP of Eq. 5, where a model has it, is not linear and is
reported as `rest`.

Shapes: M words, N patches, P prefix tokens, K image tokens, L description words, Q merged patches,
G merged patches of all branches, I = P + N inputs of the merge, C width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import InputError, evaluating
from seps.method.encoded import EncodedImages, Kept, Texts
from seps.method.network import PatchSlimming
from seps.method.parts import CustomMerger
from seps.scoring.factored import GramMaxima
from seps.scoring.terms import other_forward

_TOLERANCE = 1e-3
"""How far the sum of the shares may be from the score by rounding alone."""


@dataclass
class Shares:
    """What each pair of a caption word and a patch (or description word) adds to one score."""

    patches: Tensor
    """(M, N) word by patch."""
    elsewhere: Tensor
    """(M,) what prefix tokens add, and patches that the index left out."""
    description: Tensor
    """(M, L) word by word of the description; L is 0 without one."""
    rest: float
    """What belongs to no pair: the MLP of Eq. 5, or what an alignment of somebody's own adds to the means."""
    kept: Tensor
    """(N,) bool, of the first branch."""
    importance: Tensor
    """(N,) s of Eq. 3, by which patches were selected."""
    groups: Tensor
    """(Q, N) merge weights, those of all branches."""
    terms: dict[str, float]
    """The same score by its terms."""

    @property
    def score(self) -> float:
        """The sum of all shares."""
        return float(self.patches.sum() + self.elsewhere.sum() + self.description.sum()) + self.rest


@dataclass
class DescriptionShares:
    """The description's shares (M, L) in the alignment and in the pooled cosine, and the MLP's part."""

    aligned: Tensor
    pooled: Tensor
    rest: float


@torch.no_grad()
def shares(net: PatchSlimming, image: EncodedImages, words: Tensor, mean_length: float | None = None) -> Shares:
    """Split the score of one encoded image (B = 1) and one caption, words (M, C), into shares that sum to it.

    If the index left patches out, `mean_length` is N |mean patch| over all of them; what those add is `elsewhere`.
    As in `score_matrix` the network is evaluated, whatever its mode.

    Raises `InputError` for a network whose shares do not sum to its score.
    """
    if net.hrpa.reads_cosines or isinstance(net.aggr_net, CustomMerger):
        raise InputError(f"This score cannot be taken apart: {GramMaxima.supports(net)}.")
    text = Texts.of(words[None])
    with evaluating(net):
        parts = _shares(net, image, text, words.float(), mean_length)
        score = float(net.score(image, text).similarity)
    other = other_forward(net)
    if other is not None or not abs(parts.score - score) <= _TOLERANCE:
        raise InputError(
            f"This score cannot be taken apart: the shares of words and patches sum to {parts.score:.4f}, and the "
            f"network's score is {other or f'{score:.4f}'}. Explain a network whose tokens and pooling are those of "
            "PatchSlimming."
        )
    return parts


def _shares(net: PatchSlimming, image: EncodedImages, text: Texts, words: Tensor, mean_length: float | None) -> Shares:
    caption = words.mean(dim=0, keepdim=True)  # (M, C) -> (1, C)
    unit = text.words[0]  # (M, C)
    remaining, weight, description = 1.0, 0.0, torch.zeros(len(words), 0, device=words.device)  # -, -, (M, 0)
    terms: dict[str, float] = {}
    rest = 0.0
    if image.dense_words is not None and image.dense_mask is not None and bool(image.dense_mask.any()):
        one, none = words.new_ones(1, 1), words.new_zeros(1, 1)  # (1, 1), (1, 1)
        remaining, weight = float(net.mix(image, one, none)), float(net.mix(image, none, one))
        described = image.dense_words[0, image.dense_mask[0]].float()  # (L, C)
        part = description_shares(net, unit, words, caption, described)
        description = weight * (part.aligned + part.pooled)  # (M, L)
        rest += weight * part.rest
        terms = {
            "description_alignment": weight * (float(part.aligned.sum()) + part.rest),
            "description_pooled": weight * float(part.pooled.sum()),
        }
    kept = net.select(image, text)
    if net.config.dense == "branch" and image.described is not None and not bool(image.described.any()):
        kept = kept[:1]  # the second set belongs to the description
    inputs = torch.cat([image.prefix, image.patches], dim=1)[0].float()  # (P + N, C)
    prefix = image.prefix.shape[1]
    aligned = torch.zeros(len(words), len(inputs), device=words.device)  # (M, P + N)
    pixel_rest = 0.0
    for group in [kept] if net.config.aggregation == "dual" else [(one,) for one in kept]:
        matrix = torch.block_diag(torch.eye(prefix, device=words.device), net.weights(image, group)[0, 0])  # type: ignore[no-untyped-call]  # (K, P + N)
        more, extra = _aligned(net, unit, inputs, matrix)  # (M, P + N), -
        aligned, pixel_rest = aligned + more, pixel_rest + extra  # (M, P + N), -
    # (M,)
    pooled_words = net.config.pooled * (words @ F.normalize(image.pooled[0].float(), dim=-1)) / _length(caption, words)
    pooled = _pooled_pairs(net, image, words, caption, mean_length)  # (M, N)
    by_pair = remaining * (aligned[:, prefix:] + pooled)  # (M, N)
    elsewhere = remaining * (aligned[:, :prefix].sum(dim=1) + pooled_words - pooled.sum(dim=1))  # (M,)
    rest += remaining * pixel_rest
    terms = {
        "patch_alignment": remaining * (float(aligned.sum()) + pixel_rest),
        "patch_pooled": remaining * float(pooled_words.sum()),
        **terms,
    }
    groups = torch.cat([net.weights(image, (one,))[0, 0, :-1] for one in kept])  # (G, N): of all sets
    first: Kept = kept[0]
    return Shares(
        by_pair, elsewhere, description, rest, first.keep[0, 0] > 0.5, first.scores[0, 0].float(), groups, terms
    )


def _length(caption: Tensor, words: Tensor) -> Tensor:
    """M |mean word|: words / this are the parts of the unit mean word."""
    length: Tensor = caption.norm()
    return len(words) * length.clamp_min(1e-12)


def _aligned(net: PatchSlimming, unit: Tensor, inputs: Tensor, matrix: Tensor) -> tuple[Tensor, float]:
    """Shares (M, P + N) of one group in the alignment, and the MLP's part."""
    lengths = (matrix @ inputs).norm(dim=-1).clamp_min(1e-12)  # (K, I), (I, C) -> (K,): I = P + N inputs
    # A_jk = sum_i W_ki (w_j . x_i) / |t_k|: term i is what input i adds to the cosine.
    pairs = (unit @ inputs.T)[:, None, :] * (matrix / lengths[:, None])[None]  # (M, K, I)
    chosen, rest = _chosen(net, pairs.sum(dim=-1))  # (M, K), -
    return (pairs * chosen[..., None]).sum(dim=1), rest  # (M, I), -


def _chosen(net: PatchSlimming, cosines: Tensor) -> tuple[Tensor, float]:
    """(M, K) the factor of each cosine in S (1/M for a word's best, 1/K for a token's), and the MLP's part."""
    slope = torch.where(cosines < 0, 0.1, 1.0) if net.hrpa.scan else torch.ones_like(cosines)  # (M, K)
    similar = slope * cosines  # (M, K)
    words, tokens = similar.shape
    factor = torch.zeros_like(similar)  # (M, K)
    best = similar.max(dim=1)  # each (M,)
    factor[torch.arange(words), best.indices] += 1 / words
    rest = _relevance(net, best.values)
    if net.hrpa.bidirectional:
        column = similar.max(dim=0)  # each (K,)
        factor[column.indices, torch.arange(tokens)] += 1 / tokens
        rest += _relevance(net, column.values)
    return factor * slope, rest  # (M, K), -


def _relevance(net: PatchSlimming, best: Tensor) -> float:
    return float(net.hrpa.pool(best[None])[0] - best.mean())


def _pooled_pairs(
    net: PatchSlimming, image: EncodedImages, words: Tensor, caption: Tensor, mean_length: float | None
) -> Tensor:
    """Shares (M, N) in the pooled cosine: `pooled (w_j . v_i) / (M N |mean word| |mean patch|)`."""
    patches = image.patches[0].float()  # (N, C)
    length = mean_length or len(patches) * float(patches.mean(dim=0).norm().clamp_min(1e-12))
    return net.config.pooled * (words @ patches.T) / (length * _length(caption, words))  # (M, N)


def description_shares(
    net: PatchSlimming, unit: Tensor, words: Tensor, caption: Tensor, described: Tensor
) -> DescriptionShares:
    """What the description's words, (L, C) of length one, add to the score of a caption.

    `words` (M, C) are the caption's, `unit` the same of length one, `caption` (1, C) their mean.
    """
    cosines = unit @ described.T  # (M, C), (L, C) -> (M, L)
    chosen, rest = _chosen(net, cosines)  # (M, L), -
    length = len(described) * described.mean(dim=0).norm().clamp_min(1e-12)
    pooled = net.config.pooled * (words @ described.T) / (length * _length(caption, words))  # (M, L)
    return DescriptionShares(chosen * cosines, pooled, rest)
