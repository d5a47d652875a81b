"""The photos of a comparison: checked and decoded in one pass over the files, into arrays that processes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seps.encoders import vision_encoder
from seps.experiments.compare import Material
from seps.retrieval.config import RunConfig
from seps.retrieval.data import ImageSource, Mode, RetrievalDataset, check_dataset
from seps.retrieval.data.images import decode_image
from seps.retrieval.train.run import without_bad

Log = Callable[[str], None]


def decode_to(
    folder: Path, recipe: RunConfig, sets: list[RetrievalDataset], log: Log = lambda _: None
) -> tuple[list[RetrievalDataset], list[Path]]:
    """Check and decode the photos of all sets, the training set first, into `folder`, one .npy a set.

    Training photos are kept as training keeps them, the others as a model sees them. Returns the sets without what is
    bad (named to `log`, or refused if `data.strict`), and the files, row by row the photos of those sets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = recipe.model.image_size or vision_encoder(recipe.model.vision).image_size
    ways: list[tuple[tuple[int, int], Mode]] = [(recipe.data.size_to_decode(size), "resize")]
    ways += [(size, "model")] * (len(sets) - 1)
    paths = [folder / f"pixels-{number}.npy" for number in range(len(sets))]
    arrays = [
        np.lib.format.open_memmap(path, "w+", np.uint8, (len(part), 3, *way[0]))
        for path, part, way in zip(paths, sets, ways, strict=True)
    ]

    def decode(number: int, index: int, data: bytes, source: ImageSource) -> None:
        arrays[number][index] = decode_image(data, source, *ways[number]).numpy()

    try:
        report = check_dataset(*sets, verify_images="decode", visit=decode)
        kept = without_bad(sets, report, recipe, log)
        for path, array, part, whole in zip(paths, arrays, kept, sets, strict=True):
            array.flush()
            if len(part) < len(whole):
                bad = {finding.index for finding in report.findings if finding.dataset == whole.label}
                np.save(path, array[[row for row in range(len(whole)) if row not in bad]])
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return kept, paths


def mapped(path: Path) -> Tensor:
    """The array of a .npy file as a tensor whose memory all processes share; writing to it changes a private copy."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def load_material(recipe: RunConfig, sets: Sequence[RetrievalDataset], pixels: Sequence[Path]) -> Material:
    """The shared data, with its photos mapped from the files that `decode_to` made."""
    train, *dev = sets
    first, *others = map(mapped, pixels)
    return Material(recipe, train, dev, first, others)
