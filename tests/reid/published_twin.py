"""DeMo's network with SDTPS and its loss, by hand from their equations; the width after the projection is 24."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def hand_tokens(state: dict[str, Tensor], pixels: Tensor, camera: Tensor, heads: int) -> Tensor:
    """CLIP's image encoder by its equations, all tokens through ln_post and the projection: (B, N + 1, 24)."""
    x = F.conv2d((pixels - 0.5) / 0.5, state["patch.weight"], stride=16).flatten(2).transpose(1, 2)
    x = torch.cat([state["prefix"].expand(len(x), 1, -1) + camera[:, None], x + state["positions"]], dim=1)

    def norm(values: Tensor, name: str) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]
            + state[f"{name}.bias"]
        )

    x = norm(x, "norm_before")
    for block in range(2):
        name = f"blocks.{block}"
        q, k, v = (norm(x, f"{name}.norm1") @ state[f"{name}.qkv.weight"].T + state[f"{name}.qkv.bias"]).chunk(3, -1)
        mixed = []
        for part_q, part_k, part_v in zip(*(part.chunk(heads, -1) for part in (q, k, v)), strict=True):
            weights = (part_q @ part_k.transpose(1, 2) / math.sqrt(part_q.shape[-1])).softmax(-1)
            mixed.append(weights @ part_v)
        x = x + torch.cat(mixed, -1) @ state[f"{name}.project.weight"].T + state[f"{name}.project.bias"]
        inner = norm(x, f"{name}.norm2") @ state[f"{name}.fc1.weight"].T + state[f"{name}.fc1.bias"]
        inner = inner / (1 + torch.exp(-1.702 * inner))
        x = x + inner @ state[f"{name}.fc2.weight"].T + state[f"{name}.fc2.bias"]
    return norm(x, "norm") @ state["projection.weight"].T


def hand_sdtps(state: dict[str, Tensor], sensor: int, patches: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """The mean token of one sensor: Eq. 1-4 with beta 0.25, own vector twice, K = N / 2: (B, C)."""
    own = patches[sensor]
    name = f"sdtps.sensor{sensor}"
    made = []
    for row in range(len(own)):
        tokens = own[row]

        def minmax(values: Tensor) -> Tensor:
            return (values - values.min()) / (values.max() - values.min() + 1e-8)

        first, second = (f"{name}_sparse.score_predictor.{layer}" for layer in (0, 2))
        hidden = F.gelu(tokens @ state[f"{first}.weight"].T + state[f"{first}.bias"])
        scored = hidden @ state[f"{second}.weight"].T + state[f"{second}.bias"]
        score = 0.5 * torch.sigmoid(scored[:, 0])
        for other, vector in enumerate(vectors):
            cosine = torch.stack([F.cosine_similarity(token, vector[row], dim=0) for token in tokens])
            score = score + (0.5 if other == sensor else 0.25) * minmax(cosine)
        order = sorted(range(len(tokens)), key=lambda place: (-score[place].item(), place))
        kept, rest = sorted(order[: len(tokens) // 2]), sorted(order[len(tokens) // 2 :])
        chosen = tokens[kept]
        normed = F.layer_norm(chosen, (24,), state[f"{name}_aggr.weight.0.weight"], state[f"{name}_aggr.weight.0.bias"])
        logits = F.gelu(normed @ state[f"{name}_aggr.weight.1.weight"].T + state[f"{name}_aggr.weight.1.bias"])
        logits = (logits @ state[f"{name}_aggr.weight.3.weight"].T + state[f"{name}_aggr.weight.3.bias"]).T
        merged = (logits * state[f"{name}_aggr.scale"].view(())).softmax(-1) @ chosen
        extra = score[rest].softmax(0) @ tokens[rest]
        made.append(torch.cat([merged, extra[None]]).mean(0))
    return torch.stack(made)


def hand_loss(features: Tensor, classifier: Tensor, labels: Tensor) -> float:
    """0.25 x smoothed cross-entropy of the batch-normalised feature + soft-margin hardest triplet of the raw one."""
    rows, count = features.double(), len(classifier)
    normed = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-5).sqrt()
    logits = normed @ classifier.double().T
    identity = triplet = 0.0
    for i, label in enumerate(labels.tolist()):
        chances = logits[i].log_softmax(0)
        identity -= 0.9 * chances[label].item() + 0.1 / count * chances.sum().item()
        apart = [math.dist(rows[i].tolist(), other.tolist()) for other in rows]
        far = max(d for d, other in zip(apart, labels.tolist(), strict=True) if other == label)
        near = min(d for d, other in zip(apart, labels.tolist(), strict=True) if other != label)
        triplet += math.log1p(math.exp(far - near))
    return (0.25 * identity + triplet) / len(rows)
