"""Our vision encoders as OpenVINO runs them on a CPU: the same weights and operations, several of them in one pass.

The package `openvino` is the extra `fast`; without it torch computes. What it saves, and what bfloat16 and 8-bit
products change: docs/search-figures.md.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import os
import sys
import threading
import warnings
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from seps.memory import release_free_memory

from .mini import EfficientNetLite0
from .vision import VisionEncoder
from .vit import ViT
from .weights import first_line

ProductPrecision = Literal["f32", "bf16", "int8"]
GROUP = 128
"""Values of a token that are rounded to 8 bits with one scale: fewer are slower, more are less exact."""
TIP = "pip install 'seps[fast]'"


class CompiledVision:
    """`vision(pixels)` of an encoder by OpenVINO; each picture on one core, several at once, from any thread.

    Pictures are encoded one at a time, so the tokens of a picture do not depend on those beside it. `precision` is
    that of the products: "f32" differs from torch by rounding alone. "int8" is that of the linear layers, the others
    are bfloat16: weights have one scale per output, and what comes in is rounded as it comes, with one scale per
    `GROUP` values of a token, so that no photos are needed to find scales. Later changes of the encoder are not seen.
    """

    def __init__(self, vision: VisionEncoder, precision: ProductPrecision) -> None:
        openvino = load_openvino()
        from openvino.frontend import FrontEndManager
        from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

        example = torch.zeros(1, 3, *vision.image_size)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing notes every shape that becomes fixed, which is meant
            vision(example)  # what an encoder computes of its weights once would make the graph twice as large
            # Not checked by tracing twice: the weights of a folded convolution are new constants each time.
            traced = torch.jit.trace(vision, example, check_trace=False)  # type: ignore[no-untyped-call]
        # Not by `openvino.convert_model`, which reports its use to the makers of OpenVINO.
        frontend = FrontEndManager().load_by_framework("pytorch")
        decoder = TorchScriptPythonDecoder(traced, shared_memory=False)
        graph = frontend.convert(frontend.load(decoder))
        graph.reshape(list(example.shape))
        # A stream computes one picture at a time, on one core: with fewer than callers they would wait for each other.
        cores = os.cpu_count() or 1
        settings: dict[str, Any] = {"NUM_STREAMS": cores, "INFERENCE_NUM_THREADS": cores, "ENABLE_CPU_PINNING": False}
        settings["INFERENCE_PRECISION_HINT"] = "bf16" if precision == "int8" else precision
        if precision == "int8":
            _round_weights(graph)
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = GROUP
        del traced, decoder, frontend  # with them the weights that were rounded: compiling takes the most memory
        gc.collect()
        release_free_memory()
        self._model: Any = openvino.Core().compile_model(graph, "CPU", settings)
        self._streams, self._thread = cores, threading.local()

    def __call__(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) float32 in [0, 1] of the encoder's `image_size` -> tokens (B, P + N, C) float32."""
        requests = self._requests(min(len(pixels), self._streams))
        found: list[Tensor] = []
        running: deque[Any] = deque()
        for one, request in zip(pixels, itertools.cycle(requests)):
            if len(running) == len(requests):
                found.append(_result(running.popleft()))  # that of `request`
            request.start_async({0: one[None].numpy()})
            running.append(request)
        return torch.cat([*found, *map(_result, running)])

    def _requests(self, count: int) -> list[Any]:
        """At least so many requests of the calling thread: one computes one picture at a time."""
        own: list[Any] = getattr(self._thread, "requests", [])
        own += [self._model.create_infer_request() for _ in range(count - len(own))]
        self._thread.requests = own
        return own


def _result(request: Any) -> Tensor:
    """The tokens of a request that runs, copied: the next picture is written to the same place."""
    request.wait()
    return torch.from_numpy(request.get_output_tensor(0).data.copy())


def _round_weights(graph: Any) -> None:
    """The weights (outputs, inputs) of the graph's linear layers as 8-bit integers, one scale per output.

    OpenVINO takes what comes into such a layer as 8-bit integers too, with `DYNAMIC_QUANTIZATION_GROUP_SIZE`.
    """
    from openvino import opset13

    for node in graph.get_ordered_ops():
        weights = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if weights is None or weights.get_type_name() != "Constant" or not node.get_attributes()["transpose_b"]:
            continue
        values = weights.get_data().astype(np.float32)
        scales = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / 127
        whole = opset13.convert(opset13.constant(np.rint(values / scales).astype(np.int8)), "f32")
        node.input(1).replace_source_output(opset13.multiply(whole, opset13.constant(scales)).output(0))


def load_openvino() -> Any:
    """The package `openvino`, imported so that it tells its makers nothing; raises ImportError without it.

    It is installed together with `openvino-telemetry`, by which already an import reports itself. While that package
    cannot be imported, openvino does without.
    """
    telemetry = "openvino_telemetry"
    if "openvino" in sys.modules or telemetry in sys.modules:
        return importlib.import_module("openvino")
    sys.modules[telemetry] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[telemetry]


def can_compile(vision: VisionEncoder) -> bool:
    """Whether the encoder is one of those measured: EfficientNet-Lite0, a plain vision transformer."""
    return type(vision) in (EfficientNetLite0, ViT)


def fastest_precision(vision: VisionEncoder) -> ProductPrecision:
    """The products that this processor is fastest with, of those that were measured.

    8-bit ones for the linear layers of a vision transformer, where there are instructions for them and for bfloat16.
    Tiles of AMX multiply bfloat16 so fast that what 8 bits gain there is not known; they are not used with them.
    """
    if not _processor_has("avx512_bf16"):
        return "f32"
    if type(vision) is not ViT or vision.config.width % GROUP or vision.config.hidden % GROUP:
        return "bf16"
    return "int8" if _processor_has("vnni") and not _processor_has("amx_tile") else "bf16"


def _processor_has(name: str) -> bool:
    found = getattr(torch.cpu, f"_is_{name}_supported", None)  # the only place where torch tells
    return bool(found is not None and found())


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; without them they are slower than float32."""
    return _processor_has("avx512_bf16")


def is_installed() -> bool:
    """Whether OpenVINO is there to be used: `SEPS_OPENVINO=0` in the environment leaves all encoding to torch."""
    return os.environ.get("SEPS_OPENVINO") != "0" and importlib.util.find_spec("openvino") is not None


def compiled_vision(vision: VisionEncoder, precision: ProductPrecision | None = None) -> CompiledVision | None:
    """The encoder compiled, by default with `fastest_precision`.

    None without OpenVINO, for other encoders, and, with a warning, where OpenVINO fails.
    """
    if not can_compile(vision) or not is_installed():
        return None
    try:
        return CompiledVision(vision, precision or fastest_precision(vision))
    except Exception as error:  # whatever another version of it raises, torch can encode
        told = f"OpenVINO cannot run this encoder ({first_line(error)}); torch encodes, more slowly."
        warnings.warn(told, stacklevel=2)
        return None
