"""HRPA, highly relevant patch-word alignment (Eq. 5).

Shapes: B images, M words, K image tokens, C width, X words or tokens, Z best of X, E = top_k best padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.checks import InputError, check_features, check_rows_hold_one, check_shape
from seps.method.precision import float_apply, float_matmul


def relevance_mlp(top_k: int) -> nn.Sequential:
    """The MLP over the `top_k` best relevances (Eq. 5): (..., top_k) -> (..., 1)."""
    return nn.Sequential(nn.Linear(top_k, 2 * top_k), nn.GELU(), nn.Linear(2 * top_k, 1))


def largest(
    similarity: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Best token of each word, best word of each token: (..., M, K) -> (..., M), (..., K). Masks are True at both."""
    lowest = torch.finfo(similarity.dtype).min
    rows = columns = similarity
    if token_mask is not None:
        rows = similarity.masked_fill(~token_mask[..., None, :], lowest)  # (..., M, K)
    if word_mask is not None:
        columns = similarity.masked_fill(~word_mask[..., :, None], lowest)  # (..., M, K)
    return rows.amax(dim=-1), columns.amax(dim=-2)  # (..., M), (..., K)


def check_pairs(img_embs: Tensor, words: Tensor, img_mask: Tensor | None) -> None:
    """Raise `InputError` unless tokens (B, K, C), words (B, M, C) and the mask (B, K) of the tokens fit each other."""
    check_features("img_embs", img_embs, "images, tokens, width")
    check_features("cap_i_expand", words, "images, words, width", img_embs.shape[-1])
    if img_embs.shape[0] != words.shape[0]:
        raise InputError(
            f"img_embs holds {img_embs.shape[0]} images and cap_i_expand {words.shape[0]} rows; repeat the words once "
            "per image."
        )
    if img_mask is None:
        return
    check_shape("img_mask", img_mask, "images, tokens", img_embs.shape[:2])
    check_rows_hold_one("img_mask", img_mask > 0.5)


