"""Read a checkpoint of the published code (`model_best.pth`) safely, and make it a model of ours.

The file is a pickle of a dict with `model` (a state dict) and `opt` (an argparse Namespace). It is read with torch's
restricted unpickler, which builds tensors, plain containers and that Namespace, and refuses anything else.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.encoders import text_encoder, vision_encoder
from seps.hub.folder import ModelError
from seps.hub.tensor_names import fitted, transformers_version
from seps.retrieval.config import ModelConfig
from seps.retrieval.model import RetrievalModel

PREFIXES = {
    "img_enc.visual_encoder.": "vision.model.",
    "img_enc.vision_proj.": "project_patches.1.",
    "txt_enc.bert.": "text.model.",
    "txt_enc.fc.": "project_words.",
    "cross_net.": "head.net.",
}
"""Where each part of the published model is in ours."""
_IGNORED = ("pooler.", "embeddings.position_ids", "criterion.", "embeddings.mask_token")


def read_published(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the options of a published checkpoint. Raises `ModelError` for anything else."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"There is no file {path}.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message is a page long and advises the unsafe reader
        raise ModelError(
            f"{path} was not read: it is no checkpoint, it is damaged, or it holds objects that a safe reader does not "
            f"build ({type(error).__name__})."
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ModelError(f"{path} is no checkpoint of the published code: it has no 'model' with weights.")
    options = content.get("opt")
    values = vars(options) if isinstance(options, argparse.Namespace) else dict(options or {})
    weights = {name.removeprefix("module."): value for name, value in content["model"].items()}
    return weights, values


def rename(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published names to ours; raises `ModelError` for a name that has no place."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, value in weights.items():
        if any(part in name for part in _IGNORED):
            continue
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            unknown.append(name)
        else:
            renamed[PREFIXES[prefix] + name.removeprefix(prefix)] = value
    if unknown:
        raise ModelError(
            f"The checkpoint has weights of unknown parts: {', '.join(unknown[:5])} ({len(unknown)} in all)."
        )
    return renamed


def encoder_names(options: Mapping[str, Any]) -> tuple[str, str]:
    """The presets of the encoders that the published options name."""
    kind = "swin" if "swin" in str(options.get("vit_type", "vit")) else "vit"
    size = 384 if int(options.get("img_res", 224)) == 384 or "384" in str(options.get("vit_type", "")) else 224
    return f"{kind}-b-{size}", "bert-base"


def convert_published(path: Path | str, *, vision: str | None = None, text: str | None = None) -> RetrievalModel:
    """Our model with the weights of a published checkpoint.

    `vision` and `text` name the encoders (presets, hub ids or folders) where the file's own options do not fit.
    """
    weights, options = read_published(path)
    state = rename(weights)
    names = encoder_names(options)
    vision_name, text_name = vision or names[0], text or names[1]
    width = state["head.net.aggr_net.weight.0.weight"].shape[0] if "head.net.aggr_net.weight.0.weight" in state else 512
    encoder = vision_encoder(vision_name, pretrained=False)
    config = ModelConfig(
        vision=vision_name,
        text=text_name,
        embed_size=width,
        preset="open_source",
        slimming={
            "sparse_ratio": float(options.get("sparse_ratio", 0.5)),
            "aggr_ratio": float(options.get("aggr_ratio", 0.4)),
        },
    )
    model = RetrievalModel(config, encoder, text_encoder(text_name, pretrained=False))
    for name, module_width in (("project_patches.1", encoder.width), ("project_words", model.text.width)):
        if f"{name}.weight" not in state and module_width == width:
            # The published model leaves the projection out where the widths agree.
            state[f"{name}.weight"], state[f"{name}.bias"] = torch.eye(width), torch.zeros(width)
    try:
        # The published code ran on transformers 4, which named the tensors of ViT and Swin otherwise.
        model.load_state_dict(fitted(state, model.state_dict()), strict=True)
    except RuntimeError as error:
        raise ModelError(
            f"{path} does not fit {vision_name} and {text_name} of transformers {transformers_version()}: "
            f"{' '.join(str(error).split())} Name the encoders it was trained with."
        ) from error
    return model.eval()
