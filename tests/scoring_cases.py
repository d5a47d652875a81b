"""Networks and inputs that several test files of the scores share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming

SMALL: dict[str, Any] = {"embed_size": 16, "num_patches": 12, "sparse_ratio": 0.5, "aggr_ratio": 0.5}

CONFIGS: dict[str, SlimmingConfig] = {
    "default": SlimmingConfig.default(**SMALL),
    "default_dual": SlimmingConfig.default(aggregation="dual", **SMALL),
    "paper": SlimmingConfig.paper(**SMALL),
    "paper_single": SlimmingConfig.paper(aggregation="single", **SMALL),
    "open_source": SlimmingConfig.open_source(**SMALL),
    "caption_only": SlimmingConfig.open_source(dense="none", **SMALL),
    "dual_sum": SlimmingConfig(dense="guide", aggregation="dual", scoring="sum", **SMALL),
    "no_prefix": SlimmingConfig.paper(num_prefix_tokens=0, **SMALL),
    "three_prefix": SlimmingConfig.open_source(num_prefix_tokens=3, **SMALL),
    "no_own_guide": SlimmingConfig.default(own_guide=0.0, **SMALL),
    "binary": SlimmingConfig.default(decision="binary", **SMALL),
    "binary_sum": SlimmingConfig.open_source(decision="binary", **SMALL),
    "gumbel": SlimmingConfig.default(decision="gumbel", **SMALL),
    "branch_learned": SlimmingConfig(dense="branch", alignment="topk", **SMALL),
}


def make_net(config: SlimmingConfig, seed: int = 0, spread: float = 1.0) -> PatchSlimming:
    """A network with lively weights, in evaluation mode."""
    torch.manual_seed(seed)
    net = PatchSlimming(config).eval()
    with torch.no_grad():
        for parameter in net.aggr_net.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
        net.aggr_net.scale.mul_(spread)
        if hasattr(net, "trust"):
            net.trust.fill_(0.3)
    return net


def make_inputs(
    config: SlimmingConfig, images: int = 4, texts: int = 7, words: int = 6, dense: int = 5, seed: int = 1
) -> dict[str, Tensor]:
    """Features with a common direction, as encoders give them, and ragged lengths."""
    torch.manual_seed(seed)
    width = config.embed_size
    common = torch.randn(width)
    return {
        "images": torch.randn(images, config.num_prefix_tokens + config.num_patches, width) + 0.5 * common,
        "words": torch.randn(texts, words, width) + 0.3 * common,
        "lengths": torch.randint(1, words + 1, (texts,)),
        "dense": torch.randn(images, dense, width) + 0.3 * common,
        "dense_lengths": torch.randint(0, dense + 1, (images,)),
        "paired": torch.randn(texts, dense, width) + 0.3 * common,
        "paired_lengths": torch.randint(1, dense + 1, (texts,)),
    }


def make_merging(texts=5, words=4, images=3, patches=7, width=6, merged=3, padded=2):
    """Words, patches, weights of the merged patches, D and the mask of words, on a GPU where there is one."""
    torch.manual_seed(texts)
    lengths = torch.randint(1, words + 1, (texts,))
    mask = torch.arange(words)[None] < lengths[:, None]
    spoken = torch.nn.functional.normalize(torch.randn(texts, words, width), dim=-1) * mask[..., None]
    weights = torch.nn.functional.pad(torch.rand(images, patches, merged), (0, padded))
    keep = (torch.rand(texts, images, patches) < 0.5).float()
    keep[..., 0] = 1.0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = spoken, torch.randn(images, patches, width), weights, keep, mask
    return tuple(tensor.to(device) for tensor in made)
