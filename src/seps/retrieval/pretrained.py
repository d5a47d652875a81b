"""Save and load retrieval models: a model folder (`seps.hub.folder`), a hub id, or an embedded one ("mini", "base").

Two forms of weights. "full" holds every tensor, and the encoders' configuration and tokenizer beside them: nothing
else is needed to load it. "delta" holds the encoders' tensors as their difference from the pretrained ones, in 8 bits
with a scale per row, so that a fine-tuned model whose encoders come from their own packages is small; a vision
transformer of our own (`seps.encoders.ViT`) is held whole, in 8 bits as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from seps.encoders import TextEncoder, VisionEncoder, ViT, text_encoder
from seps.encoders.saved import has_text_files, has_vision_files, save_text_files, save_vision_files
from seps.encoders.vit import build_vit, describe_vit
from seps.files import read_json
from seps.hub.folder import CONFIG, ModelError, find_folder, inside, read_config, read_weights
from seps.hub.saving import check_folder, write_folder
from seps.hub.tensor_names import fitted, transformers_version, versions_sentence
from seps.method.config import ConfigError
from seps.method.network import PatchSlimming
from seps.parsing import as_object
from seps.plugins import load_plugins
from seps.registry import CUSTOM, how_to_register, registered
from seps.retrieval.card import model_card
from seps.retrieval.config import ModelConfig
from seps.retrieval.embedded import (
    EMBEDDED,
    ENCODERS,
    MINI,
    bare_name,
    embedded_folder,
    has_rows,
    model_config,
    pack_delta,
    undelta,
)
from seps.retrieval.heads import Head
from seps.retrieval.model import RetrievalModel, make_vision
from seps.training.checkpoint import Log, find_checkpoint, load_weights

Form = Literal["full", "delta"]


def _whole_in_8_bits(model: RetrievalModel) -> tuple[str, ...]:
    """Beginnings of the names of the tensors that "delta" holds whole: nobody needs that encoder's first weights."""
    return ("vision.",) if isinstance(model.vision, ViT) else ()


def save_pretrained(
    model: RetrievalModel, folder: Path | str, *, form: Form = "full", about: Mapping[str, Any] | None = None
) -> None:
    """Write the model and its card into `folder`, whole or not at all.

    `form="delta"` needs encoders that can be loaded again by the names in the model's config. `about` is kept in
    `config.json`; of it the card shows `name`, `license`, `summary` and `figures`, a list of
    `EvaluationReport.as_dict()`. Raises ModelError when the folder cannot be written, or holds a file in the way that
    no save wrote.
    """
    state = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    whole = _whole_in_8_bits(model) if form == "delta" else ()
    base = _fresh(model, model.vision if whole else None).state_dict() if form == "delta" else {}
    for name, tensor in state.items():
        if form == "full":
            tensors[name] = tensor
        elif not name.startswith(ENCODERS) or (name.startswith(whole) and not has_rows(tensor)):
            tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
        elif name.startswith(whole):
            tensors[f"int8.{name}"], tensors[f"scale.{name}"] = pack_delta(tensor, torch.zeros(()))
        elif not torch.equal(tensor, base[name]):
            tensors[f"delta.{name}"], scale = pack_delta(tensor, base[name])
            if tensor.dim() > 1:
                tensors[f"scale.{name}"] = scale
    # Through JSON and back, so that what the card says is what config.json says.
    told = {"form": form, "model": resolved(model), "transformers": transformers_version(), "about": dict(about or {})}
    told |= own_parts(model)
    config = json.loads(json.dumps(told))
    card = model_card(Path(folder).resolve().name, config["model"], config["about"], _facts(model))
    encoders = {"full": _save_encoders, "delta": _save_whole_encoders}[form]
    write_folder(folder, config, tensors, card, partial(encoders, model))


def _fresh(model: RetrievalModel, vision: VisionEncoder | None) -> RetrievalModel:
    """The model with its pretrained encoders, or `vision`; an own head or network stands in it as it is."""
    if model.config.head == CUSTOM:
        return RetrievalModel(model.config, vision, head=model.head)
    if model.head.own_network:
        return RetrievalModel(model.config, vision, network=model.head.network)
    return RetrievalModel(model.config, vision)


def check_save(model: RetrievalModel, folder: Path | str) -> None:
    """Raise ModelError where `save_pretrained(model, folder)` would refuse: a file that no save wrote is in the way."""
    check_folder(folder, _encoder_places(model))


