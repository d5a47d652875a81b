"""SDTPS and HRPA composed, in the call shape of the published code: its steps, one after the other, text by text.

The package's own `seps.CrossSparseAggrNet` computes the same without the loop over texts, and more.

Shapes: B images, T texts, P prefix tokens (CLS: 1 or 0), N patches, M words of a caption, L words of a dense text,
C width, K kept patches, Q merged patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.align import HRPA, mask_xattn_one_text
from seps.method.checks import (
    check_features,
    check_pairing,
    check_patch_count,
    check_token_count,
    length_mask,
    read_options,
    unwrapped,
)
from seps.method.score import cosine_attention, masked_mean
from seps.method.select import TokenSparse, num_kept
from seps.method.tokens import DualTokenAggregation, TokenAggregation


class CrossSparseAggrNet(nn.Module):
    """SDTPS and HRPA: the similarity of every image with every caption (Eq. 1-5), in both modes.

    Flow::

        img_embs (B, P + N, C), cap_embs (T, M, C), long_cap_embs (T, L, C) if any
          1 CLS          prefix (B, P, C), patches (B, N, C)
          2 image        E_im (B, C) -> a_im (B, N); s^p (B, N); logits (B, N, Q)
          for each text, 3 to 7:
          3 guides       E_st (1, C) -> a_st (B, N); E_dt (1, C) -> a_dt (B, N)
          4 TokenSparse  scores (B, N) (Eq. 1-3) -> D (B, N), K ones; extra token (B, 1, C)
          5 aggregation  patches where D is 1 -> merged patches (B, Q, C) (Eq. 4)
          6 tokens       [prefix, merged, extra], L2-normalised (B, P + Q + 1, C)
          7 HRPA         tokens against words (M, C) -> S (B, 1) (Eq. 5)
          8 all texts    S (B, T), D (T, B, N)

    `use_paper_version=False` computes what the published code computes: the sum of cosines; with dense texts a second
    selection, aligned with the dense text, and its similarity added. `True` computes what the paper prints: both texts
    guide, two weight matrices (`use_dual_aggr`), mean + MLP of the `top_k` best, plain cosine.

    Args:
        embed_size: width C; or the published `opt`, of which embed_size, num_patches and both ratios are read.
        num_patches: N; merged patches Q = int(N * aggr_ratio * sparse_ratio).
        sparse_ratio, aggr_ratio: parts kept and merged.
        use_paper_version: the mode.
        top_k: how many of the best relevances the MLP of Eq. 5 reads.
        use_gumbel_softmax, gumbel_tau: D carries the gradient of the Gumbel relaxation of
            `(score + noise) / gumbel_tau`; the kept set is the plain top-K, so that the forward pass is deterministic.
        use_dual_aggr: two weight matrices (Eq. 4), with `use_paper_version`.
        beta: b of Eq. 3.
        has_cls: whether the first token is CLS. None reads it from the number of tokens in each call: N tokens
            are patches alone, N + 1 are CLS and patches.
        detach_patches: cut the patches off from training as the published code does.
        check_num_patches: raise an error for images without exactly `num_patches` patches. With False any number works
            (images of several sizes), and `num_patches` only sets Q; `has_cls` must then be given.
    """

    def __init__(
        self,
        embed_size: int | Any = 512,
        num_patches: int = 196,
        sparse_ratio: float = 0.5,
        aggr_ratio: float = 0.4,
        use_paper_version: bool = False,
        top_k: int = 5,
        use_gumbel_softmax: bool = False,
        gumbel_tau: float = 1.0,
        use_dual_aggr: bool = True,
        beta: float = 0.25,
        has_cls: bool | None = None,
        detach_patches: bool = False,
        check_num_patches: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(embed_size, int):
            embed_size, num_patches, sparse_ratio, aggr_ratio = read_options(embed_size)
        self.embed_size, self.num_patches, self.check_num_patches = embed_size, num_patches, check_num_patches
        self.sparse_ratio, self.aggr_ratio, self.beta = sparse_ratio, aggr_ratio, beta
        self.keeped_patches = int(num_patches * aggr_ratio * sparse_ratio)
        self.use_paper_version, self.use_dual_aggr = use_paper_version, use_paper_version and use_dual_aggr
        self.has_cls, self.detach_patches = has_cls, detach_patches
        decision = "relaxed" if use_gumbel_softmax else "topk"
        gumbel: dict[str, Any] = {"decision": decision, "temperature": gumbel_tau, "sharpness": 1.0}
        self.sparse_net_cap = TokenSparse(embed_size, sparse_ratio, use_paper_version, **gumbel)
        self.sparse_net_long = TokenSparse(embed_size, sparse_ratio, use_paper_version, **gumbel)
        aggregation = DualTokenAggregation if self.use_dual_aggr else TokenAggregation
        self.aggr_net: Any = aggregation(embed_size, self.keeped_patches)
        self.hrpa = HRPA(embed_size, top_k, use_paper_version)

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        mode = f"paper, beta={self.beta}" if self.use_paper_version else "published code"
        kept = num_kept(self.num_patches, self.sparse_ratio)
        return f"{mode}: N -> K -> Q: {self.num_patches} -> {kept} -> {self.keeped_patches} + 1 extra token"

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As `nn.Module.load_state_dict`; a checkpoint saved from `DataParallel` loads as well."""
        return super().load_state_dict(unwrapped(state_dict), *args, **options)

    def prefix_count(self, num_tokens: int) -> int:
        """P, 0 or 1: whether the first of `num_tokens` tokens is CLS."""
        if self.has_cls is not None:
            return int(self.has_cls)
        check_token_count(num_tokens, self.num_patches)
        return num_tokens - self.num_patches

    def forward(
        self,
        img_embs: Tensor,
        cap_embs: Tensor,
        cap_lens: Tensor | Sequence[int] | None = None,
        long_cap_embs: Tensor | None = None,
        long_cap_lens: Tensor | Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        """Similarity of every image with every caption.

        Args:
            img_embs: (B, P + N, C) image tokens.
            cap_embs, cap_lens: (T, M, C) words of the captions and their numbers (T,).
            long_cap_embs, long_cap_lens: (T, L, C) dense texts *paired with the captions*, the published way: each
                caption brings the description of the image that it should find. For published figures only.

        Returns:
            In training (similarity (B, T), masks): D_s + D_d as one (T, B, N) tensor, or with `use_paper_version` a
            tuple of one per branch: without dense texts there is the caption's alone. In evaluation the similarity.
        """
        check_features("img_embs", img_embs, "images, tokens, width", self.embed_size)
        check_features("cap_embs", cap_embs, "texts, words, width", self.embed_size)
        check_pairing(cap_embs, long_cap_embs)
        word_mask = length_mask("cap_lens", cap_lens, cap_embs)  # (T, M)
        long_mask = None
        if long_cap_embs is not None:
            long_mask = length_mask("long_cap_lens", long_cap_lens, long_cap_embs)  # (T, L)
        # Step 1, CLS: img_embs (B, P + N, C) -> prefix (B, P, C), patches (B, N, C)
        prefix, patches = self.prefix_and_patches(img_embs)  # (B, P, C), (B, N, C)
        # Step 2, what no text changes: patches (B, N, C) -> mean patch E_im (B, C) -> a_im (B, N)
        own = cosine_attention(patches, masked_mean(patches, None))  # (B, N, C) -> (B, N)
        predicted = [net.predict(patches) for net in (self.sparse_net_cap, self.sparse_net_long)]  # each (B, N)
        logits = self.merge_logits(patches)  # each (B, N, Q)
        scores, masks = [], []
        for t, words in enumerate(cap_embs):
            # Step 3, guides: words (M, C) -> mean word E_st (1, C) -> a_st (B, N); dense text (L, C) -> a_dt (B, N)
            texts = [(words, word_mask[t])]
            if long_cap_embs is not None and long_mask is not None:
                texts.append((long_cap_embs[t], long_mask[t]))
            means = [masked_mean(text[None], mask[None]) for text, mask in texts]  # each (1, C)
            guides = [cosine_attention(patches, mean) for mean in means]  # each (B, N)
            # Step 4, TokenSparse, by branch: s^p, a_im, a_st and a_dt (B, N) -> D (B, N), extra token (B, 1, C)
            chosen = self.choose(patches, own, guides, predicted)
            # Step 5, aggregation, by branch: patches (B, N, C) where D is 1 -> merged patches (B, Q, C)
            merged, extras = self.merge(patches, chosen, logits)
            # Step 6, tokens: [prefix, merged, extra], L2-normalised -> (B, P + Q + 1, C)
            pairs = zip(merged, extras, strict=True)
            groups = [torch.cat([prefix.float(), *pair], dim=1) for pair in pairs]  # each (B, P + Q + 1, C)
            groups = [F.normalize(group, dim=-1) for group in groups]  # each (B, P + Q + 1, C)
            # Step 7, HRPA: tokens (B, P + Q + 1, C) and words (M, C) -> S (B, 1); in code mode also of the dense text
            scores.append(self.align(groups, texts))
            masks.append([keep for _, keep in chosen])
        # Step 8, all texts: T times (B, 1) -> S (B, T), T times (B, N) -> D (T, B, N)
        similarity = torch.cat(scores, dim=1) if scores else own.new_zeros(len(patches), 0)  # (B, T)
        if not self.training:
            return similarity
        stacked = tuple(torch.stack(decisions) for decisions in zip(*masks, strict=True))  # each (T, B, N)
        return similarity, stacked if self.use_paper_version else torch.stack(stacked).sum(dim=0)  # (B, T), ...

    def prefix_and_patches(self, img_embs: Tensor) -> tuple[Tensor, Tensor]:
        """The two kinds of tokens in the network's dtype: (B, P + N, C) -> (B, P, C), (B, N, C)."""
        count = self.prefix_count(img_embs.shape[1])
        if self.check_num_patches:
            check_patch_count("images", img_embs, count, self.num_patches, "Pass the right num_patches and has_cls.")
        images = img_embs.to(self.aggr_net.scale.dtype)  # (B, P + N, C)
        patches = images[:, count:].detach() if self.detach_patches else images[:, count:]  # (B, N, C)
        return images[:, :count], patches  # (B, P, C), (B, N, C)

    def choose(
        self, patches: Tensor, own: Tensor, guides: Sequence[Tensor], predicted: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """By branch the extra token (B, 1, C) and D (B, N), by `TokenSparse`; the first branch is the caption's."""
        if not self.use_paper_version:  # each text guides a selection of its own
            nets = (self.sparse_net_cap, self.sparse_net_long)
            return [net(patches, own, guide)[1:] for net, guide in zip(nets, guides, strict=False)]
        dense = guides[1] if len(guides) == 2 else None  # (B, N)
        chosen = [self.sparse_net_cap(patches, own, guides[0], dense, self.beta, predicted=predicted[0])[1:]]
        if dense is not None and self.use_dual_aggr:  # the second branch has its own predictor
            chosen.append(self.sparse_net_long(patches, own, dense, guides[0], self.beta, predicted=predicted[1])[1:])
        return chosen

    def merge_logits(self, patches: Tensor) -> list[Tensor]:
        """Logits of the merge weights, one for each weight matrix: (B, N, C) -> (B, N, Q)."""
        if self.use_dual_aggr:
            return [self.aggr_net.logits(patches, branch) for branch in ("caption", "dense")]  # each (B, N, Q)
        return [self.aggr_net.logits(patches)]  # each (B, N, Q)

    def merge(
        self, patches: Tensor, chosen: Sequence[tuple[Tensor, Tensor]], logits: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Merged patches (B, Q, C) and extra tokens (B, 1, C): one of each, or in code mode one for each branch."""
        extras, keeps = [extra for extra, _ in chosen], [keep for _, keep in chosen]
        if not self.use_dual_aggr:
            return [self.aggr_net(patches, keep, logits[0]) for keep in keeps], extras
        second = (None, keeps[0]) if len(keeps) == 1 else (patches, *keeps)
        return [self.aggr_net(patches, *second, logits=logits)], [torch.stack(extras).mean(dim=0)]

    def align(self, groups: Sequence[Tensor], texts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """S of Eq. 5, the tokens of each branch against its own text, added: each (B, P + Q + 1, C) -> (B, 1)."""
        scores = []
        for tokens, (text, mask) in zip(groups, texts, strict=False):
            words = F.normalize(text.float(), dim=-1).expand(len(tokens), -1, -1)  # (B, M or L, C)
            scores.append(self.hrpa(tokens, words, None, mask.expand(len(tokens), -1)))
        return torch.stack(scores).sum(dim=0)  # (B, 1)


def create_seps_model(
    embed_size: int = 512,
    num_patches: int = 196,
    sparse_ratio: float = 0.5,
    aggr_ratio: float = 0.4,
    use_paper_version: bool = False,
    use_gumbel_softmax: bool = False,
    gumbel_tau: float = 1.0,
    *,
    has_cls: bool | None = None,
) -> CrossSparseAggrNet:
    """Make a `CrossSparseAggrNet`, in the call shape of the earlier releases."""
    sizes = (embed_size, num_patches, sparse_ratio, aggr_ratio, use_paper_version)
    gumbel: dict[str, Any] = {"use_gumbel_softmax": use_gumbel_softmax, "gumbel_tau": gumbel_tau}
    return CrossSparseAggrNet(*sizes, **gumbel, has_cls=has_cls)


CrossSparseAggrNet_v2 = CrossSparseAggrNet
SDTPS = CrossSparseAggrNet
SDTPS_TokenSparse = TokenSparse
SDTPS_TokenAggregation = TokenAggregation
HRPA_function = mask_xattn_one_text
