"""What each patch adds to the pooled vector of a dual encoder, through its last attention; all parts sum to the vector.

The pooled token attends to the patches once more before it is taken out: in CLIP the CLS token in the last layer, in
SigLIP the probe of the pooling head. What that attention gives is a sum with one term per token: its weight times its
value, through the output projection. What follows is linear once the deviation of the final LayerNorm is known (CLIP),
or has no norm (SigLIP), up to the division by the vector's length. The rest of the vector is `elsewhere`: what the
pooled token knew before, biases, and the MLP after the attention, which is not linear.

Shapes: N patches, P prefix tokens, D width of the vision tower, H heads, C width of the space.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PatchParts:
    """A picture's vector, of length one, as a sum."""

    patches: Tensor
    """(N, C) what each patch adds, row by row of the grid."""
    elsewhere: Tensor
    """(C,) what belongs to no patch."""
    grid: tuple[int, int]
    """Patches down and across; they cover what the model sees of the picture."""

    @property
    def vector(self) -> Tensor:
        """(C,) the sum."""
        return self.patches.sum(dim=0) + self.elsewhere


@dataclass(frozen=True)
class Attention:
    """The weights of one attention: each projection (D, D) with its bias (D,)."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]
    heads: int

    @classmethod
    def of(cls, module: Any) -> Attention:
        """Of an attention of transformers, or of torch."""
        if isinstance(module, nn.MultiheadAttention):
            pairs = list(zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True))
        else:
            pairs = [(some.weight, some.bias) for some in (module.q_proj, module.k_proj, module.v_proj)]
        query, key, value = pairs
        return cls(query, key, value, (module.out_proj.weight, module.out_proj.bias), int(module.num_heads))

    def parts(self, query: Tensor, tokens: Tensor, masked: Tensor | None = None) -> Tensor:
        """(N, D) what each of the tokens (N, D) adds to the attention of one query (D,), without the last bias.

        Those that are `masked` (N,) are not attended to, and add nothing.
        """
        asked = _linear(query, self.query).view(self.heads, -1)  # (H, d)
        keys, values = (_linear(tokens, pair).view(len(tokens), self.heads, -1) for pair in (self.key, self.value))
        logits = torch.einsum("hd,nhd->nh", asked, keys) * asked.shape[-1] ** -0.5
        if masked is not None:
            logits = logits.masked_fill(masked[:, None], float("-inf"))
        weighted: Tensor = logits.softmax(dim=0)[..., None] * values
        return weighted.flatten(1) @ self.output[0].T


def _linear(values: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
    return values @ pair[0].T + pair[1]


@torch.no_grad()
def cls_parts(
    vision: Any,
    projection: nn.Linear,
    inputs: dict[str, Tensor],
    grid: tuple[int, int],
    masked: Tensor | None = None,
) -> PatchParts:
    """Of a tower whose vector is its projected CLS token after the last layer and LayerNorm (CLIP and its kin).

    Patches that are `masked` (N,) are left out of the last attention: the vector is the one without them.
    """
    layer = vision.encoder.layers[-1]
    tokens = _input_of(layer, vision, inputs)[0]
    normed = layer.layer_norm1(tokens)
    hidden = None if masked is None else torch.cat([masked.new_zeros(len(tokens) - len(masked)), masked])
    parts = Attention.of(layer.self_attn).parts(normed[0], normed, hidden)
    attended = tokens[0] + parts.sum(dim=0) + layer.self_attn.out_proj.bias
    pooled = attended + layer.mlp(layer.layer_norm2(attended))
    patches = parts[1:]
    elsewhere = pooled - patches.sum(dim=0)
    # LayerNorm with the deviation that the pooled token has: linear, and exact for the sum.
    norm: nn.LayerNorm = vision.post_layernorm
    deviation = (pooled.var(unbiased=False) + norm.eps).sqrt()
    both = (patches, elsewhere)
    patches, elsewhere = ((one - one.mean(dim=-1, keepdim=True)) / deviation * norm.weight for one in both)
    elsewhere = elsewhere + norm.bias
    patches, elsewhere = patches @ projection.weight.T, projection(elsewhere)
    return _of_length_one(patches, elsewhere, grid)


@torch.no_grad()
def probe_parts(
    vision: Any, inputs: dict[str, Tensor], grid: tuple[int, int], masked: Tensor | None = None
) -> PatchParts:
    """Of a tower whose vector is what a learned probe attends to (the pooling head of SigLIP); `masked`: see above."""
    head = vision.head
    tokens = _input_of(head, vision, inputs)[0]
    # A free shape is padded to a fixed number of patches; padding is not attended to.
    tokens = tokens[: grid[0] * grid[1]]
    patches = Attention.of(head.attention).parts(head.probe[0, 0], tokens, masked)
    attended = patches.sum(dim=0) + head.attention.out_proj.bias
    pooled = attended + head.mlp(head.layernorm(attended))
    return _of_length_one(patches, pooled - patches.sum(dim=0), grid)


def _of_length_one(patches: Tensor, elsewhere: Tensor, grid: tuple[int, int]) -> PatchParts:
    length = (patches.sum(dim=0) + elsewhere).norm().clamp_min(1e-12)
    return PatchParts(patches / length, elsewhere / length, grid)


def _input_of(module: nn.Module, vision: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The tokens (1, P + N, D) that a part of the tower is given."""
    seen: list[Tensor] = []
    thread = threading.get_ident()

    def note(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if threading.get_ident() == thread:  # others may use the same tower meanwhile
            seen.append(positional[0] if positional else named["hidden_states"])

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        vision(**inputs)
    finally:
        handle.remove()
    return seen[0].float()
