"""Guides of a folder's pictures, from its JSONL files, as the store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from seps.retrieval.data import DataError
from seps.retrieval.data.descriptions import Descriptions
from seps.retrieval.data.gallery import Gallery, Problem
from seps.retrieval.data.guides import stacked
from seps.retrieval.model import RetrievalModel


@dataclass(frozen=True)
class FolderGuides:
    """The guides that the model reads: their widths, and by image id their float32 values one after the other."""

    widths: dict[str, int] = field(default_factory=dict)
    of: dict[str, bytes] = field(default_factory=dict)


def guides_of_folder(
    gallery: Gallery, texts: Descriptions, model: RetrievalModel, problems: list[Problem]
) -> FolderGuides:
    """What the lines bring; nothing where they bring none at all. Files that cannot be read are told to `problems`.

    Raises DataError where only some of the model's guides come, and where their widths differ.
    """
    names, sources = model.head.guides, {found.id: texts.guides_of(found) for found in gallery.images}
    if not any(name in source for source in sources.values() for name in names):
        return FolderGuides()

    def failed(number: int, error: DataError) -> None:
        problems.append(Problem(str(gallery.images[number]), str(error)))

    made = stacked(list(sources.values()), names, str(gallery.root), failed)
    joined = np.concatenate([made[name] for name in names], axis=1).astype("<f4")
    of = {identity: row.tobytes() for identity, row in zip(sources, joined, strict=True) if row.any()}
    return FolderGuides({name: made[name].shape[1] for name in names}, of)


def told_widths(guides: Mapping[str, int]) -> str:
    """Names and widths, for messages."""
    return ", ".join(f"{name} ({width})" for name, width in guides.items()) or "none"
