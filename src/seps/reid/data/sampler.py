"""Identity-balanced batches: P identities x K images, the same global batch on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seps.reid.data.records import ReidDataError

Ints = NDArray[np.int64]


def epoch_plan(labels: Sequence[int], identities: int, images: int, seed: int, epoch: int) -> Ints:
    """Global batches of one epoch: (steps, P * K) record indices, K in a row of each of P different labels.

    The images of a label are shuffled and cut into groups of K; an incomplete group is filled with other
    images of the label, which repeat where it has fewer than K. Every group is dealt once, except that a
    label with more groups than steps is cut to one per step, and that the last seats are filled with labels
    drawn again.
    """
    rng = np.random.default_rng([seed, epoch])
    members = members_of(labels, identities)
    groups = [_groups(member, images, rng) for member in members]
    steps = plan_length(labels, identities, images)
    left = np.array([min(len(group), steps) for group in groups])
    dealt = np.zeros(len(groups), dtype=np.int64)
    plan = np.empty((steps, identities, images), dtype=np.int64)
    for step in range(steps):
        chosen = _choose(left, steps - step, identities, rng)
        for seat, label in enumerate(rng.permutation(chosen)):
            plan[step, seat] = groups[label][dealt[label] % len(groups[label])]
            dealt[label] += 1
        left[chosen] = np.maximum(left[chosen] - 1, 0)
    return plan.reshape(steps, identities * images)


def plan_length(labels: Sequence[int], identities: int, images: int) -> int:
    """Steps of an epoch with P = `identities` and K = `images` per batch; the same number in every epoch.

    The images of each label are cut into groups of K, the last one filled up; a step takes P groups. So it is the
    number of groups divided by P, rounded up.
    """
    _, counts = np.unique(np.asarray(labels), return_counts=True)
    return int(-(-np.sum(-(-counts // images)) // identities))


def members_of(labels: Sequence[int], identities: int) -> list[Ints]:
    """Record indices of each label, labels sorted."""
    values = np.asarray(labels, dtype=np.int64)
    unique = np.unique(values)
    if len(unique) < identities:
        raise ReidDataError(f"a batch of {identities} identities cannot be drawn from {len(unique)}; ask for fewer")
    return [np.flatnonzero(values == label) for label in unique]


def _groups(member: Ints, images: int, rng: np.random.Generator) -> Ints:
    """(groups, K) shuffled indices of one label; the last group is filled with images of the others."""
    shuffled = rng.permutation(member)
    lacking = -len(shuffled) % images
    others = rng.permutation(shuffled[: len(shuffled) - len(shuffled) % images])
    filler = others if len(others) else shuffled
    return np.concatenate([shuffled, np.resize(filler, lacking)]).reshape(-1, images)


def _choose(left: Ints, steps_left: int, identities: int, rng: np.random.Generator) -> Ints:
    """P different labels: those that need every remaining step, then at random by what they have left."""
    due = np.flatnonzero(left == steps_left)
    # An exponential race is a weighted draw without replacement; labels with nothing left come last.
    race = rng.exponential(size=len(left)) / np.maximum(left, 1e-9)
    race[due] = -1.0
    return np.argsort(race, kind="stable")[:identities]


class IdentityBatches:
    """Global batches as a deterministic function of (seed, epoch, step), whatever the number of processes.

    Raises ReidDataError when there are too few identities.
    """

    def __init__(self, labels: Sequence[int], *, identities: int = 16, images: int = 4, seed: int = 0) -> None:
        if identities < 1 or images < 1:
            raise ReidDataError(f"identities and images per batch must be >= 1, not {identities} x {images}")
        members_of(labels, identities)
        self.labels = tuple(labels)
        self.identities, self.images, self.seed = identities, images, seed
        self.steps = plan_length(labels, identities, images)
        self._plan: tuple[int, Ints] | None = None

    def __len__(self) -> int:
        return self.steps

    def plan(self, epoch: int) -> Ints:
        """(steps, P * K) record indices of an epoch."""
        return epoch_plan(self.labels, self.identities, self.images, self.seed, epoch)

    def global_batch(self, epoch: int, step: int) -> list[int]:
        """Record indices of the whole batch, all processes together."""
        if not 0 <= step < self.steps:
            raise ReidDataError(f"step {step} is outside an epoch of {self.steps} steps")
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self.plan(epoch))
        return [int(index) for index in self._plan[1][step]]
