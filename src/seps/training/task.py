"""What an application gives the loop: its model, its batches, its loss and its score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

ParameterGroup = dict[str, Any]
Figures = Mapping[str, "float | Tensor"]
"""Numbers, or tensors of one value, which the loop reads all at once: each look makes a GPU wait."""


class Task(Protocol):
    """The part every application implements.

    Optional, found by name:
        labels -> {name: text} to put into every line of metrics.jsonl and into best.json and last.json, such as the
            protocol of the evaluation.
        parameter_groups(lr, backbone_scale) -> list of {"params": [...], "lr": ...}, such as
            optim.backbone_groups makes. Without it every parameter of the model gets `lr`.
        begin_epoch(epoch) -> None, called before the first step of an epoch that this process runs (also when
            it resumes in the middle): the place to freeze and unfreeze.
        begins_trained -> bool, whether the weights are evaluated before the first step: they may stay the best.
    """

    @property
    def model(self) -> nn.Module:
        """Everything that learns and is saved, learned temperatures included."""
        ...

    def steps_per_epoch(self, world: int) -> int:
        """Optimiser steps in an epoch; must not depend on `world` if a run may continue on other machines."""
        ...

    def batch(self, epoch: int, step: int, rank: int, world: int) -> Any:
        """The slice that `rank` of `world` has of the global batch `step` (from 0) of `epoch` (from 0).

        A function of its arguments and of the task's own seed alone: it runs ahead in a background thread (in
        several when `workers` > 1), so it must draw from a generator of its own (seeding.derive_seed), never
        from torch's, numpy's or python's global one. Tensors in tuples, lists, dicts and dataclasses are
        moved to the device by the loop.
        """
        ...

    def loss(self, batch: Any, epoch: int) -> tuple[Tensor, Figures]:
        """The scalar loss of this rank's rows, and figures to log (same names on every rank).

        With several processes: the mean over this rank's own rows, scored against features gathered from all
        ranks (distributed.py says why that gives the gradient of the global mean).
        """
        ...

    def evaluate(self) -> dict[str, float]:
        """Figures on the dev set, among them "score", higher is better; none without a dev set: the last weights count.

        Called on every rank, with the model in eval mode, without gradients, and on the averaged weights when
        ema_decay is set; it may use collectives to share the work. What rank 0 returns counts.
        """
        ...


@runtime_checkable
class CachedTask(Protocol):
    """What a `Task` needs beside its own methods where `train.chunk_size` is set.

    A batch is then encoded in chunks, so that it takes the memory of one chunk alone, with the gradients of the whole
    batch (`seps.training.gradcache`).
    """

    @property
    def model(self) -> nn.Module: ...

    def split(self, batch: Any, chunk_size: int) -> list[Any]:
        """The batch in chunks of at most `chunk_size` samples, in order, padded alike."""
        ...

    def encode(self, chunk: Any) -> tuple[Tensor, ...]:
        """Features of a chunk, samples first; tensors that are not floating point (masks) just pass along."""
        ...

    def loss_from_features(self, features: tuple[Tensor, ...], batch: Any, epoch: int) -> tuple[Tensor, Figures]:
        """`loss`, from the features of all chunks concatenated along the samples."""
        ...
