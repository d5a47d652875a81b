"""Checks of arguments: each failure is a sentence that names the argument, what came and the remedy.

Shapes: R rows (texts), L positions in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn


class InputError(ValueError):
    """An argument that cannot be used; the message names it, what came and what to do."""


_looking: ContextVar[bool] = ContextVar("looking", default=True)


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Within it shapes are checked, but no values: reading a value makes the caller wait for the GPU.

    For callers that check the result anyway, as a training loop checks its loss.
    """
    token = _looking.set(False)
    try:
        yield
    finally:
        _looking.reset(token)


def unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict without the `module.` that `DataParallel` and its kin put before every name."""
    if not all(name.startswith("module.") for name in state):
        return state
    return {name[len("module.") :]: value for name, value in state.items()}


is_compiling: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", bool)
"""Whether a compiler or an exporter traces the call; torch before 2.1 cannot, and `bool()` is False."""


def check_shape(
    name: str, value: object, dims: str, shape: Sequence[int | None], dtype: torch.dtype | None = None, remedy: str = ""
) -> None:
    """Raise `InputError` unless `value` is a tensor of that shape, whose axes `dims` names, and of that dtype.

    None is any size, or any dtype. The error ends with the `remedy`.
    """
    came = type(value).__name__
    if isinstance(value, Tensor):
        same = len(shape) == value.dim() and all(map(lambda wanted, size: wanted in (None, size), shape, value.shape))
        if same and dtype in (None, value.dtype):
            return
        came = f"{value.dtype} of shape {tuple(value.shape)}"
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    kind = "a tensor" if dtype is None else f"a tensor of {dtype} and"
    raise InputError(f"{name} must be {kind} of shape ({dims}) = ({wanted}), but got {came}.{remedy}")


def check_features(name: str, tensor: Tensor, dims: str, width: int | None = None, *, values: bool = True) -> None:
    """Check that `tensor` is a finite float tensor with the axes named in `dims`, e.g. "images, patches, width".

    Raises `InputError` otherwise. With `values=False` the values may be anything.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a tensor of shape ({dims}), but got a {type(tensor).__name__}.")
    expected = dims.count(",") + 1
    shape = tuple(tensor.shape)
    if len(shape) != expected:
        raise InputError(f"{name} must have {expected} axes ({dims}), but its shape is {shape}.")
    if 0 in shape[1:]:
        raise InputError(f"{name} must not be empty along any axis of ({dims}), but its shape is {shape}.")
    if width is not None and shape[-1] != width:
        raise InputError(
            f"{name} must be {width} wide (the network's embed_size), but its shape is {shape}; "
            "project it to that width first."
        )
    if not tensor.is_floating_point():
        raise InputError(f"{name} must hold floating point features, but its dtype is {tensor.dtype}.")
    if not (values and tensor.numel() and not is_compiling() and _looking.get()):
        return
    # Without NaN and infinite values minimum and maximum are finite (one pass, one transfer).
    if not all(map(math.isfinite, torch.stack(torch.aminmax(tensor.detach())).tolist())):
        raise InputError(f"{name} holds NaN or infinite values; check the encoder that made it.")


def length_mask(
    name: str, lengths: Tensor | Sequence[int] | None, tensor: Tensor, *, allow_empty: bool = False
) -> Tensor:
    """Turn `lengths` (one per row of `tensor`, (rows, longest, width)) into a boolean mask (rows, longest).

    None means that every position is valid. Raises `InputError` for a wrong count, a zero length (unless
    `allow_empty`) or one beyond the tensor.
    """
    rows, longest = tensor.shape[0], tensor.shape[1]
    if lengths is None:
        return torch.ones(rows, longest, dtype=torch.bool, device=tensor.device)  # (R, L)
    try:
        values = torch.as_tensor(lengths)  # (R,)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must hold {rows} whole numbers, one per text, but got {lengths!r}.") from error
    check_lengths(name, values, rows, longest, allow_empty=allow_empty)
    return torch.arange(longest, device=tensor.device)[None, :] < values.to(tensor.device)[:, None]  # (R, L)


def check_lengths(name: str, values: Tensor, rows: int, longest: int, *, allow_empty: bool = False) -> None:
    """Raise `InputError` unless `values` are `rows` whole numbers of at least 1 (0 with `allow_empty`) to `longest`."""
    if values.is_floating_point() or values.dtype == torch.bool:
        raise InputError(f"{name} must hold whole numbers, but its dtype is {values.dtype}.")
    if values.dim() != 1 or values.shape[0] != rows:
        raise InputError(f"{name} must hold {rows} lengths, one per text, but its shape is {tuple(values.shape)}.")
    if rows and not is_compiling() and _looking.get():
        least, most = int(values.min()), int(values.max())
        if least < (0 if allow_empty else 1):
            raise InputError(f"{name} holds the length {least}; every text needs at least one word.")
        if most > longest:
            raise InputError(f"{name} holds the length {most}, but the tensor has only {longest} positions.")


