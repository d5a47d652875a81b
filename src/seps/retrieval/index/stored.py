"""From rows of the store back to features, and their exact scores.

Shapes: B images, P prefix tokens, M patches stored, L description words, C width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn.checks import values_unchecked
from seps.nn.known import evaluating, why_not_fast
from seps.nn.selection import num_kept
from seps.nn.slimming import ImageSide, PatchSlimming
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.index.codec import unpack, unpack_alike, unpack_padded
from seps.retrieval.index.rows import StoreSettings
from seps.retrieval.model import RetrievalModel
from seps.scoring import score_state

MEMORY = 256 * 2**20


@dataclass
class StoredImages:
    """The image-only state of some images."""

    features: ImageFeatures
    positions: Tensor | None = None
    """(B, M) which patches the tokens are; None: all, in order."""
    mean: Tensor | None = None
    """(B, C) mean of all patches, where some were left out."""

    def without_description(self) -> StoredImages:
        """The same images, their pixels alone."""
        return replace(self, features=ImageFeatures(self.features.tokens))


def restore(batch: Any, settings: StoreSettings, device: torch.device | str = "cpu") -> StoredImages:
    """The images of an Arrow table or batch with the columns `tokens`, `positions`, `mean` and `words`."""
    tokens = unpack_alike(batch.column("tokens"))
    words, mask = unpack_padded(batch.column("words").to_pylist(), settings.width)
    features = ImageFeatures(torch.from_numpy(tokens).to(device))
    if mask.shape[1]:
        features.dense, features.dense_mask = words.to(device), mask.to(device)
    if settings.keep_patches is None:
        return StoredImages(features)
    places = np.stack([np.frombuffer(blob, "<u2") for blob in batch.column("positions").to_pylist()]).astype(np.int64)
    means = np.concatenate([unpack(blob) for blob in batch.column("mean").to_pylist()])
    return StoredImages(features, torch.from_numpy(places).to(device), torch.from_numpy(means).to(device))


class StoredScorer:
    """Exact scores of stored images, for a store's settings."""

    def __init__(self, model: RetrievalModel, settings: StoreSettings) -> None:
        self.model = model
        self.net: PatchSlimming | None = None
        if isinstance(model.head, SlimmingHead):
            self.net = model.head.net
            if settings.keep_patches is not None:
                self.net = fewer_patches(model.head.net, settings.keep_patches)

    def side(self, images: StoredImages) -> ImageSide:
        """What no caption changes, for a slimming head. The mean patch is that of all patches."""
        if self.net is None:
            raise ValueError(f"head={self.model.config.head!r} has no patch selection; use a model with 'slimming'.")
        features = images.features
        with values_unchecked():  # looking at every value takes a quarter of the time
            side = self.net.encode_images(features.tokens, dense=features.dense, dense_lengths=features.dense_lengths)
        return side if images.mean is None else replace(side, pooled=F.normalize(images.mean, dim=-1))

    @torch.no_grad()
    def score(self, images: StoredImages, texts: TextFeatures) -> Tensor:
        """(B, T) similarities."""
        if self.net is None:
            return self.model.score(images.features, texts, memory=MEMORY)
        if len(texts.words) == 1 and why_not_fast(self.net) is None:
            # The scorer of whole matrices prepares for many captions; for one the readable form is several times
            # faster, on few images at a time.
            length = int(texts.mask[0].sum())
            with evaluating(self.net):
                return self.net.score_text(self.side(images), texts.words[0, :length]).similarity[:, None]
        scores = score_state(self.net, self.side(images), texts.words, texts.lengths, memory=MEMORY)
        if not isinstance(scores, Tensor):
            raise TypeError("score_state without topk returns a tensor")
        return scores


def fewer_patches(net: PatchSlimming, stored: int) -> PatchSlimming:
    """The network for images of which only `stored` patches were kept: it selects as many of them as of all."""
    config = net.config
    kept = min(stored, num_kept(config.num_patches, config.sparse_ratio))
    ratio = kept / stored
    slim = copy.deepcopy(net)
    # The number of merged patches is a matter of the weights and stays as it is.
    aggregation = min(1.0, (config.num_merged + 0.5) / kept)
    slim.config = replace(config, num_patches=stored, sparse_ratio=ratio, aggr_ratio=aggregation)
    slim.sparse_net_cap.sparse_ratio = ratio
    if config.uses_dense_branch:
        slim.sparse_net_long.sparse_ratio = ratio
    return slim
