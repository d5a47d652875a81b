"""Which engine a model has, and loading by name. Torch is imported for the engines that need it alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from seps.extras import install_command, is_installed, require
from seps.memory import release_free_memory
from seps.plugins import load_plugins
from seps.retrieval.config import VECTOR
from seps.retrieval.embedded import EMBEDDED
from seps.retrieval.engine.engine import PATCHES, Digests, Engine
from seps.retrieval.engine.layout import Layout
from seps.retrieval.engine.light import LightEngine, can_compute

if TYPE_CHECKING:
    import torch

    from seps.encoders import TextEncoder
    from seps.retrieval.engine.patches import PatchEngine


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    device: torch.device | str = "cpu"
    local_files_only: bool = False
    sentences: bool = False
    """What sentences and stored pictures need, at first; the rest when it is needed."""
    remote: bool = False
    """It is a model of the hub."""


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine."""

    wraps: Callable[[object], Engine | None]
    """The engine of an object that is a model of this kind."""
    claims: Callable[[Path], bool]
    """Whether a folder, by its config.json, holds a model of this kind."""
    load: Callable[[str, Path, LoadOptions], Engine]
    """The engine of a model by its name and its folder; of a model of the hub that has the config.json alone."""


def _load_ours(name: str, place: Path | None, options: LoadOptions) -> Engine:
    from seps.retrieval.embedded import sentence_side
    from seps.retrieval.engine.patches import PatchEngine
    from seps.retrieval.model import RetrievalModel, short_hash, text_hash
    from seps.retrieval.pretrained import from_pretrained, vision_side

    def whole() -> RetrievalModel:
        return from_pretrained(name, device=options.device, local_files_only=options.local_files_only).eval()

    side = sentence_side(name, options.device) if options.sentences else None
    if side is None:
        return PatchEngine(whole())
    model, digest = side
    digests = Digests(digest, texts=text_hash(model), short=short_hash(model))

    def texts() -> TextEncoder:
        found = sentence_side(name)
        return whole().text if found is None else found[0].text

    return PatchEngine(
        model, digests=digests, read_vision=lambda: vision_side(name) or whole().vision, read_texts=texts
    )


def _load_dual(name: str, place: Path, options: LoadOptions) -> Engine:
    from seps.encoders import dual_encoder
    from seps.encoders.dual import refuse_other_kind
    from seps.encoders.weights import hub_folder
    from seps.retrieval.engine.vectors import VectorEngine

    if options.remote:
        refuse_other_kind(place)
        place = hub_folder(_hub_id(name), weights=True, local_files_only=options.local_files_only)
    return VectorEngine(dual_encoder(place)).to(options.device)


def _wrap_ours(model: object) -> Engine | None:
    from seps.retrieval.engine.patches import PatchEngine
    from seps.retrieval.model import RetrievalModel

    return PatchEngine(model) if isinstance(model, RetrievalModel) else None


def _wrap_dual(model: object) -> Engine | None:
    from seps.retrieval.engine.vectors import VectorEngine

    return VectorEngine(model) if hasattr(model, "image_vectors") and hasattr(model, "text_vectors") else None  # type: ignore[arg-type]


def _is_dual(folder: Path) -> bool:
    from seps.encoders.dual import is_dual

    return is_dual(folder)


KINDS = [EngineKind(_wrap_dual, _is_dual, _load_dual), EngineKind(_wrap_ours, lambda folder: True, _load_ours)]
"""The first that claims a model has it. Another kind is a file and a row here."""


def engine_of(model: object) -> Engine:
    """The engine of a model of ours or of an `Embedder`; an engine is its own. Raises TypeError for anything else."""
    if hasattr(model, "traits"):
        return cast(Engine, model)
    engine = next((wrapped for kind in KINDS if (wrapped := kind.wraps(model)) is not None), None)
    if engine is None:
        raise TypeError(f"A model is a RetrievalModel, an Embedder or an engine, not {type(model).__name__}.")
    return engine


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
    options = LoadOptions(device, local_files_only, sentences)
    if str(name) in EMBEDDED:
        return _load_ours(str(name), None, options)
    local = Path(name).expanduser()
    remote = not local.is_dir()
    place = _config_folder(str(name), local_files_only) if remote else local
    kind = next(kind for kind in KINDS if kind.claims(place))
    return kind.load(str(name), place, replace(options, remote=remote))


