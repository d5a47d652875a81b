"""Ideas of somebody's own that several tests register or swap in, with features to try them on."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from seps import registry
from seps.method.network import PatchSlimming
from seps.method.select import extra_weights
from seps.plugins import PLUGIN_MODULE
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.training import TrainConfig

SIZES = {"embed_size": 16, "num_patches": 10, "num_prefix_tokens": 1, "sparse_ratio": 0.4, "aggr_ratio": 0.5}
B, T, M, L, N = 4, 5, 6, 7, 10


def features(**more):
    torch.manual_seed(0)
    images, words = torch.randn(B, 1 + N, 16), torch.randn(T, M, 16)
    dense = {"dense": torch.randn(B, L, 16), "dense_lengths": torch.tensor([7, 3, 0, 5])}
    return images, words, torch.tensor([6, 2, 4, 5, 1]), {**dense, **more}


def readable(net, images, words, lengths, extras):
    with torch.no_grad():
        return net.eval()(images, words, lengths, **extras)


def first(scores, count, valid):
    """Keep the first K patches, whatever their scores."""
    places = torch.arange(scores.shape[-1]) if valid is None else valid.long().cumsum(-1) - 1
    return (places < count).float().expand_as(scores)


class Slots(nn.Module):
    """Merge weights from fixed slots: cosine with one learned vector per merged patch."""

    def __init__(self, config):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(config.num_merged, config.embed_size))

    def forward(self, patches):
        return 3 * F.normalize(patches.float(), dim=-1) @ F.normalize(self.slots, dim=-1).T


def median(best, mask):
    """The median of the valid maxima, the lower of two."""
    filled = best if mask is None else best.masked_fill(~mask, float("nan"))
    return filled.nanmedian(dim=-1).values


def forget_plugins() -> None:
    """As in a new process."""
    registry._IDEAS.clear()
    for name in [name for name in sys.modules if name.startswith(PLUGIN_MODULE)]:
        del sys.modules[name]


class FirstTwin(PatchSlimming):
    """`keep_first`, without the registry: the readable form computes it."""

    def select(self, images, texts, places=None):
        kept = []
        for one in super().select(images, texts, places):
            count = one.scores.shape[-1]
            keep = (torch.arange(count) < -(-count // 2)).float().expand(one.scores.shape)
            kept.append(replace(one, keep=keep, extra=extra_weights(one.scores, keep, images.valid)))
        return tuple(kept)


def model_config(encoders, **more) -> ModelConfig:
    return ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0, **more})


def run_config(encoders, train, dev, **model) -> RunConfig:
    loop = TrainConfig(epochs=1, batch_size=16, learning_rate=3e-3, eval_every=1, prefetch=0)
    return RunConfig(model=model_config(encoders, **model), data=DataConfig(str(train), (str(dev),)), train=loop)


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()
