"""The files of an encoder beside a model that holds its weights: configuration, preprocessing and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from .bert import Bert
from .text import TextEncoder
from .vision import TransformersVision, VisionEncoder
from .vit import ViT, save_vit
from .weights import quiet


def has_vision_files(encoder: VisionEncoder) -> bool:
    """Whether `save_vision_files` writes anything."""
    return isinstance(getattr(encoder, "inner", encoder), (TransformersVision, ViT))


def has_text_files(encoder: TextEncoder) -> bool:
    """Whether `save_text_files` writes anything: an encoder of the caller's own has no files."""
    return type(encoder) is TextEncoder


def save_vision_files(encoder: VisionEncoder, folder: Path) -> bool:
    """Write what `vision_encoder(folder, pretrained=False)` needs; False for an encoder that needs no files."""
    inner = getattr(encoder, "inner", encoder)
    if isinstance(inner, ViT):
        save_vit(inner, folder)
        return True
    if not isinstance(inner, TransformersVision):
        return False
    _save_config(inner.model, folder)
    height, width = inner.image_size
    stated = {
        "image_mean": inner.mean.flatten().tolist(),
        "image_std": inner.std.flatten().tolist(),
        "size": {"height": height, "width": width},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
    return True


def save_text_files(encoder: TextEncoder, folder: Path) -> bool:
    """Write what `text_encoder(folder, pretrained=False)` needs; False for an encoder of the caller's own."""
    if not has_text_files(encoder):
        return False
    if isinstance(encoder.model, Bert):
        encoder.model.config.save(folder)
    else:
        _save_config(encoder.model, folder)
    encoder.tokenizer.save_pretrained(str(folder))
    return True


def _save_config(model: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = model.config
    with quiet():
        config.save_pretrained(str(folder))
    path = folder / "config.json"
    # A tower of a two-tower model carries no name of its own, and is rebuilt by it.
    values = {**json.loads(path.read_text(encoding="utf-8")), "architectures": [type(model).__name__]}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
