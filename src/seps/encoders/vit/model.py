"""A plain vision transformer of our own: stable tensor names, the weights of ViT, DINOv2, CLIP or SigLIP, and an
option to let patches that carry little skip the later blocks (`seps.encoders.vit.pruning`).

Shapes: B images, P prefix tokens (CLS, registers), N = h * w patches, C width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders.vision import IMAGENET, Preprocessing, VisionEncoder
from seps.products import Linear, linear_gelu

from .pruning import ATTENTION, Merging, PruneConfig, keep_by_attention, tokens_per_block

Activation = Literal["gelu", "quick_gelu", "gelu_tanh"]


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a plain vision transformer. The defaults are DINOv2-small's."""

    patch_size: int = 14
    width: int = 384
    depth: int = 12
    heads: int = 6
    hidden: int = 1536
    """Width inside the MLP of a block."""
    grid: tuple[int, int] = (37, 37)
    """Rows and columns of patches that the position embedding was trained for; other sizes are interpolated."""
    prefix: int = 1
    """Prefix tokens: CLS, then registers. 0: none (SigLIP)."""
    layer_scale: bool = True
    norm_before: bool = False
    """A norm before the first block (CLIP)."""
    patch_bias: bool = True
    activation: Activation = "gelu"
    eps: float = 1e-6
    antialias: bool = False
    """Whether positions are smoothed when they are interpolated (DINOv2 with registers)."""
    projection: int = 0
    """Width of a linear layer without bias behind the last norm, applied to every token (CLIP's has 512); 0: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", tuple(self.grid))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "grid": list(self.grid)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ViTConfig:
        """The reverse of `to_json`. Raises ValueError naming a field that does not exist."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"A vision transformer has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}.")
        return cls(**values)


