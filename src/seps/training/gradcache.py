"""Cached gradients: a batch too large to encode at once, with every sample still a negative of every other.

    1. encode the chunks one by one without a graph,
    2. take the loss over all features and its gradient at the features,
    3. encode each chunk again, now with a graph, and push the cached gradient through it.

The gradients are those of the whole batch at once; the memory is that of one chunk plus the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seps.training.task import CachedTask, Figures, Task

Autocast = Callable[[], AbstractContextManager[Any]]
Features = tuple[Tensor, ...]


@dataclass(frozen=True)
class Forward:
    """A loss taken, with the way back: `backward()` leaves the gradients on the parameters."""

    loss: Tensor
    metrics: Figures
    backward: Callable[[], None]


def plain_forward(task: Task, batch: Any, epoch: int, autocast: Autocast) -> Forward:
    """The ordinary loss of the batch."""
    with autocast():
        loss, metrics = task.loss(batch, epoch)
    return Forward(loss, metrics, lambda: torch.autograd.backward(loss))


def cached_forward(task: CachedTask, batch: Any, epoch: int, chunk_size: int, autocast: Autocast) -> Forward:
    """The loss of the batch encoded in chunks; `autocast` is entered anew for each pass.

    Torch's random state is the same in both passes, so dropout agrees; python's and numpy's are not kept. A
    module with statistics of the batch (BatchNorm) sees its chunk only, and its buffers change once per step.
    Raises ValueError when the features of the chunks do not fit together.
    """
    chunks = task.split(batch, chunk_size)
    states: list[list[Tensor]] = []
    encoded: list[Features] = []
    devices = sorted({parameter.get_device() for parameter in task.model.parameters() if parameter.is_cuda})
    with torch.no_grad(), _buffers_kept(task.model):
        for chunk in chunks:
            states.append([torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)])
            # Entered for each pass: weights cast without a graph must not serve the second pass.
            with autocast():
                encoded.append(tuple(feature.detach() for feature in task.encode(chunk)))
    for features in encoded:
        for feature in features:
            feature.requires_grad_(feature.is_floating_point())
    with autocast():
        loss, metrics = task.loss_from_features(_join(encoded), batch, epoch)

    def backward() -> None:
        torch.autograd.backward(loss)
        with torch.random.fork_rng(devices=devices):
            for chunk, state, features in zip(chunks, states, encoded, strict=True):
                torch.set_rng_state(state[0])
                for device, value in zip(devices, state[1:], strict=True):
                    torch.cuda.set_rng_state(value, device)
                with autocast():
                    again = task.encode(chunk)
                _push(again, tuple(feature.grad for feature in features))

    return Forward(loss, metrics, backward)


def _join(encoded: list[Features]) -> Features:
    try:
        return tuple(torch.cat(parts) for parts in zip(*encoded, strict=True))
    except (RuntimeError, ValueError) as error:
        kinds = {str([tuple(feature.shape) for feature in features]) for features in encoded}
        shapes = "; ".join(sorted(kinds))
        raise ValueError(
            f"The chunks of a batch have features that cannot be concatenated: {shapes} ({error}). "
            "Split a batch that is already padded, so that all chunks have the same widths."
        ) from error


def _push(features: Features, gradients: tuple[Tensor | None, ...]) -> None:
    pairs = [
        (feature, gradient)
        for feature, gradient in zip(features, gradients, strict=True)
        if gradient is not None and feature.requires_grad
    ]
    if pairs:
        torch.autograd.backward([feature for feature, _ in pairs], [gradient for _, gradient in pairs])


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what the first pass does to running statistics, which the second pass does again."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
