"""What is known of an image before any caption comes, as a plain object: slice, join, move, save and load.

The object is `seps.nn.ImageSide`; an index stores it, and scoring starts from it without the image encoder.

Shapes: B images, P prefix tokens, N patches, L description words, C width, Q merged patches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from seps.nn.checks import InputError
from seps.nn.slimming import ImageSide

_FORMAT = "seps-image-state-1"


def map_state(side: ImageSide, change: Callable[[Tensor], Tensor]) -> ImageSide:
    """Apply `change` to every tensor of the state."""
    return _unflatten({name: change(tensor) for name, tensor in _flatten(side).items()})


def count_images(side: ImageSide) -> int:
    """B, the number of images in the state."""
    return side.patches.shape[0]


def take_images(side: ImageSide, chosen: slice | Tensor) -> ImageSide:
    """The chosen images, by slice (views) or by index tensor (copies)."""
    return map_state(side, lambda tensor: tensor[chosen])


def split_state(side: ImageSide, size: int) -> list[ImageSide]:
    """Parts of `size` images, in order. `split` hands gradients back in one piece, slices one padded copy each."""
    columns = {name: torch.split(tensor, size) for name, tensor in _flatten(side).items()}
    count = len(columns["patches"])
    return [_unflatten({name: pieces[i] for name, pieces in columns.items()}) for i in range(count)]


def move_state(
    side: ImageSide, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> ImageSide:
    """The state on another device, its features in another dtype; the selection's scores stay float32."""

    def move(tensor: Tensor, wanted: torch.dtype | None) -> Tensor:
        return tensor.to(device=device, dtype=wanted if tensor.is_floating_point() else None)

    moved = map_state(side, lambda tensor: move(tensor, dtype))
    moved.fixed_scores = {name: move(scores, torch.float32) for name, scores in side.fixed_scores.items()}
    return moved


def state_nbytes(side: ImageSide) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flatten(side).values())


def join_states(sides: Sequence[ImageSide]) -> ImageSide:
    """One state of all the images, in order; descriptions are padded to the longest.

    States with and without descriptions may be joined: an image without one scores as before.

    Raises `InputError` when the states come from networks of different settings.
    """
    if not sides:
        raise InputError("join_states needs at least one state, but the list is empty.")
    first = max(sides, key=lambda side: len(side.logits))
    for side in sides:
        # Without any description a second branch was left out; the caption's is always there.
        same = side.logits.keys() <= first.logits.keys() and side.patches.shape[1:] == first.patches.shape[1:]
        if not same or side.prefix.shape[1:] != first.prefix.shape[1:]:
            raise InputError(
                f"The states do not belong together: patches {tuple(first.patches.shape[1:])} with branches "
                f"{sorted(first.logits)} against {tuple(side.patches.shape[1:])} with {sorted(side.logits)}; "
                "make all of them with one network."
            )
    valid = None
    if any(side.valid is not None for side in sides):
        valid = torch.cat(
            [
                torch.ones(side.patches.shape[:2], dtype=torch.bool, device=side.patches.device)
                if side.valid is None
                else side.valid
                for side in sides
            ]
        )
    dense_words, dense_mask = _join_descriptions(sides)
    return ImageSide(
        prefix=torch.cat([side.prefix for side in sides]),
        patches=torch.cat([side.patches for side in sides]),
        valid=valid,
        fixed_scores={
            name: torch.cat([_branch_part(side.fixed_scores, name) for side in sides]) for name in first.fixed_scores
        },
        full_score=torch.cat([side.full_score for side in sides]),
        logits={name: torch.cat([_branch_part(side.logits, name) for side in sides]) for name in first.logits},
        pooled=torch.cat([side.pooled for side in sides]),
        dense_words=dense_words,
        dense_mask=dense_mask,
    )


def _branch_part(by_branch: dict[str, Tensor], name: str) -> Tensor:
    """A branch's tensor; zeros where the branch was left out, whose part of the score is not used."""
    found = by_branch.get(name)
    return torch.zeros_like(by_branch["caption"]) if found is None else found


def _join_descriptions(sides: Sequence[ImageSide]) -> tuple[Tensor | None, Tensor | None]:
    """(B, L, C) words and (B, L) mask of all images; None where no state has them."""
    has_words = any(side.dense_words is not None for side in sides)
    partly = any("dense" in side.logits for side in sides) and any("dense" not in side.logits for side in sides)
    if not (has_words or partly or any(side.dense_mask is not None for side in sides)):
        return None, None
    longest = max((side.dense_mask.shape[1] for side in sides if side.dense_mask is not None), default=1)
    words, masks = [], []
    for side in sides:
        count, mask = count_images(side), side.dense_mask
        if mask is None:
            # A state saved with a second branch before the mask was kept: all its images are described.
            old = "dense" in side.logits and not has_words
            mask = torch.full((count, 1), old, dtype=torch.bool, device=side.patches.device)
        masks.append(F.pad(mask, (0, longest - mask.shape[1])))
        if side.dense_words is None:
            words.append(side.patches.new_zeros(count, longest, side.patches.shape[-1]).float())
        else:
            words.append(F.pad(side.dense_words, (0, 0, 0, longest - side.dense_words.shape[1])))
    return torch.cat(words) if has_words else None, torch.cat(masks)


def _flatten(side: ImageSide) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        "prefix": side.prefix,
        "patches": side.patches,
        "valid": side.valid,
        "full_score": side.full_score,
        "pooled": side.pooled,
        "dense_words": side.dense_words,
        "dense_mask": side.dense_mask,
        **{f"fixed_scores.{name}": scores for name, scores in side.fixed_scores.items()},
        **{f"logits.{name}": logits for name, logits in side.logits.items()},
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _unflatten(tensors: dict[str, Tensor]) -> ImageSide:
    return ImageSide(
        prefix=tensors["prefix"],
        patches=tensors["patches"],
        valid=tensors.get("valid"),
        fixed_scores={name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith("fixed_scores.")},
        full_score=tensors["full_score"],
        logits={name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith("logits.")},
        pooled=tensors["pooled"],
        dense_words=tensors.get("dense_words"),
        dense_mask=tensors.get("dense_mask"),
    )


def save_state(side: ImageSide, path: str | Path, note: dict[str, str] | None = None) -> None:
    """Write the state as safetensors, with `note` (plain text by name) in the file's head."""
    head = {"format": _FORMAT, "note": json.dumps(note or {})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _flatten(side).items()}
    save_file(tensors, str(path), metadata=head)


def load_state(path: str | Path, device: torch.device | str = "cpu") -> tuple[ImageSide, dict[str, str]]:
    """Read what `save_state` wrote: the state and its note.

    Raises `InputError` for a file that is no such state, `FileNotFoundError` for one that is not there.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            head = file.metadata() or {}
            if head.get("format") != _FORMAT:
                raise InputError(
                    f"{path} is a safetensors file, but not a state written by save_state "
                    f"(format {head.get('format')!r}, expected {_FORMAT!r}); encode the images again."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}); encode the images again.") from error
    note: dict[str, str] = json.loads(head["note"])
    return _unflatten(tensors), note
