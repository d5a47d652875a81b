"""The published pairing, which gives dense text i to caption i: for reproduction, and to show that leak.

Shapes: B images, T texts, N patches, M words of a caption, L words of a description, C width, K image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import InputError, check_features, length_mask
from seps.method.encoded import TextScore
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean


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
    scored = score_pairing_texts(net, images, words, lengths, paired_dense, paired_dense_lengths, patch_mask, guides)
    return net.collect(scored)  # (B, T), ...


def score_pairing_texts(
    net: PatchSlimming,
    images: Tensor,
    words: Tensor,
    lengths: Tensor | Sequence[int] | None,
    paired_dense: Tensor,
    paired_dense_lengths: Tensor | Sequence[int] | None,
    patch_mask: Tensor | None = None,
    guides: Mapping[str, Tensor] | None = None,
) -> list[TextScore]:
    """The scores of `score_published_pairing`, text by text."""
    check_features("words", words, "texts, words, width", net.config.embed_size)
    check_features("paired_dense", paired_dense, "texts, words, width", net.config.embed_size)
    if paired_dense.shape[0] != words.shape[0]:
        raise InputError(
            f"paired_dense holds {paired_dense.shape[0]} texts for {words.shape[0]} captions; the published pairing "
            "needs one each."
        )
    if not len(words):
        raise InputError("words holds no caption; the published pairing needs one or more, each with its dense text.")
    word_mask = length_mask("lengths", lengths, words)  # (T, M)
    dense_mask = length_mask("paired_dense_lengths", paired_dense_lengths, paired_dense)  # (T, L)
    batch = images.shape[0]
    scored = []
    for text, mask, dense, valid in zip(words, word_mask, paired_dense, dense_mask, strict=True):
        side = net.encode_images(
            images,
            dense=dense.expand(batch, -1, -1),
            dense_lengths=valid.sum().expand(batch),
            guides=guides,
            patch_mask=patch_mask,
        )
        if net.config.dense != "branch":
            scored.append(net.score_text(side, text, mask))
            continue
        caption = masked_mean(text[None], mask[None])  # (M, C) -> (1, C)
        groups, masks = net.image_tokens(side, caption)
        similarity = net.pooled_score(side.pooled, caption).squeeze(1)  # (B,)
        for group, own, own_mask in zip(groups, (text, dense), (mask, valid), strict=True):
            cosines = net.cosines(F.normalize(own.float(), dim=-1), group)  # (B, M or L, K)
            similarity = similarity + net.hrpa.align(cosines, own_mask[None].expand(batch, -1))  # (B,)
        scored.append(TextScore(similarity, masks))
    return scored
