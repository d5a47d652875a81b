"""The images of a data set as features, each decoded once; threads decode ahead of the encoder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seps.images.decoding import Mode, PixelMaker
from seps.images.shards import UnreadableImage
from seps.retrieval.data import CheckReport, DataFault, RetrievalDataset, check_dataset
from seps.retrieval.data.guides import dataset_guides
from seps.retrieval.data.streams import PictureStream, Pixels, in_batches, stacked
from seps.retrieval.engine.zeroshot import ZeroShotModel
from seps.retrieval.model import RetrievalModel

StageProgress = Callable[[str, int, int | None], None]
"""Called with what is encoded, how many are done, and of how many."""


@torch.no_grad()
def encode_images(
    model: RetrievalModel,
    dataset: RetrievalDataset,
    *,
    pixels: Pixels | None = None,
    batch_size: int | None = None,
    progress: StageProgress | None = None,
) -> Tensor:
    """Tokens (B, P + N, C) of all images; photos are decoded in threads.

    `pixels` (B, 3, H, W) uint8 are images decoded before, by `decode_all(dataset, model.image_size)`, or a stream of
    that size. Raises ValueError for pixels of another size: to resize them here would be a second way to make them.
    """
    height, width = model.image_size
    if pixels is not None and pixels.shape[-2:] != (height, width):
        raise ValueError(
            f"The pixels are {pixels.shape[-2]} x {pixels.shape[-1]}, and the model takes {height} x {width}: decode "
            "them with decode_all(dataset, model.image_size)."
        )
    if pixels is None:
        with PictureStream(dataset.sources, model.image_size) as stream:
            return encode_images(model, dataset, pixels=stream, batch_size=batch_size, progress=progress)
    return _tokens(model, in_batches(pixels, _at_once(model, batch_size)), len(dataset), progress)


def _at_once(model: RetrievalModel, batch_size: int | None = None) -> int:
    # On a CPU large activations are paid for in page faults: a few images at a time are about three times faster.
    return batch_size or (64 if model.device.type == "cuda" else 4)


def _tokens(model: RetrievalModel, parts: Iterator[Tensor], total: int, progress: StageProgress | None) -> Tensor:
    tokens = torch.empty(0)
    done = 0
    for part in parts:
        found = model.encode_pixels(part.to(model.device).float() / 255)
        if not done:
            # At once, as to join parts at the end would take the memory of all of them twice.
            tokens = found.new_empty(total, *found.shape[1:])
        tokens[done : done + len(found)] = found
        done += len(found)
        if progress is not None:
            progress("images", done, total)
    return tokens[:done]


def encode_guides(model: RetrievalModel, dataset: RetrievalDataset) -> dict[str, Tensor] | None:
    """By name the vectors (B, width) that the model's head reads beside the images; None where it reads none."""
    guides = dataset_guides(dataset, model.head.guides)
    return None if guides is None else {name: rows.to(model.device) for name, rows in guides.items()}


@torch.no_grad()
def encode_zero_shot(
    model: ZeroShotModel, dataset: RetrievalDataset, *, progress: StageProgress | None = None
) -> Tensor:
    """Vectors (B, C) of all images by a dual encoder. Raises UnreadableImage."""
    with PictureStream(dataset.sources, model.image_size, model.embedder.prepare) as stream:
        return _vectors(model, stream.pictures(), len(dataset), progress)


def _vectors(
    model: ZeroShotModel, pictures: Iterator[Any], total: int, progress: StageProgress | None = None
) -> Tensor:
    vectors = []
    for done, prepared in enumerate(pictures, 1):
        vectors.append(model.images([prepared]))
        if progress is not None:
            progress("images", done, total)
    return torch.cat(vectors)


@torch.no_grad()
def encode_readable(
    model: RetrievalModel | ZeroShotModel, dataset: RetrievalDataset, *, progress: StageProgress | None = None
) -> tuple[Tensor | None, CheckReport]:
    """What `evaluate` takes as `tokens`, of the images that can be read, and a report of the others.

    The report is for `drop_bad`; a head that reads no pixels has no tokens, and its images are only tried.
    """
    if isinstance(model, RetrievalModel) and not model.head.uses_pixels:
        return None, check_dataset(dataset, verify_images="decode")
    model.eval()
    faults: dict[int, UnreadableImage] = {}
    mode: Mode | PixelMaker = model.embedder.prepare if isinstance(model, ZeroShotModel) else "model"
    total = len(dataset)
    with PictureStream(dataset.sources, model.image_size, mode) as stream:
        pictures = stream.pictures(faults)
        first = next(pictures, None)
        if first is None:
            tokens = None
        elif isinstance(model, ZeroShotModel):
            tokens = _vectors(model, itertools.chain([first], pictures), total, progress)
        else:
            tokens = _tokens(model, stacked(itertools.chain([first], pictures), _at_once(model)), total, progress)
    return tokens, CheckReport(
        tuple(_fault(dataset, number, faults[number]) for number in faults), {dataset.label: total}
    )


def _fault(dataset: RetrievalDataset, number: int, error: UnreadableImage) -> DataFault:
    detail = f"{error.source}: {error.why.rstrip('.')}"
    return DataFault("unreadable", dataset.label, number, dataset.records[number].id, detail)
