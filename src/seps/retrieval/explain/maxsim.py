"""Why an image has its score under head "maxsim": what each pair of a word and a patch adds, and all sum to the score.

A word adds its cosine with the patch that it chose, over the number of words. The pooled cosine is a sum over all pairs
of word and patch. Shapes: M words, N patches, L description words, K tokens, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.retrieval.explain.shares import Shares
from seps.retrieval.heads import ImageFeatures, MaxSimHead


@torch.no_grad()
def maxsim_shares(head: MaxSimHead, image: ImageFeatures, words_MC: Tensor, patches: int) -> Shares:
    """Split the score of one image (B = 1, with `patches` patches, of which `tokens` may hold some) and one caption.

    Of the result `kept` are the patches that some word chose, and `importance` is how many words chose each.
    """
    prefix = head.config.num_prefix_tokens
    tokens = image.tokens[0, prefix:].float()  # (N, C)
    mean = tokens.mean(dim=0) if image.mean is None else image.mean[0].float()  # (C,)
    nearest = _aligned(words_MC, tokens)  # (M, N)
    chosen = chosen_tokens(words_MC, tokens)  # (M, N)
    pooled = _pooled(head, words_MC, tokens, patches * mean.norm())  # (M, N)
    caption = F.normalize(words_MC.float().mean(dim=0), dim=-1)  # (C,)
    # What each word adds to the pooled cosine, also through patches that a store left out.
    by_word = head.config.pooled * (words_MC.float() @ F.normalize(mean, dim=-1)) / _length(words_MC)  # (M,)
    weight, description = 0.0, torch.zeros(len(words_MC), 0, device=words_MC.device)  # -, (M, 0)
    terms: dict[str, float] = {}
    if head.trust is not None and image.dense is not None and image.dense_mask is not None and image.dense_mask.any():
        weight = float(torch.sigmoid(head.trust.float()))
        described = F.normalize(image.dense[0, image.dense_mask[0]].float(), dim=-1)  # (L, C)
        aligned = _aligned(words_MC, described)  # (M, L)
        beside = _pooled(head, words_MC, described, len(described) * described.mean(dim=0).norm())  # (M, L)
        description = weight * (aligned + beside)  # (M, L)
        terms = {
            "description_alignment": weight * float(aligned.sum()),
            "description_pooled": weight * float(beside.sum()),
        }
    terms = {
        "patch_alignment": (1 - weight) * float(nearest.sum()),
        "patch_pooled": (1 - weight) * float(head.config.pooled * (mean @ caption) / mean.norm().clamp_min(1e-12)),
        **terms,
    }
    return Shares(
        patches=(1 - weight) * (nearest + pooled),
        elsewhere=(1 - weight) * (by_word - pooled.sum(dim=1)),
        description=description,
        rest=0.0,
        kept=chosen.any(dim=0),
        importance=chosen.float().sum(dim=0),
        groups=torch.zeros(0, len(tokens)),
        terms=terms,
    )


def chosen_tokens(words_MC: Tensor, tokens_KC: Tensor) -> Tensor:
    """(M, K) bool: the token that is nearest to each word; of equal ones the first."""
    places = _cosines(words_MC, tokens_KC).max(dim=1).indices  # (M,)
    return torch.arange(len(tokens_KC), device=places.device) == places[:, None]


def _aligned(words_MC: Tensor, tokens_KC: Tensor) -> Tensor:
    """(M, K) what each word adds by the token that it chose, zero elsewhere."""
    chosen = chosen_tokens(words_MC, tokens_KC)  # (M, K)
    return torch.where(chosen, _cosines(words_MC, tokens_KC) / len(words_MC), 0.0)


def _cosines(words_MC: Tensor, tokens_KC: Tensor) -> Tensor:
    return F.normalize(words_MC.float(), dim=-1) @ F.normalize(tokens_KC, dim=-1).T  # (M, K)


def _pooled(head: MaxSimHead, words_MC: Tensor, tokens_KC: Tensor, mean_length: Tensor) -> Tensor:
    """(M, K) shares in the pooled cosine; `mean_length` is that of the sum of all tokens."""
    return head.config.pooled * (words_MC.float() @ tokens_KC.T) / (mean_length.clamp_min(1e-12) * _length(words_MC))


def _length(words_MC: Tensor) -> Tensor:
    """Length of the sum of the words: each over this is its part of the unit mean word."""
    length: Tensor = words_MC.float().sum(dim=0).norm().clamp_min(1e-12)
    return length
