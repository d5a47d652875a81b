"""The models that come with the package: names, what a release states of them, packed tensors, and the sentence side.

A search by a sentence does not need the vision encoder. `sentences.json` beside an embedded model says what that is
like, the digests of what makes a picture's state and of what reads texts, and a checksum of the side without it.

Names and facts need no torch; what makes tensors imports it when it is called.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seps.memory import release_free_memory
from seps.retrieval.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seps.retrieval.model import RetrievalModel

MINI, BASE = "mini", "base"
EMBEDDED = (MINI, BASE)
"""Models that come with the package."""
FILE = "sentences.json"
"""What a release states of an embedded model, so that it need not be computed."""


NEAR_DUPLICATE_COSINES = {"a30eb0ef8f39c1f714ded1a39c12332a": 0.9, "d61f73ed9a87c68a9dd3ac5a93acbf44": 0.9}
"""By digest of the weights that make pictures' states: the least cosine of nearly equal pictures, measured
(docs/formats-and-duplicates.md). These are `mini` and `base`."""
UNMEASURED_COSINE = 0.95
"""The same for other models, whose vectors of different photos may be closer."""


def embedded_folder(name: str = MINI) -> Path:
    """Where an embedded model is."""
    return Path(str(files("seps"))) / "assets" / name


def stated_facts(name: str) -> dict[str, Any]:
    """What the release states of an embedded model. Raises OSError or ValueError where it cannot be read."""
    values: dict[str, Any] = json.loads((embedded_folder(name) / FILE).read_text(encoding="utf-8"))
    return values


def stated_text_hash(name: str) -> str:
    """The `text_hash` of an embedded model, without reading its weights; empty for any other."""
    if name not in EMBEDDED:
        return ""
    try:
        return str(stated_facts(name)["text_hash"])
    except (OSError, ValueError, KeyError):
        return ""


def near_duplicate_cosine(model_hash: str) -> float:
    """The least cosine of the vectors of two nearly equal pictures, by the model with this digest."""
    return NEAR_DUPLICATE_COSINES.get(model_hash, UNMEASURED_COSINE)


def sentence_side(name: str, device: torch.device | str = "cpu") -> tuple[RetrievalModel, str] | None:
    """An embedded model without its vision encoder, and the `model_hash` that it has with it.

    None for any other model, and where a file or a package is not the one that this release was made with:
    `from_pretrained` then loads it, or says what is wrong.
    """
    if name not in EMBEDDED:
        return None
    from safetensors import safe_open

    from seps.encoders.vision import HALF, Preprocessing
    from seps.hub.folder import read_config
    from seps.retrieval.model import AbsentVision, RetrievalModel

    folder = embedded_folder(name)
    try:
        stated = stated_facts(name)
        config = read_config(folder)
        with safe_open(folder / config["weights"]["file"], "pt") as file:
            # Of the vision encoder nothing is read.
            names = [name for name in file.keys() if not bare_name(name).startswith("vision.")]  # noqa: SIM118
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


def bare_name(name: str) -> str:
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


ENCODERS = ("vision.", "text.")
"""Beginnings of the names of the encoders' tensors."""


def pack_delta(trained: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit difference and its scale per row: trained ~ base + scale * q."""
    import torch

    difference = (trained.float() - base.float()).flatten(1) if trained.dim() > 1 else trained.float() - base.float()
    if trained.dim() < 2:
        return difference.half(), torch.ones(())
    scale = difference.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(difference / scale).to(torch.int8).view(trained.shape), scale.squeeze(1)


def unpack_delta(packed: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """The tensor that `pack_delta` packed."""
    if packed.dim() < 2:
        return (base.float() + packed.float()).to(base.dtype)
    shape = (-1, *[1] * (packed.dim() - 1))
    # In place: memory that is new to the process costs more than the sums.
    return packed.float().mul_(scale.float().view(shape)).add_(base.float()).to(base.dtype)


def has_rows(tensor: Tensor) -> bool:
    """Whether a scale per row makes sense: not for a vector, nor for one long row such as the positions."""
    return tensor.dim() > 1 and tensor.shape[0] > 1


def undelta(base: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that "delta" tensors make of `base`, a new model with pretrained encoders, whose memory it may share.

    An encoder's tensor that is not among them is the pretrained one; any other that is not is left out, and so missed.
    """
    import torch

    from seps.hub.tensor_names import renamed

    state = {name: tensor for name, tensor in base.items() if name.startswith(ENCODERS)}
    bare = {
        name: name.removeprefix("delta.").removeprefix("int8.") for name in tensors if not name.startswith("scale.")
    }
    places = renamed(bare.values(), base)
    for name, stem in bare.items():
        place = places[stem]
        if place not in base or tensors[name].shape != base[place].shape:
            state[place] = tensors[name]  # never broadcast: what loads the state names it
        elif name != stem:
            scale = tensors.get(f"scale.{stem}", torch.ones(()))
            if name.startswith("int8.") and tensors[name].dim() > 1:
                # In the model's own memory: a second copy of an encoder would be the most that loading takes.
                whole = scale.float().view(-1, *[1] * (tensors[name].dim() - 1))
                state[place] = base[place].copy_(tensors[name]).mul_(whole)
            else:
                start = torch.zeros((), dtype=base[place].dtype) if name.startswith("int8.") else base[place]
                state[place] = unpack_delta(tensors[name], scale, start)
        else:
            state[place] = tensors[name].to(base[place].dtype)
    return state


def model_config(values: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` from JSON; unknown fields are refused by name."""
    from seps.hub.folder import ModelError

    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ModelError(f"The model's configuration has fields this release does not know: {', '.join(unknown)}.")
    return ModelConfig(**values)
