"""The images of a data set as features, each decoded once; threads decode ahead of the encoder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from seps.images.shards import UnreadableImage
from seps.retrieval.data import CheckReport, DataFault, RetrievalDataset, check_dataset
from seps.retrieval.data.guides import dataset_guides
from seps.retrieval.data.streams import PictureStream, Pixels, in_batches
from seps.retrieval.engine.engine import Engine, Progress
from seps.retrieval.engine.loading import engine_of, exactly_faster

MANY = 100
"""Images for which a faster form of the encoder is made: that takes a second or two."""
StageProgress = Progress
"""Called with what is encoded, how many are done, and of how many."""


@torch.no_grad()
def encode_images(
    model: object,
    dataset: RetrievalDataset,
    *,
    pixels: Pixels | None = None,
    batch_size: int | None = None,
    progress: StageProgress | None = None,
) -> Tensor:
    """What a model or an engine makes of all images: tokens (B, P + N, C), or vectors (B, C) of a dual encoder.

    Photos are decoded in threads. `pixels` (B, 3, H, W) uint8 are images decoded before, by
    `decode_all(dataset, model.image_size)`, or a stream of that size. Raises ValueError for pixels of another size: to
    resize them here would be a second way to make them. Raises UnreadableImage.
    """
    engine = _encoder(model, len(dataset))
    size = batch_size or _at_once(engine)
    if pixels is None:
        with PictureStream(dataset.sources, engine.traits.image_size, engine.decoding) as stream:
            return _encoded(engine, _batches(stream.pictures(), size), len(dataset), progress)
    height, width = engine.traits.image_size
    if pixels.shape[-2:] != (height, width):
        raise ValueError(
            f"The pixels are {pixels.shape[-2]} x {pixels.shape[-1]}, and the model takes {height} x {width}: decode "
            "them with decode_all(dataset, model.image_size)."
        )
    return _encoded(engine, in_batches(pixels, size), len(dataset), progress)


def _encoder(model: object, count: int) -> Engine:
    """What encodes so many images of a model or an engine."""
    engine = engine_of(model)
    return exactly_faster(engine) if count >= MANY and engine.traits.reads_pixels else engine


def _at_once(engine: Engine) -> int:
    if engine.device.type == "cuda":
        return 64
    if getattr(engine, "vision", None) is not None:  # compiled: each core computes an image of its own
        return max(4, 2 * (os.cpu_count() or 1))
    # On a CPU large activations are paid for in page faults: a few images at a time are about three times faster.
    return 4


def _batches(pictures: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while some := list(itertools.islice(pictures, size)):
        yield some


def _encoded(engine: Engine, parts: Iterable[Any], total: int, progress: StageProgress | None) -> Tensor:
    encoded = torch.empty(0)
    done = 0
    for part in parts:
        found = engine.encode_pixels(part)
        if not done:
            # At once, as to join parts at the end would take the memory of all of them twice.
            encoded = found.new_empty(total, *found.shape[1:])
        encoded[done : done + len(found)] = found
        done += len(found)
        if progress is not None:
            progress("images", done, total)
    return encoded[:done]


def encode_guides(model: object, dataset: RetrievalDataset) -> dict[str, Tensor] | None:
    """By name the vectors (B, width) that a model or an engine reads beside the images; None where it reads none."""
    engine = engine_of(model)
    guides = dataset_guides(dataset, engine.traits.guides)
    return None if guides is None else {name: rows.to(engine.device) for name, rows in guides.items()}


@torch.no_grad()
def encode_readable(
    model: object, dataset: RetrievalDataset, *, progress: StageProgress | None = None
) -> tuple[Tensor | None, CheckReport]:
    """What `evaluate` takes as `tokens`, of the images that can be read, and a report of the others.

    The report is for `drop_bad`; an engine that reads no pixels has no tokens, and its images are only tried.
    """
    engine = _encoder(model, len(dataset))
    if not engine.traits.reads_pixels:
        return None, check_dataset(dataset, verify_images="decode")
    faults: dict[int, UnreadableImage] = {}
    total = len(dataset)
    with PictureStream(dataset.sources, engine.traits.image_size, engine.decoding) as stream:
        pictures = stream.pictures(faults)
        first = next(pictures, None)
        tokens = None
        if first is not None:
            parts = _batches(itertools.chain([first], pictures), _at_once(engine))
            tokens = _encoded(engine, parts, total, progress)
    return tokens, CheckReport(
        tuple(_fault(dataset, number, faults[number]) for number in faults), {dataset.label: total}
    )


def _fault(dataset: RetrievalDataset, number: int, error: UnreadableImage) -> DataFault:
    detail = f"{error.source}: {error.why.rstrip('.')}"
    return DataFault("unreadable", dataset.label, number, dataset.records[number].id, detail)
