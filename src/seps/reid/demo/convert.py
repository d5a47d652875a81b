"""A checkpoint of DeMo, or of its SDTPS descendant, as a model of ours.

The file is a state dict (`torch.save(model.state_dict())` in `engine/processor.py` of that code). Its backbone, camera
embedding, global-local fusion, necks and SDTPS have a place here; its fusion experts (HDM, ATM) and other modules have
none, and are named. What a state dict does not hold is asked for: the set, from which the image size and the numbers of
the cameras follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from seps.encoders import EncoderUnavailable, ViT, read_tensors
from seps.encoders.vision import HALF, Preprocessing
from seps.encoders.vit.files import openai_vit, timm_vit
from seps.hub.folder import ModelError
from seps.hub.tensor_names import Renames, renamed_by
from seps.reid.config import ReidConfig, from_mapping
from seps.reid.demo.model import DemoReidModel
from seps.reid.trained import TrainedReid

SENSORS = ("RGB", "NI", "TI")
_BACKBONE = "BACKBONE.base."
_SETS: Mapping[str, tuple[tuple[int, int], int]] = {
    "rgbnt201": ((256, 128), 1),
    "rgbnt100": ((128, 256), 1),
    "msvr310": ((128, 256), 0),
}
"""Image size (height, width) and the number of the first camera in the names of its files."""
_NAMES: Renames = (
    (r"^BACKBONE\.cv_embed$", "camera_embedding.weight"),
    (r"^rgb_reduce\.", "global_local.0."),
    (r"^nir_reduce\.", "global_local.1."),
    (r"^tir_reduce\.", "global_local.2."),
    (r"^(global_local\.\d)\.0\.", r"\1.norm."),
    (r"^(global_local\.\d)\.1\.", r"\1.linear."),
    (r"^bottleneck\.", "original_neck.norm."),
    (r"^classifier\.", "original_neck.classifier."),
    (r"^bottleneck_r\.", "original_neck.necks.0.norm."),
    (r"^classifier_r\.", "original_neck.necks.0.classifier."),
    (r"^bottleneck_n\.", "original_neck.necks.1.norm."),
    (r"^classifier_n\.", "original_neck.necks.1.classifier."),
    (r"^bottleneck_t\.", "original_neck.necks.2.norm."),
    (r"^classifier_t\.", "original_neck.necks.2.classifier."),
    (r"^bottleneck_sdtps\.", "sdtps_neck.norm."),
    (r"^classifier_sdtps\.", "sdtps_neck.classifier."),
    (r"^sdtps\.rgb_", "sdtps.sensor0_"),
    (r"^sdtps\.nir_", "sdtps.sensor1_"),
    (r"^sdtps\.tir_", "sdtps.sensor2_"),
)


@dataclass(frozen=True)
class Converted:
    """The model, how many tensors of the file are in it, and the names of those that are not."""

    trained: TrainedReid
    mapped: int
    left_out: tuple[str, ...]

    def groups(self) -> dict[str, int]:
        """What was left out, by the part of the network it belongs to, with its number of tensors."""
        return dict(Counter(_part(name) for name in self.left_out))


def _part(name: str) -> str:
    pieces = name.split(".")
    return ".".join(pieces[:3]) if name.startswith(_BACKBONE) else pieces[0]


def read_demo(path: Path | str) -> dict[str, Tensor] | None:
    """The tensors of a DeMo checkpoint, read without running anything in it; None for a file of another kind."""
    try:
        state = read_tensors(path)
    except EncoderUnavailable:
        return None
    state = {name.removeprefix("module."): value for name, value in state.items()}
    return state if any(name.startswith(_BACKBONE) for name in state) else None


def convert_demo(
    path: Path | str,
    layout: str,
    *,
    sparse_ratio: float = 0.5,
    aggr_ratio: float = 0.4,
    state: Mapping[str, Tensor] | None = None,
) -> Converted:
    """The checkpoint of a network that was trained on the set `layout`, as a model of ours.

    The ratios are those of its SDTPS branch, which a state dict does not tell. `state`: what `read_demo` gave, where
    the file was read already. Raises ModelError for another file, set or ratio.
    """
    state = read_demo(path) if state is None else state
    if state is None:
        raise ModelError(f"{path} is no checkpoint of DeMo: it has no tensor {_BACKBONE}*.")
    if layout.lower() not in _SETS:
        raise ModelError(f"The set {layout!r} is not known; choose one of {', '.join(_SETS)}.")
    size, first_camera = _SETS[layout.lower()]
    vit, backbone, strange = _backbone(state, size, path)
    renamed = {renamed_by(_NAMES, name): name for name in state if not name.startswith(_BACKBONE)}
    ours = {place: state[name] for place, name in renamed.items()}
    if "camera_embedding.weight" in ours:
        ours["camera_embedding.weight"] = ours["camera_embedding.weight"].flatten(1)
    direct = "original_neck.classifier.weight" in ours
    neck = ours.get("original_neck.classifier.weight" if direct else "original_neck.necks.0.classifier.weight")
    if neck is None:
        raise ModelError(f"{path} has no classifier, so it does not say how many identities it knows.")
    cameras = len(ours["camera_embedding.weight"]) if "camera_embedding.weight" in ours else 0
    settings: dict[str, Any] = {
        # DeMo holds no training identity out.
        "data": {"layout": layout.lower(), "rerank": [50, 15], "holdout": 0.0},
        "train": {"eval_every": 0},
        "model": {
            "network": "demo",
            "encoder": "DeMo's backbone",
            "pretrained": False,
            "image_size": list(size),
            "camera_embedding": bool(cameras),
            "width": vit.width,
            "global_local": "global_local.0.linear.weight" in ours,
            "direct": direct,
            "fusion": "sdtps",
            "sparse_ratio": sparse_ratio,
            "aggr_ratio": aggr_ratio,
            "missing": "zero",
        },
    }
    given = {**{f"backbones.0.{name}": value for name, value in backbone.items()}, **ours}
    model, config = _fitting(settings, vit, len(neck), max(cameras, 1), given, path)
    wanted = model.state_dict()
    model.load_state_dict({name: given[name] for name in wanted})
    left = [*strange, *(name for place, name in renamed.items() if place not in wanted)]
    numbers = tuple(range(first_camera, first_camera + max(cameras, 1)))
    trained = TrainedReid(model.eval(), config, numbers, Path(path))
    return Converted(trained, len(state) - len(left), tuple(sorted(left)))


def _backbone(
    state: Mapping[str, Tensor], size: tuple[int, int], path: Path | str
) -> tuple[ViT, dict[str, Tensor], list[str]]:
    """An encoder of the file's shape, its tensors under our names, and the file's names that have no place in it."""
    base = {name.removeprefix(_BACKBONE): value for name, value in state.items() if name.startswith(_BACKBONE)}
    openai = "conv1.weight" in base
    # What is beside a plain transformer (adapters, TransReID's camera embedding, a classifier) has names of its own.
    plain = re.compile(
        r"conv1\.|class_embedding$|positional_embedding$|ln_(pre|post)\.|proj$|"
        r"transformer\.resblocks\.\d+\.(ln_[12]|attn\.(in_proj_|out_proj\.)|mlp\.c_(fc|proj)\.)"
        if openai
        else r"patch_embed\.proj\.|cls_token$|pos_embed$|norm\.|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\."
    )
    known = {name: value for name, value in base.items() if plain.match(name)}
    strange = [_BACKBONE + name for name in base if name not in known]
    try:
        patch = int(known["conv1.weight" if openai else "patch_embed.proj.weight"].shape[-1])
        grid = (size[0] // patch, size[1] // patch)
        shape, named = openai_vit(known, grid) if openai else timm_vit(known, grid)
        vit = ViT(shape, size, preprocessing=Preprocessing(*HALF))
        vit.load_state_dict(named)
    except (KeyError, RuntimeError, EncoderUnavailable) as error:
        told = " ".join(str(error).split())
        raise ModelError(f"The backbone of {path} is no plain transformer for images of {size}: {told}") from error
    return vit, named, strange


def _fitting(
    settings: dict[str, Any],
    vit: ViT,
    identities: int,
    cameras: int,
    given: Mapping[str, Tensor],
    path: Path | str,
) -> tuple[DemoReidModel, ReidConfig]:
    """A network that the tensors fill: with the SDTPS branch where they have it as it is here, else without.

    Raises ModelError naming what is missing, or the ratios, where the branch has another size.
    """
    wanted: Sequence[str] = ()
    for fusion in ("sdtps", "concat"):
        config = from_mapping({**settings, "model": {**settings["model"], "fusion": fusion}}, str(path))
        model = DemoReidModel(config.model, SENSORS, identities, cameras, [vit])
        own = model.state_dict()
        wanted = [name for name in own if name not in given]
        if fusion == "sdtps" and any(name.startswith("sdtps") for name in wanted):
            continue
        if not wanted:
            break
    if wanted:
        raise ModelError(f"{path} lacks {len(wanted)} tensors of the network, first {wanted[0]!r}.")
    shapes = [name for name, value in own.items() if value.shape != given[name].shape]
    if shapes:
        name = shapes[0]
        hint = " Give its --sparse-ratio and --aggr-ratio." if "_aggr." in name else ""
        raise ModelError(f"{path} has {name} of {tuple(given[name].shape)}, here it is {tuple(own[name].shape)}.{hint}")
    return model, config
