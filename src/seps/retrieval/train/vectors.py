"""One vector per picture, computed once and stored in the run's folder: what a run with a frozen vision side reads.

    RUN/vectors/NAME.npy     (images, C) float32, the mean patch of each picture at length one; NaN: unreadable
    RUN/vectors/NAME.json    what they were computed from, and how many are done

1.5 KB per picture at width 384, whatever the encoder. A run that was killed continues after the last whole part.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seps.encoders.compiled import CompiledVision, compiled_vision
from seps.files import read_json, write_json
from seps.images.shards import UnreadableImage
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.data.check import CheckReport, DataFault, drop_bad
from seps.retrieval.data.streams import PictureStream
from seps.retrieval.data.streams.pictures import stacked
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.training.checkpoint import Log

PART = 256
"""Pictures between two writes: at most so many are encoded again after a kill."""
PICTURE_SIDE = ("vision.", "project_patches.")
"""Beginnings of the names of the weights that make a picture's vector."""


def picture_vectors(model: RetrievalModel, dataset: RetrievalDataset, path: Path, log: Log) -> Tensor:
    """(images, C) float32 of the pictures' mean patches at length one, from the files at `path` as far as they go.

    NaN in the rows of pictures that cannot be read. What was computed by other weights, or from other files, is
    replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    array, state = path.with_suffix(".npy"), path.with_suffix(".json")
    shape = (len(dataset), model.config.embed_size)
    made_from = digest(model, dataset)
    stated = read_json(state)
    done = int(stated.get("done", 0)) if stated.get("digest") == made_from and array.is_file() else 0
    vision = None
    if done < len(dataset):
        # As `seps index` encodes them.
        vision = compiled_vision(model.vision) if model.device.type == "cpu" else None
        log(f"{dataset.label}: the vectors of {len(dataset) - done:,} pictures are computed once, into {array}.")
    vectors = np.lib.format.open_memmap(array, "r+" if done else "w+", np.float32, shape)
    for start in range(done, len(dataset), PART):
        rows = slice(start, start + PART)
        vectors[rows] = _encoded(model, dataset, rows, vision).numpy()
        # The rows are on the disk before the number that counts them.
        vectors.flush()
        write_json(state, {"digest": made_from, "done": min(start + PART, len(dataset))})
    return torch.from_numpy(np.array(vectors))


@torch.no_grad()
def _encoded(model: RetrievalModel, dataset: RetrievalDataset, rows: slice, vision: CompiledVision | None) -> Tensor:
    sources = dataset.sources[rows]
    vectors = torch.full((len(sources), model.config.embed_size), float("nan"))
    faults: dict[int, UnreadableImage] = {}
    found = []
    with PictureStream(sources, model.image_size) as stream:
        # On a CPU a few images at a time are about three times faster.
        for pixels in stacked(stream.pictures(faults), 64 if model.device.type == "cuda" else 4):
            tokens = model.encode_pixels(pixels.to(model.device).float() / 255, vision)
            found.append(ImageFeatures(tokens).mean_patch(model.vision.num_prefix_tokens).cpu())
    good = [number for number in range(len(sources)) if number not in faults]
    if found:
        vectors[good] = torch.cat(found)
    return vectors


def readable(dataset: RetrievalDataset, vectors: Tensor) -> tuple[RetrievalDataset, Tensor, CheckReport]:
    """The pictures that could be read, their vectors, and a report of the others."""
    bad = vectors.isnan().any(dim=1)
    faults = [
        DataFault("unreadable", dataset.label, number, record.id, str(record.source))
        for number, record in enumerate(dataset.records)
        if bad[number]
    ]
    report = CheckReport(tuple(faults), {dataset.label: len(dataset)})
    return drop_bad(dataset, report), vectors[~bad], report


def digest(model: RetrievalModel, dataset: RetrievalDataset) -> str:
    """Of the weights that make a picture's vector, and of the pictures' names, sizes and dates of change."""
    made = hashlib.blake2b(f"{model.image_size}".encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith(PICTURE_SIDE):
            made.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    files: dict[Path, str] = {}
    for record in dataset.records:
        path = record.source.path
        if path not in files:
            files[path] = _state_of(path)
        # The name of a file, not its folder: a data set may be moved.
        made.update(f"{record.id}\0{path.name}\0{record.source.member}\0{files[path]}\0".encode())
    return made.hexdigest()


def _state_of(path: Path) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "absent"
    return f"{status.st_size} {status.st_mtime_ns}"