def check_rows_hold_one(name: str, mask: Tensor) -> None:
    """Raise `InputError` where a row of the bool tensor `mask` (rows, positions) is False throughout."""
    if mask.numel() and not is_compiling() and _looking.get() and not bool(mask.any(dim=-1).all()):
        row = int((~mask.any(dim=-1)).nonzero()[0, 0])
        raise InputError(f"{name} leaves row {row} without any valid position; every image needs at least one.")


def check_attentions(tokens: Tensor, own: Tensor, caption: Tensor, dense: Tensor | None) -> None:
    """Raise `InputError` unless the attentions are (B, N), as the patches (B, N, C) are."""
    check_shape("attention_x", own, "images, patches", tokens.shape[:2])
    check_shape("attention_y", caption, "images, patches", tokens.shape[:2])
    if dense is not None:
        check_shape("attention_y_dense", dense, "images, patches", tokens.shape[:2])


def check_patch_mask(mask: Tensor, patches: Tensor) -> None:
    """Raise `InputError` unless `mask` is bool, (B, N) as the patches (B, N, C) are, with a patch in each row."""
    check_shape("patch_mask", mask, "images, patches", patches.shape[:2], torch.bool)
    check_rows_hold_one("patch_mask", mask)


def check_patch_count(name: str, tensor: Tensor, prefix: int, wanted: int, remedy: str) -> None:
    """Raise `InputError` unless the tokens (B, P + N, C) are `prefix` prefix tokens and `wanted` patches."""
    tokens = tensor.shape[1]
    if tokens == prefix + wanted:
        return
    expected = f"{wanted} patches" + (f" behind {prefix} prefix token" + "s" * (prefix > 1) if prefix else "")
    hint = {1: " Is a CLS token left in? Then cut it off.", -prefix: " Is the CLS token missing?"}
    raise InputError(
        f"{name} must hold {expected} (num_patches={wanted}), but its shape is {tuple(tensor.shape)}."
        f"{hint.get(tokens - prefix - wanted, '')} {remedy} For images of several sizes pass check_num_patches=False."
    )


def check_one_each(dense: Tensor, batch: int) -> None:
    """Raise `InputError` unless there is one description per image."""
    if dense.shape[0] != batch:
        raise InputError(
            f"dense holds {dense.shape[0]} descriptions for {batch} images; it belongs to the images, one each "
            "(length 0 for an image without one)."
        )


def check_pairing(captions: Tensor, dense: Tensor | None, name: str = "long_cap_embs") -> None:
    """Raise `InputError` unless there is one dense text (T, L, C) for each caption (T, M, C), or none at all."""
    if dense is None:
        return
    check_features(name, dense, "texts, words, width", captions.shape[-1])
    if dense.shape[0] != captions.shape[0] or not len(captions):
        raise InputError(
            f"{name} holds {dense.shape[0]} texts for {captions.shape[0]} captions; the published pairing needs "
            "one each, and one caption or more."
        )


def check_token_count(num_tokens: int, num_patches: int) -> None:
    """Raise `InputError` unless the tokens are N patches, or CLS and N patches."""
    if num_tokens not in (num_patches, num_patches + 1):
        raise InputError(
            f"{num_tokens} tokens came for num_patches={num_patches}, and has_cls was not given: {num_patches} tokens "
            f"are patches alone, {num_patches + 1} are CLS and patches. Pass has_cls, or the right num_patches."
        )


def read_options(opt: Any) -> tuple[int, int, float, float]:
    """embed_size, num_patches, sparse_ratio and aggr_ratio of the published options (a namespace or a mapping)."""
    values = []
    for name in ("embed_size", "num_patches", "sparse_ratio", "aggr_ratio"):
        value = opt.get(name) if isinstance(opt, Mapping) else getattr(opt, name, None)
        if value is None:
            raise InputError(
                f"the options have no {name}; give embed_size, num_patches, sparse_ratio and aggr_ratio, as the "
                "published opt has them, or call CrossSparseAggrNet(embed_size=..., ...)."
            )
        values.append(value)
    return int(values[0]), int(values[1]), float(values[2]), float(values[3])


def check_ratio(name: str, value: float) -> None:
    """Raise `InputError` unless `value` lies in (0, 1]."""
    if not 0 < value <= 1:
        raise InputError(f"{name} must lie in (0, 1], but {value!r} came.")


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Within it the network and all its parts are in evaluation mode; each part then returns to its mode."""
    training = []
    for module in net.modules():
        if module.training:
            training.append(module)
            module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
