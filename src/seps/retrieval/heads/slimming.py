"""The head of patch slimming."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor

from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.retrieval.heads.base import Head, ImageFeatures, Scores, TextFeatures
from seps.scoring import score_matrix, score_with_gradient


class SlimmingHead(Head):
    """Patch slimming (`seps.method.PatchSlimming`) through the exact scorer; `net` is a network of your own, if any."""

    def __init__(self, config: SlimmingConfig, net: PatchSlimming | None = None) -> None:
        super().__init__()
        self.own_network = net is not None
        self.net = PatchSlimming(config) if net is None else net
        config = self.net.config
        self.guides = self.net.guides.from_data
        self.uses_description = config.dense != "none"
        self.score_range = 2.0 + config.pooled
        self.learns_number = config.decision == "binary"

    @property
    def options(self) -> dict[str, Any]:
        """See `Head.options`."""
        return asdict(self.net.config)

    @property
    def network(self) -> PatchSlimming:
        """See `Head.network`."""
        return self.net

    @property
    def description_logit(self) -> Tensor | None:
        """See `Head.description_logit`."""
        return self.net.trust if self.net.config.dense == "tokens" else None

    def forward(
        self,
        images: ImageFeatures,
        texts: TextFeatures,
        *,
        want_masks: bool = False,
        paired: TextFeatures | None = None,
    ) -> Scores:
        """See `Head.forward`. `paired` are query-side descriptions, one per caption (leaky)."""
        return score_with_gradient(
            self.net,
            images.tokens,
            texts.words,
            texts.known_lengths,
            dense=images.dense,
            dense_lengths=images.dense_lengths,
            paired_dense=None if paired is None else paired.words,
            paired_dense_lengths=None if paired is None else paired.known_lengths,
            guides=images.guides,
            want_masks=want_masks,
        )

    @torch.no_grad()
    def score_parts(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Scores:
        """See `Head.score_parts`; the scorer cuts the work by itself."""
        return self.forward(images, texts)

    @torch.no_grad()
    def score(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Tensor:
        """See `Head.score`."""
        scores = score_matrix(
            self.net,
            images.tokens,
            texts.words,
            texts.lengths,
            dense=images.dense,
            dense_lengths=images.dense_lengths,
            guides=images.guides,
            # On a GPU the fused kernels take half-precision products; the selection is float32 either way.
            precision="half" if images.tokens.is_cuda else "float32",
            memory=memory,
        )
        return cast(Tensor, scores)  # not the best alone
