"""Queries that carry descriptions, as in the published protocol.

Shapes: B images, T texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.scoring import score_matrix
from seps.scoring.blocks import scoring_memory


def score_paired(
    model: RetrievalModel, images: ImageFeatures, texts: TextFeatures, paired: Sequence[str], memory: int | None
) -> Tensor:
    """(B, T) where description t comes with caption t, as in the published protocol; each text is encoded once."""
    net = model.head.network
    assert net is not None  # `Traits.pairs_queries`
    distinct = sorted(set(paired))
    place = {text: i for i, text in enumerate(distinct)}
    features = model.encode_texts(distinct, max_words=model.config.max_dense_words, as_sentences=True)
    rows = torch.tensor([place[text] for text in paired], device=model.device)
    scores = []
    # The paired texts of a block of captions are spread out at a time: all of them at once would not fit.
    per_text = features.words.shape[1] * features.words.shape[2] * 4
    memory = scoring_memory(model.device) if memory is None else memory
    step = max(16, memory // 4 // per_text)
    for start in range(0, len(rows), step):
        chosen = rows[start : start + step]
        part = score_matrix(
            net,
            images.tokens,
            texts.words[start : start + step],
            texts.lengths[start : start + step],
            paired_dense=features.words[chosen],
            paired_dense_lengths=features.mask[chosen].sum(dim=1),
            guides=images.guides,
            memory=memory,
        )
        scores.append(cast(Tensor, part))  # not the best alone
    return torch.cat(scores, dim=1)