class HRPA(nn.Module):
    """Highly relevant patch-word alignment (Eq. 5).

    Flow::

        1 cosines  A_jk = cos(word j, token k)                         (B, M, K), LeakyReLU(0.1) if `scan`
        2 maxima   r_j = max_k A_jk   word -> patch                    (B, M)
                   c_k = max_j A_jk   patch -> word                    (B, K)
        3 pooling  S = mean r + MLP(top-k r) + mean c + MLP(top-k c)   the MLP with `use_paper_version` alone

    Args:
        embed_dim: width C (kept for the published signature; no weight depends on it).
        top_k: how many of the best relevances the MLP reads.
        use_paper_version: add the MLP over the `top_k` best; both directions share it.
        bidirectional: both directions; False: word -> patch alone.
        scan: apply LeakyReLU(0.1) to the cosines. None: with `use_paper_version` the plain cosine, else LeakyReLU.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        top_k: int = 5,
        use_paper_version: bool = False,
        bidirectional: bool = True,
        scan: bool | None = None,
    ) -> None:
        super().__init__()
        if top_k < 1:
            raise InputError(f"top_k must be at least 1, but {top_k!r} came.")
        self.embed_dim, self.top_k = embed_dim, top_k
        self.use_paper_version, self.bidirectional = use_paper_version, bidirectional
        self.scan = not use_paper_version if scan is None else scan
        self.relevance_mlp: nn.Module | None = relevance_mlp(top_k) if use_paper_version else None

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        pooling = f"mean + MLP of the {self.top_k} best" if self.use_paper_version else "mean"
        return f"{pooling}, {'LeakyReLU(0.1) of the cosine' if self.scan else 'cosine'}"

    def pool(self, best: Tensor, mask: Tensor | None = None) -> Tensor:
        """One direction of Eq. 5 from its maxima r or c: (B, X) -> (B,); `mask` (B, X) is True at valid ones.

        `mean(best) + MLP(top_k of best)` in float32. Fewer than `top_k` values are zero-padded.
        """
        best = best.float()  # (..., X)
        if mask is None:
            pooled = best.mean(dim=-1)  # (..., X) -> (...)
        else:
            count = mask.sum(dim=-1).clamp_min(1)  # (..., X) -> (...)
            pooled = best.masked_fill(~mask, 0.0).sum(dim=-1) / count  # (..., X) -> (...)
        if self.relevance_mlp is None:
            return pooled
        ranked = best if mask is None else best.masked_fill(~mask, float("-inf"))  # (..., X)
        top = ranked.topk(min(self.top_k, best.shape[-1]), dim=-1).values  # (..., X) -> (..., Z): Z = min(top_k, X)
        top = torch.where(torch.isfinite(top), top, 0.0)  # (..., Z)
        top = F.pad(top, (0, self.top_k - top.shape[-1]))  # (..., Z) -> (..., E): E = top_k
        return pooled + float_apply(self.relevance_mlp, top).squeeze(-1)  # (..., E) -> (...)

    def pool_both(
        self, rows: Tensor, columns: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Tensor:
        """S of Eq. 5 from the maxima r (..., M) and c (..., K) of the cosines; the masks are True at valid ones."""
        rows, columns = rows.float(), columns.float()  # (..., M), (..., K)
        if self.scan:  # LeakyReLU rises, so that it commutes with the maximum
            rows, columns = F.leaky_relu(rows, 0.1), F.leaky_relu(columns, 0.1)  # (..., M), (..., K)
        score = self.pool(rows, word_mask)  # (..., M) -> (...)
        return score + self.pool(columns, token_mask) if self.bidirectional else score  # (...)

    def align(self, similarity: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
        """S of Eq. 5 from the cosines of words and tokens: (B, M, K) -> (B,)."""
        rows, columns = largest(similarity.float(), word_mask, token_mask)  # (B, M), (B, K)
        return self.pool_both(rows, columns, word_mask, token_mask)  # (B,)

    def forward(
        self,
        patch_features: Tensor,
        word_features: Tensor,
        patch_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> Tensor:
        """S of Eq. 5 from L2-normalised tokens (B, K, C) and words (B, M, C) -> (B, 1); masks are 1 at what counts."""
        check_pairs(patch_features, word_features, patch_mask)
        tokens_valid = None if patch_mask is None else patch_mask > 0.5  # (B, K)
        # Step 1, cosines: words (B, M, C) and tokens (B, K, C) -> A (B, M, K)
        cosines = float_matmul(word_features, patch_features.transpose(1, 2))  # (B, M, C), (B, K, C) -> (B, M, K)
        # Step 2, maxima: A (B, M, K) -> best token of each word r (B, M), best word of each token c (B, K)
        rows, columns = largest(cosines, word_mask, tokens_valid)  # (B, M), (B, K)
        # Step 3, pooling: mean r + mean c, and with use_paper_version the MLP of the top_k best of each -> S (B, 1)
        return self.pool_both(rows, columns, word_mask, tokens_valid)[:, None]  # (B, M), (B, K) -> (B, 1)


def mask_xattn_one_text(
    img_embs: Tensor,
    cap_i_expand: Tensor,
    img_mask: Tensor | None = None,
    i2t: bool = True,
    scan: bool = True,
    use_paper_version: bool = False,
    top_k: int = 5,
    relevance_mlp: nn.Module | None = None,
) -> Tensor:
    """Eq. 5 for one text against B images, in the call shape of the published function; `HRPA` has its steps.

    img_embs (B, K, C) and cap_i_expand (B, M, C) are L2-normalised, img_mask (B, K) is 1 at valid tokens -> (B, 1).
    `i2t` adds patch -> word, `scan` is LeakyReLU(0.1), `use_paper_version` adds `relevance_mlp` of the `top_k` best.
    """
    hrpa = HRPA(top_k=top_k, bidirectional=i2t, scan=scan)
    hrpa.relevance_mlp = relevance_mlp if use_paper_version else None
    score: Tensor = hrpa(img_embs, cap_i_expand, img_mask)  # (B, K, C), (B, M, C) -> (B, 1)
    return score
