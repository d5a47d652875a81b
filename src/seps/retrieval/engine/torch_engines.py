"""Engines that compute with torch: one row of `KINDS` per kind of model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from seps.encoders import DUAL_PRESETS, dual_encoder
from seps.encoders.dual import is_dual, presets_sentence, refuse_other_kind
from seps.encoders.weights import EncoderUnavailable, hub_folder, transformers_module
from seps.hub.download import HubError
from seps.hub.download import hub_folder as download
from seps.hub.folder import ModelError
from seps.retrieval.embedded import EMBEDDED
from seps.retrieval.engine.engine import Digests, Engine
from seps.retrieval.engine.faster import faster
from seps.retrieval.engine.layout import Layout, PatchLayout
from seps.retrieval.engine.patches import PatchEngine
from seps.retrieval.engine.queries import Array, as_array
from seps.retrieval.engine.vectors import VectorEngine
from seps.retrieval.model import RetrievalModel, short_hash, text_hash
from seps.retrieval.packed import sentence_side
from seps.retrieval.pretrained import from_pretrained, vision_side


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
    def whole() -> RetrievalModel:
        return from_pretrained(name, device=options.device, local_files_only=options.local_files_only).eval()

    side = sentence_side(name, options.device) if options.sentences else None
    if side is None:
        return PatchEngine(whole())
    model, digest = side
    digests = Digests(digest, texts=text_hash(model), short=short_hash(model))
    return PatchEngine(model, digests=digests, read_vision=lambda: vision_side(name) or whole().vision)


def _load_dual(name: str, place: Path, options: LoadOptions) -> Engine:
    if options.remote:
        refuse_other_kind(place)
        place = hub_folder(_hub_id(name), weights=True, local_files_only=options.local_files_only)
    return VectorEngine(dual_encoder(place)).to(options.device)


def _wrap_ours(model: object) -> Engine | None:
    return PatchEngine(model) if isinstance(model, RetrievalModel) else None


def _wrap_dual(model: object) -> Engine | None:
    return VectorEngine(model) if hasattr(model, "image_vectors") and hasattr(model, "text_vectors") else None  # type: ignore[arg-type]


KINDS = [EngineKind(_wrap_dual, is_dual, _load_dual), EngineKind(_wrap_ours, lambda folder: True, _load_ours)]
"""The first that claims a model has it. Another kind is a file and a row here."""


def wrapped(model: object) -> Engine:
    """The engine of a model of ours or of an `Embedder`. Raises TypeError for anything else."""
    engine = next((found for kind in KINDS if (found := kind.wraps(model)) is not None), None)
    if engine is None:
        raise TypeError(f"A model is a RetrievalModel, an Embedder or an engine, not {type(model).__name__}.")
    return engine


def load(name: str | Path, options: LoadOptions) -> Engine:
    """See `seps.retrieval.engine.loading.load_engine`."""
    text, local = str(name), Path(name).expanduser()
    if text in EMBEDDED:
        return _load_ours(text, None, options)
    remote = not local.is_dir()
    place = _config_folder(text, options.local_files_only) if remote else local
    kind = next(kind for kind in KINDS if kind.claims(place))
    return kind.load(text, place, replace(options, remote=remote))


def _hub_id(name: str) -> str:
    return DUAL_PRESETS[name].hub if name in DUAL_PRESETS else name


def _config_folder(name: str, local_files_only: bool) -> Path:
    """A folder with the config.json of a model of the hub."""
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
        return download(hub, ["config.json"], local_files_only=local_files_only)
    except HubError as error:
        raise (EncoderUnavailable if name in DUAL_PRESETS else ModelError)(str(error)) from error


class TorchPixels:
    """Encodes pictures as `LightEngine` does, with torch in its fastest form here."""

    def __init__(self, name: str) -> None:
        self._engine = load(name, LoadOptions())
        self._fast = faster(self._engine)

    @torch.no_grad()
    def encode_pixels(self, decoded: Sequence[Array]) -> Array:
        """Pixels (3, H, W) uint8 each -> (B, C) of length one, a few at a time."""
        engine, step = self._engine, self._engine.traits.cpu_batch
        pixels = [torch.from_numpy(one) for one in decoded]
        parts = [self._fast.encode_pixels(pixels[i : i + step]) for i in range(0, len(pixels), step)]
        return as_array(engine.vectors(engine.pictures(torch.cat(parts))))


def fitting(engine: Engine, layout: Layout) -> Engine:
    """See `seps.retrieval.engine.loading.fitting`."""
    if not isinstance(engine, PatchEngine) or (isinstance(layout, PatchLayout) and layout.means):
        return engine
    return engine.with_grid(layout.grid)


def on_device(engine: Engine, device: torch.device | str) -> Engine:
    """See `seps.retrieval.engine.loading.on_device`."""
    if isinstance(engine, PatchEngine):
        engine.load_pixels()
        return PatchEngine(copy.deepcopy(engine.model).to(device), digests=engine.digests())
    return copy.deepcopy(engine).to(device)  # type: ignore[attr-defined, no-any-return]
