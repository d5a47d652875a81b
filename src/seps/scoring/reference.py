"""The readable specification of the scores: one text at a time meets all images, as the published loop does it.

Kept slow and obvious; every other backend is tested against it. Everything of the image is computed again for
each text (the network's own loop keeps it), because that is what the published systems do and what is timed
against them.

Shapes: B images, T texts, M words, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn.checks import length_mask
from seps.nn.guidance import masked_mean
from seps.nn.slimming import ImageSide, PatchSlimming, TextScore


def score_pairs(
    net: PatchSlimming,
    encode: Callable[[], ImageSide],
    words: Tensor,
    lengths: Tensor | Sequence[int] | None,
) -> Tensor:
    """Similarity (B, T) of the images `encode` gives with every text, one text at a time."""
    word_mask = length_mask("cap_lens", lengths, words)
    words = words.to(net.aggr_net.scale.dtype)
    columns = [net.score_text(encode(), text, mask).similarity for text, mask in zip(words, word_mask, strict=True)]
    return torch.stack(columns, dim=1)


def score_paired(
    net: PatchSlimming,
    images: Tensor,
    words: Tensor,
    lengths: Tensor | Sequence[int] | None,
    paired_dense: Tensor,
    paired_dense_lengths: Tensor | Sequence[int] | None,
    patch_mask: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The published pairing (dense text t comes with caption t): similarity (B, T) and D of each branch (T, B, N)."""
    word_mask = length_mask("cap_lens", lengths, words)
    dense_mask = length_mask("paired_dense_lens", paired_dense_lengths, paired_dense)
    scored = []
    for text, mask, dense, valid in zip(words, word_mask, paired_dense, dense_mask, strict=True):
        count = valid.sum().expand(images.shape[0])
        side = net.encode_images(
            images,
            dense=dense.expand(images.shape[0], -1, -1),
            dense_lengths=count,
            patch_mask=patch_mask,
        )
        scored.append(_score_paired_text(net, side, text, mask, dense, valid))
    similarity = torch.stack([one.similarity for one in scored], dim=1)
    return similarity, tuple(torch.stack(masks) for masks in zip(*(one.masks for one in scored), strict=True))


def _score_paired_text(
    net: PatchSlimming, side: ImageSide, text: Tensor, mask: Tensor, dense: Tensor, valid: Tensor
) -> TextScore:
    """One caption and its dense text; with `dense="branch"` each meets the tokens of its own branch."""
    if net.config.dense != "branch":
        return net.score_text(side, text, mask)
    groups, masks = net.image_tokens(side, masked_mean(text[None], mask[None]))
    batch = side.patches.shape[0]
    parts = []
    for group, own, own_mask in zip(groups, (text, dense), (mask, valid), strict=True):
        cosines = torch.matmul(F.normalize(own.float(), dim=-1), group.transpose(1, 2))
        parts.append(net.hrpa.align(cosines, own_mask[None].expand(batch, -1)))
    return TextScore(torch.stack(parts).sum(dim=0), masks)
