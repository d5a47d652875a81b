"""The names and call shapes of the published code."""

from __future__ import annotations

from typing import Any

import torch

import seps
from probes.bench import Bench
from probes.registry import probe


def tensors(value: Any) -> Any:
    """The tensors of what a module returned."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return {key: tensors(item) for key, item in value.items()}
    return [tensors(item) for item in value] if isinstance(value, (list, tuple)) else value


CALLS = {
    "code": {},
    "paper": {"use_paper_version": True},
    "paper single": {"use_paper_version": True, "use_dual_aggr": False},
    "gumbel": {"use_gumbel_softmax": True, "gumbel_tau": 0.5},
    "detached": {"detach_patches": True},
}


@probe("published", each=CALLS)
def network(_: Bench, name: str) -> dict[str, Any]:
    """CrossSparseAggrNet as the published systems call it, with gradients."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 17, 32, generator=generator).requires_grad_()
    words = torch.randn(4, 8, 32, generator=generator)
    long = torch.randn(4, 11, 32, generator=generator)
    torch.manual_seed(0)
    net = seps.CrossSparseAggrNet(embed_size=32, num_patches=16, **CALLS[name])
    lengths, long_lengths = torch.tensor([8, 3, 5, 1]), torch.tensor([11, 2, 7, 4])
    found: dict[str, Any] = {}
    for mode in (True, False):
        torch.manual_seed(5)
        out = net.train(mode)(images, words, lengths, long, long_lengths)
        found["train" if mode else "eval"] = tensors(out)
        first = out if isinstance(out, torch.Tensor) else out[0]
        images.grad = None
        first.sum().backward()
        found[f"gradient {mode}"] = images.grad
    return found


@probe("published")
def parts(_: Bench) -> dict[str, Any]:
    """Selection, aggregation and alignment by themselves."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(4, 16, 32, generator=generator)
    scores = torch.rand(4, 16, generator=generator)
    words = torch.randn(4, 8, 32, generator=generator)
    torch.manual_seed(0)
    sparse = seps.TokenSparse(embed_dim=32, sparse_ratio=0.5).eval()
    single, dual = seps.TokenAggregation(32, 5).eval(), seps.DualTokenAggregation(32, 5).eval()
    return {
        "sparse": tensors(sparse(tokens, scores, scores.flip(1))),
        "single": tensors(single(tokens)),
        "dual": tensors(dual(tokens, tokens * scores[..., None])),
        "attention": tensors(seps.mask_xattn_one_text(tokens, words)),
        # Maxima below zero, where the leaky cosine has its slope.
        "negative": tensors(seps.mask_xattn_one_text(tokens[:, :1], -tokens[:, :1])),
    }


@probe("published")
def model(_: Bench) -> dict[str, Any]:
    """create_seps_model: its weights and its scores."""
    torch.manual_seed(0)
    made = seps.create_seps_model(embed_size=32, num_patches=16)
    return {"weights": made.state_dict()}
