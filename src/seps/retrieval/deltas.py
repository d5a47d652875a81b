"""Tensors of a model folder of the form "delta": differences from pretrained ones, or whole, in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seps.hub.tensor_names import renamed

ENCODERS = ("vision.", "text.")
"""Beginnings of the names of the encoders' tensors."""


def pack_delta(trained: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit difference and its scale per row: trained ~ base + scale * q."""
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
