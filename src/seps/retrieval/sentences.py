"""The two sides of an embedded model: what reads sentences and scores stored images, and its vision encoder.

A search by a sentence needs no more of a model. `sentences.json` beside an embedded model says what its vision encoder
is like, the digests of what makes a picture's state and of what reads texts, and a checksum of this side, by which it
is known to be a part of that model.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from seps.encoders import VisionEncoder
from seps.encoders.vision import HALF, Preprocessing
from seps.hub.folder import read_config
from seps.memory import release_free_memory
from seps.retrieval.deltas import undelta
from seps.retrieval.model import RetrievalModel, make_vision
from seps.retrieval.pretrained import EMBEDDED, embedded_folder, model_config, saved_encoders

FILE = "sentences.json"


class AbsentVision(VisionEncoder):
    """Stands for a vision encoder that was not read: its shape is known, and it encodes nothing."""

    @classmethod
    def of(cls, vision: VisionEncoder) -> AbsentVision:
        """In the place of an encoder that goes."""
        return cls(
            width=vision.width,
            num_prefix_tokens=vision.num_prefix_tokens,
            image_size=vision.image_size,
            stride=vision.stride,
            preprocessing=Preprocessing(*HALF),
        )

    def encode(self, normalised: Tensor) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("This model was read for sentences alone; from_pretrained reads all of it.")


def sentence_side(name: str, device: torch.device | str = "cpu") -> tuple[RetrievalModel, str] | None:
    """An embedded model without its vision encoder, and the `model_hash` that it has with it.

    None for any other model, and where a file or a package is not the one that this release was made with:
    `from_pretrained` then loads it, or says what is wrong.
    """
    if name not in EMBEDDED:
        return None
    folder = embedded_folder(name)
    try:
        stated = json.loads((folder / FILE).read_text(encoding="utf-8"))
        config = read_config(folder)
        with safe_open(folder / config["weights"]["file"], "pt") as file:
            # Of the vision encoder nothing is read.
            names = [name for name in file.keys() if not _bare(name).startswith("vision.")]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
        settings = model_config(config["model"])
        vision = AbsentVision(
            width=int(tensors["project_patches.1.weight"].shape[1]),
            num_prefix_tokens=stated["num_prefix_tokens"],
            image_size=tuple(stated["image_size"]),
            stride=tuple(stated["stride"]),
            preprocessing=Preprocessing(*HALF),
        )
        model = RetrievalModel(settings, vision=vision)
        own = model.state_dict()
        state = undelta(own, tensors)
        if any(value.shape != own[name].shape for name, value in state.items() if name in own):
            return None
        model.load_state_dict(state, assign=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    if checksum(model) != stated["checksum"]:
        return None
    model.stated_text_hash = str(stated["text_hash"])
    release_free_memory()
    return model.to(device).eval(), str(stated["model_hash"])


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
        names = [name for name in file.keys() if _bare(name).startswith("vision.")]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    state = undelta({f"vision.{name}": value for name, value in vision.state_dict().items()}, tensors)
    vision.load_state_dict({name.removeprefix("vision."): value for name, value in state.items()})
    return vision


def _bare(name: str) -> str:
    """The name of the tensor that a packed one belongs to."""
    return name.removeprefix("delta.").removeprefix("int8.").removeprefix("scale.")


def checksum(model: RetrievalModel) -> str:
    """Of all weights and their names but the vision encoder's. CRC-32 of each, several times faster than `model_hash`.

    It tells other weights from these, and is no guard against somebody who makes weights to fit.
    """
    parts = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(tensor.detach().cpu().contiguous().numpy().data)}"
        for name, tensor in sorted(model.state_dict().items())
        if not name.startswith("vision.")
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def stated_text_hash(name: str) -> str:
    """The `text_hash` of an embedded model, without reading its weights; empty for any other."""
    if name not in EMBEDDED:
        return ""
    try:
        return str(json.loads((embedded_folder(name) / FILE).read_text(encoding="utf-8"))["text_hash"])
    except (OSError, ValueError, KeyError):
        return ""


def describe(model: RetrievalModel, digest: str, texts: str) -> dict[str, Any]:
    """What `sentences.json` says of a whole model with the `model_hash` `digest` and the `text_hash` `texts`."""
    vision = model.vision
    return {
        "model_hash": digest,
        "text_hash": texts,
        "checksum": checksum(model),
        "image_size": list(vision.image_size),
        "stride": list(vision.stride),
        "num_prefix_tokens": vision.num_prefix_tokens,
    }