def _encoder_places(model: RetrievalModel) -> list[str]:
    """The folders inside a model folder that its encoders' files go to."""
    return ["vision"] * has_vision_files(model.vision) + ["text"] * has_text_files(model.text)


def _facts(model: RetrievalModel) -> dict[str, str]:
    height, width = model.image_size
    return {
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
        "image size": f"{height} x {width} px, {model.vision.num_patches} patches",
        **(
            {"weight of the description": f"{model.description_weight:.2f}"}
            if model.description_weight is not None
            else {}
        ),
    }


def _save_encoders(model: RetrievalModel, folder: Path) -> dict[str, str]:
    save_vision_files(model.vision, folder / "vision")
    save_text_files(model.text, folder / "text")
    return {place: place for place in _encoder_places(model)}


def _save_whole_encoders(model: RetrievalModel, folder: Path) -> dict[str, str]:
    if not _whole_in_8_bits(model):
        return {}
    save_vision_files(model.vision, folder / "vision")
    return {"vision": "vision"}


def resolved(model: RetrievalModel) -> dict[str, Any]:
    """The model's configuration with every option of its head spelt out, so that no later default changes it."""
    values = dataclasses.asdict(model.config)
    from_encoder = ("embed_size", "num_patches", "num_prefix_tokens")
    if model.head.options:
        values["slimming"] = {name: value for name, value in model.head.options.items() if name not in from_encoder}
    return values


def own_parts(model: RetrievalModel) -> dict[str, Any]:
    """What of the model is somebody's own, for its folder: names of ideas and of objects' classes; never code."""
    config, options = model.config, resolved(model)["slimming"]
    named = {"head": [config.head], "guide": list(options.get("extra_guides") or {})}
    named |= {kind: [options.get(kind)] for kind in ("scoring", "decision", "aggregation", "alignment")}
    if "vision" not in _encoder_places(model):
        named["vision encoder"] = [config.vision]
    if "text" not in _encoder_places(model):
        named["text encoder"] = [config.text]
    ideas = {kind: [name for name in names if name in registered(kind)] for kind, names in named.items()}
    objects: dict[str, Any] = {}
    for part in ("vision", "text"):
        kind = type(getattr(model, part))
        if f"{part} encoder" in named and not ideas[f"{part} encoder"] and kind.__module__.partition(".")[0] != "seps":
            objects[part] = kind
    if config.head == CUSTOM:
        objects["head"] = type(model.head)
    elif model.head.own_network:
        objects["network"] = type(model.head.network)
    own = {
        "ideas": {kind: names for kind, names in ideas.items() if names},
        "objects": {part: f"{kind.__module__}.{kind.__qualname__}" for part, kind in objects.items()},
    }
    return {name: value for name, value in own.items() if value}


def _check_own_parts(told: Mapping[str, Any], folder: Path, given: Mapping[str, object]) -> None:
    """Raise ModelError where a model needs an idea that is not registered, or an object that did not come."""
    ideas, objects = told.get("ideas") or {}, told.get("objects") or {}
    if not isinstance(ideas, dict) or not isinstance(objects, dict):
        raise ModelError(
            f"{folder} has an unreadable list of the custom components that it requires; save the model again."
        )
    covered = {"head": {"head", "scoring", "decision", "aggregation", "alignment", "guide"}}
    covered |= {"network": covered["head"], "vision": {"vision encoder"}, "text": {"text encoder"}}
    for kind, names in ideas.items():
        if any(given.get(part) is not None and kind in kinds for part, kinds in covered.items()):
            continue
        missing = [name for name in names if name not in registered(str(kind))]
        if missing:
            raise ModelError(
                f"The model {folder} uses the {kind} {missing[0]!r}, a custom component that is not registered "
                f"here. {how_to_register(str(kind), missing[0])}"
            )
    for part, name in objects.items():
        if given.get(part) is None:
            raise ModelError(
                f"The model {folder} was saved with a custom object as its {part} ({name}), which a folder "
                f"cannot contain. Pass one: from_pretrained(folder, {part}=...)."
            )


