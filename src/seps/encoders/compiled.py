"""Our vision encoders as OpenVINO runs them on a CPU: the same weights and operations, several of them in one pass.

The package `openvino` is the extra `fast`; without it torch computes. What it saves, and what bfloat16 changes:
docs/search-figures.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from .mini import EfficientNetLite0
from .vision import VisionEncoder
from .vit import ViT

Precision = Literal["f32", "bf16"]
TIP = "pip install 'seps[fast]'"


class CompiledVision:
    """`vision(pixels)` of an encoder by OpenVINO; each picture on one core, and any number of threads may call.

    Pictures are encoded one at a time, so the tokens of a picture do not depend on those beside it. `precision` is
    that of the products: "f32" differs from torch by rounding alone. Later changes of the encoder are not seen.
    """

    def __init__(self, vision: VisionEncoder, precision: Precision) -> None:
        openvino = load_openvino()
        from openvino.frontend import FrontEndManager
        from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

        example = torch.zeros(1, 3, *vision.image_size)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing notes every shape that becomes fixed, which is meant
            # Not checked by tracing twice: the weights of a folded convolution are new constants each time.
            traced = torch.jit.trace(vision, example, check_trace=False)  # type: ignore[no-untyped-call]
        # Not by `openvino.convert_model`, which reports its use to the makers of OpenVINO.
        frontend = FrontEndManager().load_by_framework("pytorch")
        decoder = TorchScriptPythonDecoder(traced, shared_memory=False)
        graph = frontend.convert(frontend.load(decoder))
        graph.reshape(list(example.shape))
        # A stream computes one picture at a time, on one core: with fewer than callers they would wait for each other.
        cores = os.cpu_count() or 1
        settings = {"INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": cores, "INFERENCE_NUM_THREADS": cores}
        self._model: Any = openvino.Core().compile_model(graph, "CPU", {**settings, "ENABLE_CPU_PINNING": False})
        self._thread = threading.local()

    def __call__(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) float32 in [0, 1] of the encoder's `image_size` -> tokens (B, P + N, C) float32."""
        request = getattr(self._thread, "request", None)
        if request is None:
            request = self._thread.request = self._model.create_infer_request()
        # Copied, for the next picture is written to the same place.
        return torch.cat([torch.from_numpy(request.infer({0: one[None].numpy()})[0].copy()) for one in pixels])


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
    """Whether the encoder is one of those measured: EfficientNet-Lite0, a plain vision transformer that prunes none."""
    return type(vision) is EfficientNetLite0 or (type(vision) is ViT and vision.prune is None)


def is_installed() -> bool:
    """Whether OpenVINO is there to be used: `SEPS_OPENVINO=0` in the environment leaves all encoding to torch."""
    return os.environ.get("SEPS_OPENVINO") != "0" and importlib.util.find_spec("openvino") is not None


def compiled_vision(vision: VisionEncoder, precision: Precision) -> CompiledVision | None:
    """The encoder compiled; None without OpenVINO, for other encoders, and, with a warning, where OpenVINO fails."""
    if not can_compile(vision) or not is_installed():
        return None
    try:
        return CompiledVision(vision, precision)
    except Exception as error:  # whatever another version of it raises, torch can encode
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"OpenVINO cannot run this encoder ({line}); torch encodes, more slowly.", stacklevel=2)
        return None
