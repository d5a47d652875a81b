"""Pictures to vectors by ONNX Runtime: the vision transformer of an embedded model, and the mean of its patches.

The graph is made of the weights of the model's folder when it is first needed. Its products are float32. With 8-bit
ones (`DynamicQuantizeMatMul`) it is twice as fast, but cosines with the torch model fall to 0.996, and the order of
results changes.

Shapes: B pictures, N patches, C width.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from seps.files import read_json
from seps.retrieval.light.graph import Graph
from seps.retrieval.light.weights import Array, LightWeights

_MICROSOFT = "com.microsoft"
"""Domain of operations that ONNX Runtime adds to those of ONNX."""


class LightPictures:
    """The picture side of an embedded model whose vision encoder is a plain vision transformer.

    Any thread may call it; a call uses one core. Raises ValueError for another vision encoder, and what ONNX Runtime
    raises for a graph that it cannot run.
    """

    def __init__(self, weights: LightWeights) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        graph = vision_graph(weights)
        self._session: Any = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def __call__(self, pixels: Array) -> Array:
        """(B, 3, H, W) uint8 -> (B, C) float32 of length one. One at a time: none depends on those beside it."""
        found = [self._session.run(None, {"pixels": one[None]})[0][0] for one in pixels]
        return np.stack(found)


def is_vision_transformer(folder: Path) -> bool:
    """Whether a model folder holds the weights of its vision encoder, a plain vision transformer."""
    return (folder / "vision" / "vit.json").is_file()


def vision_graph(weights: LightWeights) -> bytes:
    """pixels (B, 3, H, W) uint8 -> vector (B, C), as an ONNX file."""
    if not is_vision_transformer(weights.folder):
        raise ValueError(f"{weights.folder} has no vision transformer.")
    stated = read_json(weights.folder / "vision" / "vit.json")
    config = stated["vit"]
    height, width = weights.model["image_size"]
    side = int(config["patch_size"])
    rows, columns = height // side, width // side
    return _Vision(weights, config).model(stated["mean"], stated["std"], (rows, columns), (height, width))


class _Vision:
    """Writes the graph."""

    def __init__(self, weights: LightWeights, config: dict[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.graph = Graph()

    def model(self, mean: Any, std: Any, grid: tuple[int, int], size: tuple[int, int]) -> bytes:
        """The whole graph."""
        graph, config, width = self.graph, self.config, int(self.config["width"])
        side, prefix = int(config["patch_size"]), int(config["prefix"])
        pixels = graph.node("Cast", "pixels", to=1)
        # (x / 255 - mean) / std, in the convolution's own weights.
        kernel = self.weights.tensor("vision.patch.weight")
        scale, shift = 1 / (255 * np.array(std, np.float32)), np.array(mean, np.float32) / np.array(std, np.float32)
        bias = self.weights.tensor("vision.patch.bias") - np.einsum("oihw,i->o", kernel, shift)
        kernel = np.ascontiguousarray(kernel * scale[None, :, None, None])
        flat = self.constant(kernel), self.constant(bias.astype(np.float32))
        patches = graph.node("Conv", pixels, *flat, kernel_shape=[side, side], strides=[side, side])
        shape = self.constant(np.array([0, width, -1]))
        tokens = graph.node("Transpose", graph.node("Reshape", patches, shape), perm=[0, 2, 1])
        tokens = graph.node("Add", tokens, self.constant(self.positions(grid)))
        if prefix:
            first = self.weights.tensor("vision.prefix")
            sizes = graph.node("Concat", self.batch(tokens), self.constant(np.array([prefix, width])), axis=0)
            tokens = graph.node("Concat", graph.node("Expand", self.constant(first), sizes), tokens, axis=1)
        for number in range(int(config["depth"])):
            tokens = self.block(tokens, f"vision.blocks.{number}")
        begin = [self.constant(np.array([value])) for value in (prefix, 2**31 - 1, 1)]
        tokens = self.norm(graph.node("Slice", tokens, *begin), "vision.norm")
        pooled = graph.node("ReduceMean", tokens, axes=[1], keepdims=0)
        weight, bias = self.weights.linear("project_patches.1")
        vector = graph.node("Gemm", pooled, self.constant(weight), self.constant(bias))
        return graph.model(
            [("pixels", np.uint8, ["pictures", 3, *size])], graph.node("LpNormalization", vector, axis=1)
        )

    def batch(self, tokens: str) -> str:
        """(1,) the number of pictures."""
        shape, first = self.graph.node("Shape", tokens), self.constant(np.array([0]))
        return self.graph.node("Gather", shape, first, axis=0)

    def block(self, tokens: str, name: str) -> str:
        """Attention and the two linear layers, each behind a norm and added to its input."""
        graph, heads = self.graph, int(self.config["heads"])
        inner = self.linear(self.norm(tokens, f"{name}.norm1"), f"{name}.qkv")
        query, key, value = graph.nodes("Split", 3, inner, axis=2)
        mixed = graph.node("MultiHeadAttention", query, key, value, domain=_MICROSOFT, num_heads=heads)
        tokens = graph.node("Add", tokens, self.scaled(mixed, f"{name}.project", f"{name}.scale1"))
        inner = self.linear(self.norm(tokens, f"{name}.norm2"), f"{name}.fc1")
        return graph.node("Add", tokens, self.scaled(self.gelu(inner), f"{name}.fc2", f"{name}.scale2"))

    def gelu(self, x: str) -> str:
        """By the error function."""
        return self.graph.node("Gelu", x, domain=_MICROSOFT)

    def scaled(self, x: str, name: str, scale: str) -> str:
        """A linear layer whose outputs have a learned scale."""
        return self.linear(x, name, self.weights.tensor(scale).reshape(-1))

    def linear(self, x: str, name: str, factor: Array | float = 1.0) -> str:
        """A linear layer, times `factor` per output."""
        weight, bias = self.weights.linear(name)
        weight, bias = (np.asarray(part * factor, np.float32) for part in (weight, bias))
        return self.graph.node("Add", self.graph.node("MatMul", x, self.constant(weight)), self.constant(bias))

    def norm(self, x: str, name: str) -> str:
        """Layer norm over the width."""
        fixed = (self.constant(self.weights.tensor(f"{name}.{part}")) for part in ("weight", "bias"))
        return self.graph.node("LayerNormalization", x, *fixed, axis=-1, epsilon=float(self.config["eps"]))

    def constant(self, values: Array) -> str:
        """The name of an array."""
        return self.graph.constant(np.ascontiguousarray(values))

    def positions(self, grid: tuple[int, int]) -> Array:
        """(1, N, C), interpolated from the trained grid where that is another."""
        own = self.weights.tensor("vision.positions")
        trained = tuple(self.config["grid"])
        if grid == trained:
            return own
        table = own.reshape(*trained, -1)
        down, across = (bicubic(before, after) for before, after in zip(trained, grid, strict=True))
        found = np.einsum("ab,bcw->acw", down, table, optimize=True)
        found = np.einsum("ab,cbw->caw", across, found, optimize=True)
        positions: Array = found.reshape(1, grid[0] * grid[1], -1).astype(np.float32)
        return positions


def bicubic(before: int, after: int) -> Array:
    """(after, before) weights of cubic interpolation without smoothing, as torch has them (a = -0.75)."""
    a, found = -0.75, np.zeros((after, before))
    for row in range(after):
        place = (row + 0.5) * before / after - 0.5
        first, part = math.floor(place), place - math.floor(place)
        for offset in range(-1, 3):
            x = abs(offset - part)
            weight = ((a + 2) * x - (a + 3)) * x * x + 1 if x <= 1 else (((x - 5) * x + 8) * x - 4) * a
            found[row, min(max(first + offset, 0), before - 1)] += weight
    return found