def from_pretrained(
    name: Path | str,
    *,
    device: torch.device | str = "cpu",
    averaged: bool = True,
    revision: str | None = None,
    local_files_only: bool = False,
    vision: VisionEncoder | None = None,
    text: TextEncoder | None = None,
    head: Head | None = None,
    network: PatchSlimming | None = None,
    plugins: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] = (),
) -> RetrievalModel:
    """An embedded model, that of a folder written by `save_pretrained`, the best of a training run, or a hub model.

    Args:
        name: "mini", "base", a folder, or a hub id "organisation/name"; a folder of that name comes first.
        averaged: of a training run, the averaged weights where it kept them.
        revision: branch, tag or commit of a hub model.
        local_files_only: never reach for the hub; its cache still counts.
        vision, text, head, network: objects of your own, for a model that was saved with such; they take its weights.
        plugins: Python files of yours that register the ideas it uses; they are run. Nothing of the folder ever is.

    Raises ModelError (a ValueError) when there is none, or it is damaged; EncoderUnavailable without its encoders.
    """
    load_plugins(plugins)
    own = {"vision": vision, "text": text, "head": head, "network": network}
    what = f"{' or '.join(map(repr, EMBEDDED))}, a folder written by save_pretrained or by seps train"
    folder, remote = (
        (embedded_folder(str(name)), False)
        if str(name) in EMBEDDED
        else find_folder(name, revision=revision, local_files_only=local_files_only, what=what)
    )
    if (folder / CONFIG).is_file():
        model = load_folder(folder, remote, **own)
    elif remote:
        raise ModelError(f"The hub model {name} has no config.json: it was not written by save_pretrained of seps.")
    else:
        model = _load_run(folder, averaged, own)
    return model.to(device).eval()


def begin(
    config: ModelConfig,
    start: str = "",
    *,
    vision: VisionEncoder | None = None,
    text: TextEncoder | None = None,
    head: Head | None = None,
    network: PatchSlimming | None = None,
    log: Log | None = None,
) -> RetrievalModel:
    """The model that training begins with: built as `config` says, with the weights of the trained model `start`.

    Tensors that `start` does not have, or has in another shape (of another head, say), are new. The encoders are those
    of `start`: pretrained weights are not read. If its vision encoder is a `ViT`, it is built with the image size,
    pruning and drop path of `config`. Without `start` the model is new, with pretrained encoders.

    Args:
        config: of the new model.
        start: as for `from_pretrained`, or empty.
        vision, text, head, network: objects of your own instead of those that `config` names.
        log: is told which tensors are new.

    Raises ConfigError where `config` names other encoders than `start` has, or an image size that they cannot take.
    """
    if not start:
        return RetrievalModel(config, vision, text, head, network)
    first = from_pretrained(start)
    for part in ("vision", "text"):
        have, named = getattr(first.config, part), getattr(config, part)
        if have != named:
            raise ConfigError(
                f"start={start!r} has model.{part}={have!r}, but {named!r} is set: set {have!r}, or leave one out."
            )
    if vision is None:
        vision = first.vision
        if isinstance(vision, ViT):
            stated = {**describe_vit(vision), "prune": dict(config.prune)}
            vision = build_vit(stated, config.image_size, drop_path=config.drop_path)
        elif config.image_size not in (None, vision.image_size):
            raise ConfigError(f"start={start!r} takes images of {vision.image_size}; leave model.image_size out.")
    model = RetrievalModel(config, vision, text or first.text, head, network)
    own, known = model.state_dict(), first.state_dict()
    taken = {name: known[name] for name in own if name in known and known[name].shape == own[name].shape}
    model.load_state_dict({**own, **taken})
    new = [name for name in own if name not in taken]
    if new and log is not None:
        log(f"{len(new)} of {len(own)} tensors are new, as start={start!r} has none of that shape: {', '.join(new)}.")
    return model


def load_folder(folder: Path, remote: bool, **own: Any) -> RetrievalModel:
    """The model of a folder that is on this machine; of a hub model (`remote`) paths out of it are refused.

    `own` are the objects of `from_pretrained`.
    """
    config = read_config(folder)
    _check_own_parts(config, folder, own)
    vision, text = own.get("vision"), own.get("text")
    try:
        settings, form = model_config(config["model"]), str(config["form"])
    except (KeyError, TypeError, ConfigError) as error:
        raise ModelError(f"{folder / CONFIG} is not the configuration of a retrieval model ({error}).") from error
    tensors, path = read_weights(folder, config)
    if form == "full" or config.get("encoders"):
        vision, text = saved_encoders(folder, config, settings, vision, text)
    for place, given in ((settings.vision, vision), (settings.text, text)):
        if given is None:
            _refuse_path(place, folder, remote)
    model = RetrievalModel(settings, **{**own, "vision": vision, "text": text})
    state = undelta(model.state_dict(), tensors) if form == "delta" else tensors
    _load_state(model, state, path, config.get("transformers"))
    return model