def _hub_id(name: str) -> str:
    from seps.encoders import DUAL_PRESETS

    return DUAL_PRESETS[name].hub if name in DUAL_PRESETS else name


def _config_folder(name: str, local_files_only: bool) -> Path:
    """A folder with the config.json of a model of the hub."""
    from seps.encoders.dual import DUAL_PRESETS, presets_sentence
    from seps.encoders.weights import EncoderUnavailable, transformers_module
    from seps.hub.download import HubError, hub_folder
    from seps.hub.folder import ModelError

    hub = _hub_id(name)
    if hub.count("/") != 1 or hub.startswith((".", "/", "~")) or "\\" in hub:
        raise ModelError(
            f"There is no model {name!r}: give {' or '.join(map(repr, EMBEDDED))}, a preset, a model folder, a run "
            "of seps train, or a hub "
            f"id like organisation/name. Presets: {presets_sentence()}."
        )
    if name in DUAL_PRESETS:
        transformers_module()  # a missing package is named before anything is downloaded
    try:
        return hub_folder(hub, ["config.json"], local_files_only=local_files_only)
    except HubError as error:
        raise (EncoderUnavailable if name in DUAL_PRESETS else ModelError)(str(error)) from error


def size_without_torch(name: str) -> str | None:
    """The size of a new store of a model where none is given and torch is not installed; None: as its engine says."""
    return VECTOR if not is_installed("torch") and name in EMBEDDED and can_compute(name) else None


def with_torch(engine: Engine) -> Engine:
    """The same model with torch, of an engine without it; any other engine is its own."""
    return cast(Engine, engine.with_torch()) if hasattr(engine, "with_torch") else engine


def _ours(engine: Engine) -> PatchEngine | None:
    """The engine where it is one of our models, with torch; None for another kind."""
    return cast("PatchEngine", engine) if engine.traits.kind == PATCHES else None


def fitting(engine: Engine, layout: Layout) -> Engine:
    """The engine for pictures of as many patches as those that are kept in this way: itself, or a copy."""
    if not hasattr(engine, "with_grid") or getattr(layout, "means", False):
        return engine
    fitted: Engine = engine.with_grid(layout.grid)
    return fitted


def on_device(engine: Engine, device: torch.device | str) -> Engine:
    """A copy of an engine on another device; the engine itself where it has none."""
    if not hasattr(engine, "to"):
        return engine
    engine.digests()  # of the copy they are the same
    moved: Engine = copy.deepcopy(engine).to(device)
    return moved


def faster(engine: Engine) -> Engine:
    """The engine as this machine encodes pictures fastest (`seps.retrieval.engine.faster`)."""
    if (ours := _ours(engine)) is None:
        return engine
    from seps.retrieval.engine import faster as forms

    return forms.faster(ours)


def exactly_faster(engine: Engine) -> Engine:
    """The engine in a faster form with the same tokens within rounding (`seps.retrieval.engine.faster`)."""
    if (ours := _ours(engine)) is None:
        return engine
    from seps.retrieval.engine import faster as forms

    return forms.exactly_faster(ours)


def drop_texts(engine: Engine) -> None:
    """Let go what reads texts until it is needed again, where it can be read again."""
    if (let_go := getattr(engine, "drop_texts", None)) is not None:
        let_go()
    release_free_memory()


def torch_pixels(engine: Engine) -> Engine | None:
    """What encodes many pictures for an engine without torch: torch, in its fastest form. None for any other engine."""
    if not hasattr(engine, "with_torch") or not is_installed("torch"):
        return None
    from seps.retrieval.engine.faster import TorchPixels

    ours = _ours(load_engine(engine.name))  # type: ignore[attr-defined]
    return None if ours is None else cast(Engine, TorchPixels(ours))


def faster_way(engine: Engine) -> str:
    """A command that would make indexing faster on this machine; empty where there is none."""
    if hasattr(engine, "with_torch"):
        return "" if is_installed("openvino") else install_command("openvino")
    if (ours := _ours(engine)) is None:
        return ""
    from seps.retrieval.engine import faster as forms

    return forms.faster_way(ours)


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
