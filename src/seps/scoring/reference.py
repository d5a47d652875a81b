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

from seps.nn.checks import length_mask
from seps.nn.slimming import ImageSide, PatchSlimming


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