def saved_encoders(
    folder: Path,
    config: dict[str, Any],
    settings: ModelConfig,
    vision: VisionEncoder | None = None,
    text: TextEncoder | None = None,
) -> tuple[VisionEncoder | None, TextEncoder | None]:
    """The encoders built from the folder's own files: the weights come with the model's."""
    places = config.get("encoders") or {}
    where = str(folder / CONFIG)
    if vision is None and "vision" in places:
        vision = make_vision(settings, inside(folder, places["vision"], where), pretrained=False)
    elif vision is None and settings.vision == MINI and config["form"] == "full":
        vision = make_vision(settings, pretrained=False)
    if text is None and "text" in places:
        text = text_encoder(inside(folder, places["text"], where), pretrained=False)
    return vision, text


def _refuse_path(name: str, folder: Path, remote: bool) -> None:
    """Raise ModelError when a configuration names an encoder by a path that it should not lead to."""
    is_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name
    if (remote and is_path) or ".." in Path(name).parts:
        raise ModelError(
            f"{folder / CONFIG} names the encoder {name!r}, a path that leads out of the model's folder; it was not "
            "loaded. Save the model again with save_pretrained, which puts the encoders' files into the folder."
        )


def _load_run(folder: Path, averaged: bool, own: dict[str, Any]) -> RetrievalModel:
    checkpoint = find_checkpoint(folder, "best")
    state = read_json(checkpoint / "state.json")
    about = state.get("about")
    _check_own_parts(as_object(about), folder, own)
    try:
        config = model_config(state["about"]["model"])
    except KeyError as error:
        raise ModelError(
            f"{folder} is a run of another kind: it does not say how to build a retrieval model."
        ) from error
    start = (state["about"].get("config") or {}).get("start") or ""
    model = begin(config, start, **own)
    weights = load_weights(checkpoint, averaged)
    own = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    _load_state(model, own, checkpoint, state.get("transformers"))
    return model


def _load_state(model: RetrievalModel, state: Mapping[str, Tensor], path: Path, saved_with: object) -> None:
    own = model.state_dict()
    state = fitted(state, own)
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unknown:
        parts = [("lacks", missing), ("has, without a place in the model,", unknown)]
        told = " and ".join(f"{what} {len(names)} tensors (first: {names[0]})" for what, names in parts if names)
        remedy = f"{versions_sentence(saved_with)} Install the release it was saved with, or save the model again."
        raise ModelError(f"{path} {told}. {_changed_ideas(model) or remedy}")
    # torch itself takes a vector for a number, and its first value.
    shapes = [name for name, value in sorted(state.items()) if value.shape != own[name].shape]
    if shapes:
        name, count = shapes[0], len(shapes)
        raise ModelError(
            f"{path} does not fit its configuration: the shape of {count} tensors is another (first: {name} is "
            f"{tuple(state[name].shape)}, not {tuple(own[name].shape)}). {_changed_ideas(model)}".rstrip()
        )
    model.load_state_dict(state, strict=True)


def _changed_ideas(model: RetrievalModel) -> str:
    names = [f"{kind} {name!r}" for kind, found in own_parts(model).get("ideas", {}).items() for name in found]
    return f"Its {', '.join(names)} may have changed: load the code with which it was saved." if names else ""


def vision_side(name: str) -> VisionEncoder | None:
    """The vision encoder of an embedded model, and nothing else of it; None for any other model.

    Whether it is that of a sentence side `model_hash` says.
    """
    if name not in EMBEDDED:
        return None
    folder = embedded_folder(name)
    config = read_config(folder)
    settings = model_config(config["model"])
    vision, _ = saved_encoders(folder, config, settings)
    vision = vision or make_vision(settings)
    with safe_open(folder / config["weights"]["file"], "pt") as file:
        names = [name for name in file.keys() if bare_name(name).startswith("vision.")]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    state = undelta({f"vision.{name}": value for name, value in vision.state_dict().items()}, tensors)
    vision.load_state_dict({name.removeprefix("vision."): value for name, value in state.items()})
    return vision
