"""Which engine a model has, and loading by name. Torch is imported for the engines that need it alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from seps.extras import install_command, is_installed, require
from seps.plugins import load_plugins
from seps.retrieval.config import VECTOR
from seps.retrieval.embedded import EMBEDDED
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.layout import Layout
from seps.retrieval.engine.light import LightEngine, can_compute

if TYPE_CHECKING:
    import torch


def engine_of(model: object) -> Engine:
    """The engine of a model of ours or of an `Embedder`; an engine is its own. Raises TypeError for anything else."""
    if hasattr(model, "traits"):
        return cast(Engine, model)
    from seps.retrieval.engine.torch_engines import wrapped

    return wrapped(model)


def load_engine(
    name: str | Path,
    *,
    device: torch.device | str = "cpu",
    local_files_only: bool = False,
    plugins: Iterable[str | os.PathLike[str]] = (),
    sentences: bool = False,
    size: str | None = None,
) -> Engine:
    """A model of ours as `from_pretrained` loads it, or a published dual encoder.

    A dual encoder is named by a preset (`seps.encoders.DUAL_PRESETS`), a hub id, or the folder it was saved to; a
    folder of that name comes first. `plugins` are run first, see `from_pretrained`. With `sentences` what only pictures
    need is loaded when the first one is encoded.

    `size` is that of the store. An embedded model whose pictures are one vector each computes without torch on a CPU,
    where ONNX Runtime is installed.

    Raises ModelError, EncoderUnavailable and, without torch, MissingPackage (all ValueErrors), a sentence each.
    """
    load_plugins(plugins)
    if size == VECTOR and str(device) == "cpu" and str(name) in EMBEDDED and can_compute(str(name)):
        engine = LightEngine(str(name))
        if not sentences:
            engine.load_pixels()
        return engine
    require("torch", f"The model {str(name)!r}" + ("" if size is None else f" at the size {size!r}"))
    from seps.retrieval.engine.torch_engines import LoadOptions, load

    return load(name, LoadOptions(device, local_files_only, sentences))


def size_without_torch(name: str) -> str | None:
    """The size of a new store of a model where none is given and torch is not installed; None: as its engine says."""
    return VECTOR if not is_installed("torch") and name in EMBEDDED and can_compute(name) else None


def fitting(engine: Engine, layout: Layout) -> Engine:
    """The engine for pictures of as many patches as those that are kept in this way: itself, or a copy."""
    if isinstance(engine, LightEngine):
        return engine
    from seps.retrieval.engine import torch_engines

    return torch_engines.fitting(engine, layout)


def on_device(engine: Engine, device: torch.device | str) -> Engine:
    """A copy of an engine on another device; the engine itself where it has none."""
    if isinstance(engine, LightEngine):
        return engine
    from seps.retrieval.engine import torch_engines

    return torch_engines.on_device(engine, device)


def faster(engine: Engine) -> Engine:
    """The engine as this machine encodes pictures fastest (`seps.retrieval.engine.faster`)."""
    if isinstance(engine, LightEngine):
        return engine
    from seps.retrieval.engine import faster as torch_forms

    return torch_forms.faster(engine)


def torch_pixels(engine: Engine) -> Engine | None:
    """What encodes many pictures for an engine without torch: torch, in its fastest form. None for any other engine."""
    if not isinstance(engine, LightEngine) or not is_installed("torch"):
        return None
    from seps.retrieval.engine.torch_engines import TorchPixels

    return cast(Engine, TorchPixels(engine.name))


def faster_way(engine: Engine) -> str:
    """A command that would make indexing faster on this machine; empty where there is none."""
    if isinstance(engine, LightEngine):
        return "" if is_installed("openvino") else install_command("openvino")
    from seps.retrieval.engine import faster as torch_forms

    return torch_forms.faster_way(engine)


def set_description_weight(engine: Engine, weight: float) -> None:
    """Set the weight of the description in the score of a model of ours. Raises ValueError for another engine."""
    model: Any = getattr(engine, "model", None)
    if not hasattr(model, "set_description_weight"):
        raise ValueError("A dual encoder has no weight of the description to set; leave --description-weight out.")
    model.set_description_weight(weight)


def load_pixels(engine: Engine) -> None:
    """Load what pictures need now, and not when the first one is encoded."""
    if hasattr(engine, "load_pixels"):
        engine.load_pixels()
