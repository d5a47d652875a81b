"""Which images and which of their texts meet in which training step: pure functions of seed, epoch and step.

The query is never part of the description it is trained against.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seps.images.sources import DataError

from .records import ImageRecord

_SENTENCE = re.compile(r"[^.!?]+[.!?]*")
MOST_IN_DESCRIPTION = 4


class BatchIndices(NamedTuple):
    """One step: image indices and, for each, the index of one of its captions. Both (batch,)."""

    images: Tensor
    captions: Tensor


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed from several non-negative numbers (run seed, epoch, step): near inputs, far seeds."""
    if min(parts) < 0:
        raise DataError(f"Seeds, epochs and steps must not be negative, got {parts}.")
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def epoch_batches(
    n_images: int, captions_per_image: int | Sequence[int], batch_size: int, seed: int, epoch: int
) -> list[BatchIndices]:
    """All batches of an epoch, of all ranks together, the same on every machine for the same arguments.

    An epoch visits every image at most once, so no batch holds an image twice; images left over after the
    last whole batch wait for another epoch. Each image starts at a caption drawn with `seed` and goes on to
    the next every epoch: as many epochs as it has captions show each of them once.
    Raises DataError for sizes that do not fit.
    """
    counts = _counts(n_images, captions_per_image)
    if batch_size < 1 or batch_size > n_images:
        raise DataError(
            f"A batch of {batch_size} cannot be filled from {n_images} images, each at most once. "
            f"Choose a batch size from 1 to {n_images}."
        )
    first = torch.rand(n_images, dtype=torch.float64, generator=_generator(seed))
    caption = ((first * counts).long() + epoch) % counts
    order = torch.randperm(n_images, generator=_generator(seed, epoch))
    starts = range(0, n_images - batch_size + 1, batch_size)
    parts = [order[start : start + batch_size] for start in starts]
    return [BatchIndices(images, caption[images]) for images in parts]


def _counts(n_images: int, captions_per_image: int | Sequence[int]) -> Tensor:
    if isinstance(captions_per_image, int):
        counts = torch.full((n_images,), captions_per_image, dtype=torch.int64)
    else:
        counts = torch.tensor(list(captions_per_image), dtype=torch.int64)
    if len(counts) != n_images:
        raise DataError(f"There are {n_images} images but caption counts for {len(counts)}.")
    if n_images and int(counts.min()) < 1:
        raise DataError(
            f"Image {int(counts.argmin())} has no caption to train with. Take such images out with drop_bad."
        )
    return counts


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed_seed(*parts))


def sentences(text: str) -> list[str]:
    """The sentences of a text, without blank ones."""
    return [part.strip() for part in _SENTENCE.findall(text) if any(letter.isalnum() for letter in part)]


def own_texts(record: ImageRecord, caption: int) -> tuple[str, str | None]:
    """Caption `caption` of the image, and the image's own description."""
    return record.captions[caption % len(record.captions)], record.dense


def mixed_texts(record: ImageRecord, generator: torch.Generator) -> tuple[str, str | None]:
    """Any human sentence about the image as the query, a few of the others as its description.

    For data whose descriptions are made of further captions (Flickr8k's are): all of them train the pixels, and the
    description varies in length and content from step to step.
    """
    pool = [*record.captions, *(sentences(record.dense) if record.dense else [])]
    order = torch.randperm(len(pool), generator=generator).tolist()
    query, rest = pool[order[0]], [pool[i] for i in order[1:] if pool[i] != pool[order[0]]]
    if not rest:
        return query, None
    count = int(torch.randint(1, min(len(rest), MOST_IN_DESCRIPTION) + 1, (1,), generator=generator))
    return query, " ".join(rest[:count])
