"""A vision model of transformers as a `ViT`: its tensors under our names, and the shape its configuration gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seps.encoders.vision import Preprocessing, TransformersVision, count_prefix, pair
from seps.hub.tensor_names import Renames, common_form, renamed_by

from .model import Activation, ViT, ViTConfig
from .pruning import PruneConfig

FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers", "clip_vision_model", "siglip_vision_model")
"""Families of transformers whose vision model is a plain transformer that `ViT` computes."""
_NAMES: Renames = (
    (r"^(?:encoder\.)?layers\.(\d+)\.", r"blocks.\1."),
    (r"\.(?:layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(?:layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.(?:attention|self_attn)\.(q|k|v)_proj\.", r".\1."),
    (r"\.(?:attention\.o_proj|self_attn\.out_proj)\.", ".project."),
    (r"\.mlp\.", "."),
    (r"\.layer_scale(\d)\.lambda1$", r".scale\1"),
    (r"^embeddings\.patch_embeddings?\.(?:projection\.)?", "patch."),
    (r"^(?:layernorm|post_layernorm)\.", "norm."),
    (r"^pre_layrnorm\.", "norm_before."),
)
_SPECIAL = ("embeddings.cls_token", "embeddings.class_embedding", "embeddings.distillation_token")
_POSITIONS = ("embeddings.position_embeddings", "embeddings.position_embedding.weight")
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def from_transformers(
    encoder: TransformersVision,
    *,
    prune: PruneConfig | None,
    drop_path: float = 0.0,
    projection: Tensor | None = None,
) -> ViT:
    """The same encoder as a `ViT`, with a trained `projection` (out, C) of all tokens where one is given.

    Raises ValueError for a family that is no plain transformer.
    """
    config: Any = encoder.model.config
    activation = _ACTIVATIONS.get(str(config.hidden_act))
    if config.model_type not in FAMILIES or activation is None or getattr(config, "use_swiglu_ffn", False):
        raise ValueError(
            f"Pruning inside the encoder works with plain vision transformers ({', '.join(FAMILIES)}); this one is "
            f"{config.model_type} with {config.hidden_act}. Leave prune out."
        )
    state = our_names(encoder.model.state_dict())
    if projection is not None:
        state["projection.weight"] = projection
    size = pair(config.image_size)[0]
    mean, std = (tuple(buffer.flatten().tolist()) for buffer in (encoder.mean, encoder.std))
    shape = ViTConfig(
        patch_size=encoder.stride[0],
        width=int(config.hidden_size),
        depth=int(config.num_hidden_layers),
        heads=int(config.num_attention_heads),
        hidden=state["blocks.0.fc1.weight"].shape[0],
        grid=(size // encoder.stride[0], size // encoder.stride[0]),
        prefix=count_prefix(config) or 0,
        layer_scale="blocks.0.scale1" in state,
        norm_before="norm_before.weight" in state,
        patch_bias="patch.bias" in state,
        activation=activation,
        eps=float(config.layer_norm_eps),
        antialias=config.model_type == "dinov2_with_registers",
        projection=0 if projection is None else len(projection),
    )
    made = ViT(shape, encoder.image_size, preprocessing=Preprocessing(mean, std), prune=prune, drop_path=drop_path)
    made.load_state_dict(state)
    return made


def our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a transformers vision model under the names of `ViT`; pooling heads are left out."""
    named: dict[str, Tensor] = {}
    special = [state[name].reshape(1, -1) for name in _SPECIAL if name in state]
    positions = next(state[name] for name in _POSITIONS if name in state)
    positions = positions.reshape(-1, positions.shape[-1])
    if special:
        # CLS always has the same position, so it is added once and for all.
        named["prefix"] = torch.cat(special) + positions[: len(special)]
        if "embeddings.register_tokens" in state:
            named["prefix"] = torch.cat([named["prefix"], state["embeddings.register_tokens"][0]])
        named["prefix"] = named["prefix"][None]
    named["positions"] = positions[len(special) :][None]
    skipped = (*_SPECIAL, *_POSITIONS, "embeddings.register_tokens", "embeddings.mask_token", "embeddings.position_ids")
    for name, tensor in state.items():
        if name not in skipped and not name.startswith(("pooler.", "head.")):
            named[renamed_by(_NAMES, common_form(name))] = tensor
    return _join_qkv(named)


def _join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {name: tensor for name, tensor in state.items() if not re.search(r"\.[qkv]\.(weight|bias)$", name)}
    for name in state:
        if match := re.fullmatch(r"(blocks\.\d+)\.q\.(weight|bias)", name):
            block, kind = match.groups()
            joined[f"{block}.qkv.{kind}"] = torch.cat([state[f"{block}.{part}.{kind}"] for part in "qkv"])
    return joined
