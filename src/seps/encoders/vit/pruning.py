"""Which patches of a vision transformer skip its later blocks: those the image itself gives little weight to
("attention", after EViT, Liang et al. 2022), or those that another patch resembles ("merge", after ToMe, Bolya et al.
2023). Neither has weights of its own, so a trained encoder takes it as it is.

Shapes: B images, P prefix tokens, N patches that came in, K that stay, C width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

PruneKind = Literal["attention", "merge"]
ATTENTION: PruneKind = "attention"


@dataclass(frozen=True)
class PruneConfig:
    """How many patches leave, and after which blocks."""

    keep: float = 0.5
    """Part of the patches that passes the last of `blocks`; the blocks share the loss evenly."""
    blocks: tuple[int, ...] = (3,)
    """Blocks (from 1) after which patches leave; with "merge", inside which they are merged."""
    kind: PruneKind = "attention"

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not 0 < self.keep <= 1:
            raise ValueError(f"prune.keep is {self.keep!r}; give a part of the patches, above 0 and at most 1.")
        if self.kind not in get_args(PruneKind):
            raise ValueError(f"prune.kind is {self.kind!r}; choose one of {', '.join(get_args(PruneKind))}.")
        rising = all(isinstance(block, int) for block in self.blocks) and list(self.blocks) == sorted(set(self.blocks))
        if not self.blocks or not rising or self.blocks[0] < 1:
            raise ValueError(f"prune.blocks is {self.blocks!r}; give rising block numbers from 1, such as (3, 6, 9).")

        if self.kind == "merge" and self.keep ** (1 / len(self.blocks)) < 0.5:
            raise ValueError(
                f"prune.keep is {self.keep} over {len(self.blocks)} blocks, but merging takes at most half of the "
                "patches in one block; name more blocks, or raise keep."
            )

    def check(self, depth: int, prefix: int) -> None:
        """Raise ValueError where an encoder of `depth` blocks and `prefix` prefix tokens cannot be pruned so."""
        if self.blocks[-1] >= depth:
            raise ValueError(
                f"prune.blocks is {self.blocks!r}, but after block {self.blocks[-1]} of {depth} nothing is left "
                f"to skip; give numbers below {depth}."
            )
        if self.kind == ATTENTION and prefix < 1:
            raise ValueError(
                "prune.kind='attention' goes by the attention of CLS, which this encoder does not have; use 'merge'."
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "blocks": list(self.blocks)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PruneConfig:
        """The reverse of `to_json`. Raises ValueError naming a field that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"Pruning has no setting {unknown[0]!r}; it has {', '.join(known)}.")
        return cls(**values)


def tokens_per_block(patches: int, prune: PruneConfig) -> list[int]:
    """How many patches stay after each of `prune.blocks`: the same part of the rest each time."""
    count = len(prune.blocks)
    return [max(1, round(int(patches) * prune.keep ** ((stage + 1) / count))) for stage in range(count)]


def keep_by_attention(query: Tensor, key: Tensor, prefix: int, count: int) -> Tensor:
    """Places (B, P + count) of the prefix tokens and of the patches that CLS attends to most, in their order.

    query, key: (B, H, P + N, C / H) of the block's attention. The weight of a patch is its part of CLS's softmax,
    averaged over the heads.
    """
    with torch.no_grad():
        scores = (query[:, :, :1].float() @ key.float().transpose(2, 3)) / query.shape[-1] ** 0.5
        weight = scores.softmax(dim=-1).mean(dim=1)[:, 0, prefix:]  # (B, N)
        best = weight.topk(count, dim=1).indices.sort(dim=1).values + prefix
        first = torch.arange(prefix, device=best.device).expand(best.shape[0], -1)
        return torch.cat([first, best], dim=1)


class Merging:
    """Patches merged step by step into the most similar other patch, and the way back to the grid.

    Every second token of those inside offers itself to the others (bipartite matching on the keys of all heads); the
    pairs with the highest cosine merge into the mean of their patches, drawn out to their mean length: a plain mean of
    patches that differ is shorter than any token the encoder has seen. Prefix tokens never merge.
    """

    def __init__(self, tokens: Tensor, prefix: int) -> None:
        self.prefix = prefix
        self.sizes: Tensor | None = None
        # For every token that came in, the place of the token that holds it now: (B, P + N).
        self.places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)

    def merge(self, tokens: Tensor, key: Tensor, count: int) -> Tensor:
        """(B, P + N', C) -> (B, P + count', C), as near to `count` as one matching allows (half of the patches)."""
        batch, length, width = tokens.shape
        patches = length - self.prefix
        leaving = min(patches - count, patches // 2)
        if leaving <= 0:
            return tokens
        sizes = torch.ones(batch, length, device=tokens.device) if self.sizes is None else self.sizes
        with torch.no_grad():
            every = key.float().transpose(1, 2).flatten(2)[:, self.prefix :]  # (B, N', C)
            metric = torch.nn.functional.normalize(every, dim=-1)
            offers, others = metric[:, ::2], metric[:, 1::2]
            best, partner = (offers @ others.transpose(1, 2)).max(dim=-1)  # (B, offers)
            order = best.argsort(dim=1, descending=True)
            goes, stays = order[:, :leaving], order[:, leaving:].sort(dim=1).values
            target = partner.gather(1, goes)
            # New order of the tokens: prefix, offers that stay, all others.
            kept_offers, all_others = 2 * stays + self.prefix, torch.arange(1, patches, 2, device=key.device)
            kept = torch.cat(
                [
                    torch.arange(self.prefix, device=key.device).expand(batch, -1),
                    kept_offers,
                    (all_others + self.prefix).expand(batch, -1),
                ],
                dim=1,
            )
            new_place = torch.empty(batch, length, dtype=torch.long, device=key.device)
            new_place.scatter_(1, kept, torch.arange(kept.shape[1], device=key.device).expand(batch, -1))
            start = self.prefix + kept_offers.shape[1]
            new_place.scatter_(1, 2 * goes + self.prefix, start + target)
            self.places = new_place.gather(1, self.places)
        weighted = tokens * sizes[:, :, None].to(tokens.dtype)
        summed = torch.zeros(batch, kept.shape[1], width, dtype=tokens.dtype, device=tokens.device)
        summed = summed.scatter_add(1, new_place[:, :, None].expand(-1, -1, width), weighted)
        none = torch.zeros(batch, kept.shape[1], device=tokens.device)
        self.sizes = none.scatter_add(1, new_place, sizes)
        lengths = none.scatter_add(1, new_place, tokens.float().norm(dim=-1) * sizes) / self.sizes
        factor = lengths / summed.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        merged: Tensor = summed * factor[:, :, None].to(tokens.dtype)
        return merged

    def spread(self, tokens: Tensor) -> Tensor:
        """Each token that came in as the token that holds it now: (B, P + N, C)."""
        return tokens.gather(1, self.places[:, :, None].expand(-1, -1, tokens.shape[2]))
