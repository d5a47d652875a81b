"""An engine as this machine encodes pictures fastest, for indexing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence

import torch

from seps.encoders import ViT
from seps.encoders.compiled import TIP, can_compile, compiled_vision, is_installed, multiplies_bfloat16
from seps.memory import release_free_memory
from seps.retrieval.engine.patches import PatchEngine, Vision
from seps.retrieval.engine.queries import Array, as_array
from seps.retrieval.model import RetrievalModel


def faster(engine: PatchEngine) -> PatchEngine:
    """The engine with its vision encoder in a faster form, or as it is where there is none. It makes a process's own.

    On a CPU by OpenVINO where installed, else `half_copy`. Products are of bfloat16, or by OpenVINO of 8 bits, where
    the device has them.
    """
    engine.load_pixels()
    vision = fast_vision(engine.model)
    if vision is None:
        return engine
    engine.drop_pixels()
    gc.collect()  # a traced module is part of cycles
    release_free_memory()
    return _with_vision(engine, vision)


def exactly_faster(engine: PatchEngine) -> PatchEngine:
    """The engine with its vision encoder in a faster form whose tokens differ by the rounding of float32 alone.

    On a CPU by OpenVINO where installed; else the engine as it is. Later changes of its weights are not seen.
    """
    if engine.device.type != "cpu" or engine.vision is not None:
        return engine
    engine.load_pixels()
    vision = compiled_vision(engine.model.vision, "f32")
    return engine if vision is None else _with_vision(engine, vision)


def _with_vision(engine: PatchEngine, vision: Vision) -> PatchEngine:
    """The engine with this form of the vision encoder."""
    replaced = PatchEngine(engine.model, digests=engine.digests())
    replaced.vision = vision
    return replaced


def fast_vision(model: RetrievalModel) -> Vision | None:
    """The vision encoder in its fastest form on this device; None where the model's own is to be taken."""
    compiled = compiled_vision(model.vision) if model.device.type == "cpu" else None
    return half_copy(model) if compiled is None else compiled


def half_copy(model: RetrievalModel) -> ViT | None:
    """The vision transformer in bfloat16, where the device has products of it; None where it has not.

    On a CPU it is twice as fast, with the same rSum; on a GPU neither was measured. Other encoders and machines encode
    with the model's own weights.
    """
    if not isinstance(model.vision, ViT):
        return None
    kind = model.device.type
    fast = multiplies_bfloat16() if kind == "cpu" else kind == "cuda" and gpu_multiplies_bfloat16(model.device)
    return copy.deepcopy(model.vision).bfloat16() if fast else None


def gpu_multiplies_bfloat16(device: torch.device) -> bool:
    """Whether this GPU has tensor cores for bfloat16: from compute capability 8 on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def faster_way(engine: PatchEngine) -> str:
    """A command that would make indexing faster on this machine; empty where there is none."""
    if engine.device.type != "cpu" or is_installed():
        return ""
    return TIP if can_compile(engine.model.vision) else ""


class TorchPixels:
    """Encodes pictures as `LightEngine` does, with torch in its fastest form here."""

    def __init__(self, engine: PatchEngine) -> None:
        self._engine, self._fast = engine, faster(engine)

    @torch.no_grad()
    def encode_pixels(self, decoded: Sequence[Array]) -> Array:
        """Pixels (3, H, W) uint8 each -> (B, C) of length one, a few at a time."""
        engine, step = self._engine, self._engine.traits.cpu_batch
        pixels = [torch.from_numpy(one) for one in decoded]
        parts = [self._fast.encode_pixels(pixels[i : i + step]) for i in range(0, len(pixels), step)]
        return as_array(engine.vectors(engine.pictures(torch.cat(parts))))
