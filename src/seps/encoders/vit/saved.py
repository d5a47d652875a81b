"""The shape of a `ViT` as JSON, `vit.json`, beside a model that holds the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seps.encoders.vision import Preprocessing
from seps.encoders.weights import EncoderUnavailable
from seps.files import load_json

from .model import ViT, ViTConfig
from .pruning import PruneConfig

VIT_FILE = "vit.json"


def save_vit(encoder: ViT, folder: Path) -> None:
    """Write what `load_vit` needs to build the encoder again, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VIT_FILE).write_text(json.dumps(describe_vit(encoder), indent=1) + "\n", encoding="utf-8")


def describe_vit(encoder: ViT) -> dict[str, Any]:
    """What `build_vit` needs to build the encoder again, without weights, as JSON values."""
    return {
        "vit": encoder.config.to_json(),
        "image_size": list(encoder.image_size),
        "mean": encoder.mean.flatten().tolist(),
        "std": encoder.std.flatten().tolist(),
        "prune": encoder.prune.to_json() if encoder.prune else None,
    }


def load_vit(
    folder: Path, image_size: tuple[int, int] | None, *, prune: PruneConfig | None, drop_path: float = 0.0
) -> ViT:
    """The encoder of `save_vit`, with random weights. Raises EncoderUnavailable for a file that cannot be read."""
    path = folder / VIT_FILE
    try:
        return build_vit(load_json(path), image_size, prune=prune, drop_path=drop_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EncoderUnavailable(f"{path} is not the file of a vision transformer: {error}.") from error


def build_vit(
    stated: Mapping[str, Any],
    image_size: tuple[int, int] | None = None,
    *,
    prune: PruneConfig | None = None,
    drop_path: float = 0.0,
) -> ViT:
    """The encoder of `describe_vit`, with random weights. Raises ValueError, KeyError or TypeError for other values."""
    height, width = image_size or stated["image_size"]
    mean, std = tuple(stated["mean"]), tuple(stated["std"])
    saved = PruneConfig.from_json(stated["prune"]) if stated.get("prune") else None
    return ViT(
        ViTConfig.from_json(stated["vit"]),
        (int(height), int(width)),
        preprocessing=Preprocessing(mean, std),
        prune=prune or saved,
        drop_path=drop_path,
    )
