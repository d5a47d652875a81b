"""The names and call shapes of the published code and of the earlier releases, on top of the native network.

The published pairing, which gives dense text i to caption i, is for reproduction, and to show that leak.

Shapes: B images, T texts, N patches, C width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from seps.method.align import mask_xattn_one_text
from seps.method.checks import check_features, check_pairing, check_token_count, length_mask, read_options
from seps.method.config import SlimmingConfig
from seps.method.encoded import EncodedImages, Texts
from seps.method.maxima import reference_scores
from seps.method.network import PatchSlimming
from seps.method.parts import make_selector
from seps.method.select import TokenSparse
from seps.method.tokens import TokenAggregation


class CrossSparseAggrNet(PatchSlimming):
    """SDTPS and HRPA composed, in the call shape of the published systems (Eq. 1-5).

    Flow for image v and caption t::

        img_embs (B_v, [1 +] N, C), cap_embs (B_t, M, C)
          TokenSparse          scores s (Eq. 1-3), D: the K best of N                       N -> K
          TokenAggregation     merged patches (Eq. 4), then the extra token is appended     K -> N_c -> N_c + 1
          HRPA                 S(v, t) (Eq. 5)                                              -> (B_v, B_t)

    `use_paper_version=False` computes what the published code computes, `True` what the paper prints.

    Args:
        embed_size: width C; or the published `opt`, of which embed_size, num_patches and both ratios are read.
        num_patches: N; merged patches N_c = int(N * aggr_ratio * sparse_ratio).
        sparse_ratio, aggr_ratio: parts kept and merged.
        use_paper_version: learned scoring, both texts guiding, mean + top-k MLP, plain cosine.
        top_k: how many of the best relevances the MLP of Eq. 5 reads.
        use_gumbel_softmax, gumbel_tau: D carries the gradient of the Gumbel relaxation of
            `(score + noise) / gumbel_tau`; the kept set is the plain top-K, so that the forward pass is deterministic
            (`decision="relaxed"` with a sharpness of 1; the native network has 10, and "gumbel", which samples).
        use_dual_aggr: two weight matrices (Eq. 4), with `use_paper_version`.
        beta: b of Eq. 3.
        has_cls: whether the first token is CLS. None reads it from the number of tokens in each call: N tokens
            are patches alone, N + 1 are CLS and patches, any other number is refused.
        detach_patches: cut kept patches off from training as the published code does.
        check_num_patches: refuse images without exactly `num_patches` patches. With False any number works (images of
            several sizes), and `num_patches` only sets N_c; `has_cls` must then be given.
    """

    count_remedy = "Pass the right num_patches and has_cls."

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
        if not isinstance(embed_size, int):
            embed_size, num_patches, sparse_ratio, aggr_ratio = read_options(embed_size)
        preset = SlimmingConfig.paper if use_paper_version else SlimmingConfig.open_source
        config = preset(
            embed_size=embed_size,
            num_patches=num_patches,
            num_prefix_tokens=int(has_cls is not False),
            sparse_ratio=sparse_ratio,
            aggr_ratio=aggr_ratio,
            aggregation="dual" if use_paper_version and use_dual_aggr else "single",
            decision="relaxed" if use_gumbel_softmax else "topk",
            temperature=gumbel_tau,
            sharpness=1.0,
            beta=beta,
            top_k=top_k,
            detach_patches=detach_patches,
            check_num_patches=check_num_patches,
        )
        super().__init__(config)
        self.has_cls = has_cls
        self.num_patches, self.keeped_patches = config.num_patches, config.num_merged
        self.sparse_ratio, self.aggr_ratio = config.sparse_ratio, config.aggr_ratio
        if use_paper_version and len(config.branches) == 1:
            # The reference builds this predictor even where it has no use for it; its checkpoints hold the weights.
            self.sparse_net_long = make_selector(config, None)

    def prefix_count(self, num_tokens: int) -> int:
        """0 or 1: whether the first of `num_tokens` tokens is CLS, by `has_cls` or else by `num_patches`.

        Raises `InputError` where neither decides it.
        """
        if self.has_cls is not None:
            return int(self.has_cls)
        check_token_count(num_tokens, self.config.num_patches)
        return num_tokens - self.config.num_patches

    def encode_images(self, images: Tensor, *, dense: Tensor | None = None, **extras: Any) -> EncodedImages:
        """As `PatchSlimming.encode_images`; without a dense text the caption's weight matrix W_s works alone."""
        side = super().encode_images(images, dense=dense, **extras)
        return side if dense is not None else replace(side, sets=side.sets[:1])

    def forward(  # type: ignore[override]
        self,
        img_embs: Tensor,
        cap_embs: Tensor,
        cap_lens: Tensor | Sequence[int] | None = None,
        long_cap_embs: Tensor | None = None,
        long_cap_lens: Tensor | Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        """Similarity of every image with every caption.

        Args:
            img_embs: (B_v, [1 +] N, C) image tokens.
            cap_embs, cap_lens: (B_t, M, C) caption words and their numbers (B_t,).
            long_cap_embs, long_cap_lens: (B_t, L, C) dense texts *paired with the captions*, the published way.
                It hands each caption the description of the image it should find: to reproduce published figures
                only. Where the dense text belongs to the image, use `PatchSlimming`.

        Returns:
            In training (similarity (B_v, B_t), masks): D_s + D_d as one (B_t, B_v, N) tensor, or with
            `use_paper_version` a tuple of one per branch: without dense texts there is the caption's alone.
            In evaluation the similarity.
        """
        check_features("img_embs", img_embs, "images, tokens, width", self.config.embed_size)
        check_features("cap_embs", cap_embs, "texts, words, width", self.config.embed_size)
        if long_cap_embs is None:
            result = super().forward(img_embs, cap_embs, cap_lens)
        else:
            result = score_published_pairing(self, img_embs, cap_embs, cap_lens, long_cap_embs, long_cap_lens)
        if isinstance(result, Tensor):
            return result
        similarity, masks = result
        if self.config.scoring == "learned":
            return similarity, masks
        return similarity, masks[0] if len(masks) == 1 else masks[0] + masks[1]


def score_published_pairing(
    net: PatchSlimming,
    images: Tensor,
    words: Tensor,
    lengths: Tensor | Sequence[int] | None,
    paired_dense: Tensor,
    paired_dense_lengths: Tensor | Sequence[int] | None,
    patch_mask: Tensor | None = None,
    guides: Mapping[str, Tensor] | None = None,
) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
    """Similarities with the published pairing: dense text i comes with *caption* i, not with an image.

    This gives each query a description of the image it should find. It exists to reproduce published figures
    and to show that leak. `paired_dense` is (T, L, C). With `dense="branch"` each image is also aligned with the
    dense text's own words; otherwise the dense text guides the selection in every image. `guides` and `patch_mask`
    belong to the images, as in `PatchSlimming.encode_images`.
    """
    check_features("words", words, "texts, words, width", net.config.embed_size)
    check_pairing(words, paired_dense, "paired_dense")
    dtype = net.aggr_net.scale.dtype
    dense = Texts.of(paired_dense.to(dtype), length_mask("paired_dense_lengths", paired_dense_lengths, paired_dense))
    texts = Texts.of(words.to(dtype), length_mask("lengths", lengths, words), dense)
    scored = reference_scores(net, encode_for_pairing(net, images, guides, patch_mask), texts)
    return (scored.similarity, scored.masks) if net.training else scored.similarity  # (B, T), ...


def encode_for_pairing(
    net: PatchSlimming, images: Tensor, guides: Mapping[str, Tensor] | None, patch_mask: Tensor | None
) -> EncodedImages:
    """The images with every set of patches and no description: descriptions come with the captions."""
    # A zero vector guides nothing, but makes both sets appear.
    nothing = images.new_zeros(images.shape[0], 1, images.shape[-1])  # (B, 1, C)
    side = net.encode_images(images, dense=nothing, guides=guides, patch_mask=patch_mask)
    return replace(side, dense_words=None, dense_mask=None, described=None)


CrossSparseAggrNet_v2 = CrossSparseAggrNet
SDTPS = CrossSparseAggrNet
SDTPS_TokenSparse = TokenSparse
SDTPS_TokenAggregation = TokenAggregation
HRPA_function = mask_xattn_one_text


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