class Block(nn.Module):
    """Self-attention and MLP, each behind a norm and added to its input (times a learned scale in DINOv2)."""

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        width = config.width
        self.heads, self.activation, self.drop_path = config.heads, config.activation, drop_path
        self.norm1 = nn.LayerNorm(width, eps=config.eps)
        self.qkv = Linear(width, 3 * width)
        self.project = Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=config.eps)
        self.fc1 = Linear(width, config.hidden)
        self.fc2 = Linear(config.hidden, width)
        self.scale1 = nn.Parameter(torch.ones(width)) if config.layer_scale else None
        self.scale2 = nn.Parameter(torch.ones(width)) if config.layer_scale else None

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        """(B, L, C) -> (B, L, C). `sizes` (B, L): how many patches a merged token stands for."""
        return self.mlp(self.attend(tokens, sizes)[0])

    def attend(self, tokens: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens after attention, and the queries and keys (B, H, L, C / H) it used."""
        batch, length, width = tokens.shape
        qkv = self.qkv(self.norm1(tokens)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        # A token merged of n patches counts n times in the softmax, as in ToMe.
        bias = None if sizes is None else sizes.log()[:, None, None, :].to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        branch = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return tokens + self._scaled(branch, self.scale1), query, key

    def mlp(self, tokens: Tensor) -> Tensor:
        """The second half of the block."""
        normed = self.norm2(tokens)
        if self.activation == "gelu":
            inner = linear_gelu(normed, self.fc1)
        elif self.activation == "quick_gelu":
            inner = self.fc1(normed)
            inner = inner * torch.sigmoid(1.702 * inner)
        else:
            inner = F.gelu(self.fc1(normed), approximate="tanh")
        return tokens + self._scaled(self.fc2(inner), self.scale2)

    def _scaled(self, branch: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            branch = branch * scale
        if self.training and self.drop_path > 0:
            kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.drop_path
            branch = branch * (kept.to(branch.dtype) / (1 - self.drop_path))
        return branch


class ViT(VisionEncoder):
    """A plain vision transformer. With `prune`, patches leave the blocks early; the output keeps its shape.

    The output is (B, P + N, C) with or without pruning: a patch that left is given as it was when it left (or as the
    token it was merged into), so that whatever follows (selection, index, explanation) still sees a whole grid.
    """

    def __init__(
        self,
        config: ViTConfig,
        image_size: tuple[int, int] = (224, 224),
        *,
        preprocessing: Preprocessing | None = None,
        prune: PruneConfig | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(
            width=config.projection or config.width,
            num_prefix_tokens=config.prefix,
            image_size=image_size,
            stride=(config.patch_size, config.patch_size),
            preprocessing=preprocessing or Preprocessing(*IMAGENET),
        )
        self.config, self.drop_path, self.early_width = config, drop_path, config.width
        self.patch = nn.Conv2d(3, config.width, config.patch_size, config.patch_size, bias=config.patch_bias)
        if config.prefix:
            self.prefix = nn.Parameter(torch.zeros(1, config.prefix, config.width))
        self.positions = nn.Parameter(torch.zeros(1, math.prod(config.grid), config.width))
        self.norm_before = nn.LayerNorm(config.width, eps=config.eps) if config.norm_before else nn.Identity()
        rates = [drop_path * block / max(1, config.depth - 1) for block in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.projection = nn.Linear(config.width, config.projection, bias=False) if config.projection else nn.Identity()
        self.prune = prune
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.eval()

    @property
    def prune(self) -> PruneConfig | None:
        """Which patches skip the later blocks; None: none. May be set at any time: it has no weights."""
        return self._prune

    @prune.setter
    def prune(self, prune: PruneConfig | None) -> None:
        if prune is not None:
            prune.check(self.config.depth, self.config.prefix)
        self._prune = prune

    def forward(self, pixels: Tensor, added: Tensor | None = None) -> Tensor:
        """See `VisionEncoder.forward`; `added` (B, C) is added to CLS before the first norm (a camera embedding)."""
        if added is None:
            return super().forward(pixels)
        self._check_added(pixels, added)
        return self.encode(self.normalise(pixels), added)

    def forward_with_early(self, pixels: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `VisionEncoder.forward_with_early`; `added` is that of `forward`."""
        if added is None:
            return super().forward_with_early(pixels)
        self._check_added(pixels, added)
        tokens, early = self.encode_with_early(self.normalise(pixels), added)
        return tokens, early.detach()

    def forward_kept(
        self, pixels: Tensor, choose: Callable[[Tensor], Tensor], added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Drop patches before the first block: `choose` takes each patch by itself (B, N, C), without gradient, and
        gives the places (B, K) of those that go on. Returns tokens (B, P + K, C) in that order, and the first."""
        if added is not None:
            self._check_added(pixels, added)
        early = self._early(self.normalise(pixels))
        places = choose(early.detach())
        return self._late(_take(early, places), added), early.detach()

    def _check_added(self, pixels: Tensor, added: Tensor) -> None:
        # `shape[0]`, as `len` would fix the number of pictures in an export.
        if not self.config.prefix or added.shape != (pixels.shape[0], self.config.width):
            raise ValueError(
                f"What is added to CLS must be ({len(pixels)}, {self.config.width}) in an encoder with CLS; got "
                f"{tuple(added.shape)} and {self.config.prefix} prefix tokens."
            )

    def encode(self, normalised: Tensor, added: Tensor | None = None) -> Tensor:
        """See `VisionEncoder.encode` and `forward`."""
        return self._late(self._early(normalised), added)

    def encode_with_early(self, normalised: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `VisionEncoder.encode_with_early`: the patches with their positions, before the first norm."""
        early = self._early(normalised)
        return self._late(early, added), early

    def _early(self, normalised: Tensor) -> Tensor:
        rows, columns = self.grid_for(normalised.shape[2], normalised.shape[3])
        patches = self.patch(normalised).flatten(2).transpose(1, 2)  # (B, N, C)
        embedded: Tensor = patches + self.positions_for(rows, columns).to(patches.dtype)
        return embedded

    def _late(self, tokens: Tensor, added: Tensor | None = None) -> Tensor:
        if self.config.prefix:
            prefix = self.prefix.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
            if added is not None:
                prefix = torch.cat([prefix[:, :1] + added[:, None].to(prefix.dtype), prefix[:, 1:]], dim=1)
            tokens = torch.cat([prefix, tokens], dim=1)
        tokens = self.norm_before(tokens)
        final: Tensor = self.projection(self.norm(self._blocks(tokens)))
        return final

    def _blocks(self, tokens: Tensor) -> Tensor:
        """(B, P + N, C) -> (B, P + N, C), every token as it left the blocks."""
        prune = self.prune
        if prune is None:
            for block in self.blocks:
                tokens = block(tokens)
            return tokens
        prefix = self.config.prefix
        stages = dict(zip(prune.blocks, tokens_per_block(tokens.shape[1] - prefix, prune), strict=True))
        if prune.kind == ATTENTION:
            return self._drop(tokens, stages, prefix)
        return self._merge(tokens, stages, prefix)

    def _drop(self, tokens: Tensor, stages: Mapping[int, int], prefix: int) -> Tensor:
        final = tokens.clone()
        # Where in the grid each token that is still inside lies: (B, P + K).
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
        for number, block in enumerate(self.blocks, start=1):
            if number not in stages:
                tokens = block(tokens)
                continue
            tokens, query, key = block.attend(tokens)  # type: ignore[operator]
            tokens = block.mlp(tokens)  # type: ignore[operator]
            final = _put(final, places, tokens)
            kept = keep_by_attention(query, key, prefix, stages[number])  # (B, P + K)
            tokens, places = _take(tokens, kept), places.gather(1, kept)
        return _put(final, places, tokens)

    def _merge(self, tokens: Tensor, stages: Mapping[int, int], prefix: int) -> Tensor:
        merging = Merging(tokens, prefix)
        for number, block in enumerate(self.blocks, start=1):
            if number not in stages:
                tokens = block(tokens, merging.sizes)
                continue
            tokens, _, key = block.attend(tokens, merging.sizes)  # type: ignore[operator]
            tokens = block.mlp(merging.merge(tokens, key, stages[number]))  # type: ignore[operator]
        return merging.spread(tokens)

    def positions_for(self, rows: int, columns: int) -> Tensor:
        """(1, rows * columns, C), interpolated from the trained grid where that is another."""
        if (rows, columns) == self.config.grid:
            return self.positions
        grid = self.positions.reshape(1, *self.config.grid, -1).permute(0, 3, 1, 2).float()
        resized = F.interpolate(
            grid, size=(rows, columns), mode="bicubic", align_corners=False, antialias=self.config.antialias
        )
        return resized.flatten(2).transpose(1, 2)


def _take(tokens: Tensor, places: Tensor) -> Tensor:
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))


def _put(target: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    return target.scatter(1, places[:, :, None].expand(-1, -1, tokens.shape[2]), tokens.to(target.dtype))
