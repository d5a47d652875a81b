"""A `ViT` from the files people have: OpenAI's CLIP (`ViT-B-16.pt`) and timm's or jx's ImageNet weights (`.pth`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.encoders.archives import read_tensors
from seps.encoders.vision import CLIP, HALF, Preprocessing
from seps.encoders.weights import EncoderUnavailable
from seps.hub.tensor_names import Renames, renamed_by

from .model import ViT, ViTConfig

Resize = Literal["bilinear", "bicubic"]
_OPENAI: Renames = (
    (r"^transformer\.resblocks\.(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_(weight|bias)$", r".qkv.\1"),
    (r"\.attn\.out_proj\.", ".project."),
    (r"\.mlp\.c_fc\.", ".fc1."),
    (r"\.mlp\.c_proj\.", ".fc2."),
    (r"^conv1\.", "patch."),
    (r"^ln_pre\.", "norm_before."),
    (r"^ln_post\.", "norm."),
)
_TIMM: Renames = (
    (r"\.attn\.qkv\.", ".qkv."),
    (r"\.attn\.proj\.", ".project."),
    (r"\.mlp\.", "."),
    (r"\.ls([12])\.gamma$", r".scale\1"),
    (r"^patch_embed\.proj\.", "patch."),
)
_HEADS = {1280: 16}
"""Heads of a width that is not 64 per head (ViT-H)."""


def vit_from_file(
    path: Path | str,
    image_size: tuple[int, int] | None = None,
    *,
    resize: Resize = "bilinear",
    projection: bool = True,
) -> ViT:
    """The image encoder of a file, its positions resized to the grid of `image_size`, as TransReID and DeMo do.

    `image_size` None is the size it was trained with. CLIP's trained projection comes with it unless `projection` is
    False. A classifier of ImageNet (`head.`, `pre_logits.`) and CLIP's text encoder are left out. Raises
    EncoderUnavailable for a file that cannot be read or is no such encoder.
    """
    state = read_tensors(path)
    try:
        if "visual.conv1.weight" in state:
            visual = {name[7:]: value for name, value in state.items() if name.startswith("visual.")}
            config, named = openai_vit(visual)
            preprocessing = Preprocessing(*CLIP)
        elif "patch_embed.proj.weight" in state:
            config, named = timm_vit(state)
            preprocessing = Preprocessing(*HALF)
        else:
            raise KeyError("visual.conv1.weight (OpenAI's CLIP) or patch_embed.proj.weight (timm)")
        if not projection and config.projection:
            config = replace(config, projection=0)
            del named["projection.weight"]
        image_size = image_size or (config.grid[0] * config.patch_size, config.grid[1] * config.patch_size)
        grid = (image_size[0] // config.patch_size, image_size[1] // config.patch_size)
        config, named = fit_positions(config, named, grid, resize)
        made = ViT(config, image_size, preprocessing=preprocessing)
        made.load_state_dict(named)
    except KeyError as error:
        raise EncoderUnavailable(f"{path} is no vision transformer that is known here: it has no {error}.") from error
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise EncoderUnavailable(f"{path} does not fit a plain vision transformer: {told}") from error
    return made


def openai_vit(
    visual: Mapping[str, Tensor], grid: tuple[int, int] | None = None
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Shape and tensors of OpenAI's `visual.*` (names without that prefix); `grid` where the positions are no square.

    Raises KeyError for a tensor that is missing, EncoderUnavailable for a residual network or another grid.
    """
    positions = visual["positional_embedding"]
    named = {
        "prefix": (visual["class_embedding"] + positions[0])[None, None],
        "positions": positions[1:][None],
        "projection.weight": visual["proj"].T.contiguous(),
    }
    skipped = ("positional_embedding", "class_embedding", "proj", "input_resolution")
    named |= {renamed_by(_OPENAI, name): value for name, value in visual.items() if name not in skipped}
    return _config(named, grid, activation="quick_gelu", eps=1e-5), named


def timm_vit(state: Mapping[str, Tensor], grid: tuple[int, int] | None = None) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Shape and tensors of a timm or jx vision transformer; `grid` where the positions are no square.

    Raises KeyError for a tensor that is missing.
    """
    positions = state["pos_embed"][0]
    special = [state[name][0] for name in ("cls_token", "dist_token") if name in state]
    named = {
        "prefix": (torch.cat(special) + positions[: len(special)])[None],
        "positions": positions[len(special) :][None],
    }
    skipped = ("pos_embed", "cls_token", "dist_token")
    for name, value in state.items():
        if name not in skipped and not name.startswith(("head.", "head_dist.", "pre_logits.", "fc_norm.")):
            named[renamed_by(_TIMM, name)] = value
    return _config(named, grid, activation="gelu", eps=1e-6), named


def _config(
    named: Mapping[str, Tensor], grid: tuple[int, int] | None, *, activation: Literal["gelu", "quick_gelu"], eps: float
) -> ViTConfig:
    patch, count = named["patch.weight"], named["positions"].shape[1]
    if patch.ndim != 4 or patch.shape[1] != 3 or patch.shape[2] != patch.shape[3]:
        raise EncoderUnavailable(f"Its patches are {tuple(patch.shape)}; square patches of three channels are needed.")
    width, side = int(patch.shape[0]), math.isqrt(count)
    grid = grid or (side, side)
    if grid[0] * grid[1] != count or (width % 64 and width not in _HEADS):
        raise EncoderUnavailable(
            f"It has {count} positions, which are no {grid[0]}x{grid[1]} grid, or a width of {width}."
        )
    blocks = {name.split(".")[1] for name in named if name.startswith("blocks.")}
    return ViTConfig(
        patch_size=int(patch.shape[2]),
        width=width,
        depth=len(blocks),
        heads=_HEADS.get(width, width // 64),
        hidden=int(named["blocks.0.fc1.weight"].shape[0]),
        grid=grid,
        prefix=int(named["prefix"].shape[1]),
        layer_scale="blocks.0.scale1" in named,
        norm_before="norm_before.weight" in named,
        patch_bias="patch.bias" in named,
        activation=activation,
        eps=eps,
        projection=int(named["projection.weight"].shape[0]) if "projection.weight" in named else 0,
    )


def fit_positions(
    config: ViTConfig, named: Mapping[str, Tensor], grid: tuple[int, int], resize: Resize = "bilinear"
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """The same encoder with positions of another grid, resized once: they are then learned at that size."""
    if grid == config.grid:
        return config, dict(named)
    old = named["positions"].float().reshape(1, *config.grid, -1).permute(0, 3, 1, 2)
    new = F.interpolate(old, size=grid, mode=resize, align_corners=False).flatten(2).transpose(1, 2).contiguous()
    return replace(config, grid=grid), {**named, "positions": new}
