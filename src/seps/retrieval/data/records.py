"""What a retrieval data set is: images, each with its own captions and its own description.

A description (`dense`, the paper's dense text) is written from an image and belongs to it: it lives in the image's
record and nowhere else. A caption is addressed as (image index, caption index). No list of descriptions per caption
exists, so that no later code can hand a query the description of the image it should find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seps.images.sources import DataError, ImageSource
from seps.parsing import has_words

if TYPE_CHECKING:
    from .guides import GuideSource


@dataclass(frozen=True)
class ImageRecord:
    """One image with its captions and, if there is one, its description (`dense`) and its guides by name.

    `caption_ids` are the data set's own ids of the captions, one each, or empty where they are not known.
    Raises DataError for an empty id, a blank caption, a description that is not one non-blank string, or caption ids
    that are not as many as the captions.
    """

    id: str
    source: ImageSource
    captions: tuple[str, ...]
    dense: str | None = None
    guides: Mapping[str, GuideSource] = field(default_factory=dict, hash=False)
    caption_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise DataError(f"An image needs a non-empty text as its id, not {self.id!r} ({self.source}).")
        if not isinstance(self.captions, tuple):
            raise DataError(f"The captions of image {self.id!r} must be a tuple of texts.")
        for number, caption in enumerate(self.captions):
            if not has_words(caption):
                raise DataError(f"Caption {number} of image {self.id!r} is not a text with words in it.")
        if self.caption_ids and len(self.caption_ids) != len(self.captions):
            raise DataError(
                f"Image {self.id!r} has {len(self.captions)} captions and {len(self.caption_ids)} caption ids: "
                "give one id for each caption, in the same order, or none."
            )
        if self.dense is not None and not has_words(self.dense):
            raise DataError(
                f"The description of image {self.id!r} must be one non-blank text, the image's own, or None; "
                f"got {type(self.dense).__name__}."
            )


@dataclass(frozen=True)
class RetrievalDataset:
    """Images in a fixed order; captions are numbered image by image.

    `len(dataset)` counts images.
    """

    records: tuple[ImageRecord, ...]
    name: str = "data"
    split: str = "all"

    def __len__(self) -> int:
        return len(self.records)

    @property
    def label(self) -> str:
        """Name and split in one word, for messages and tables."""
        return f"{self.name}/{self.split}"

    @property
    def captions(self) -> list[str]:
        """All captions, those of image 0 first; `image_of_caption` says whose each is."""
        return [caption for record in self.records for caption in record.captions]

    @property
    def captions_per_image(self) -> list[int]:
        """How many captions each image has."""
        return [len(record.captions) for record in self.records]

    @property
    def image_of_caption(self) -> Tensor:
        """(captions,) int64: the image index of each entry of `captions`."""
        return torch.repeat_interleave(
            torch.arange(len(self)), torch.tensor(self.captions_per_image, dtype=torch.int64)
        )

    @property
    def dense(self) -> list[str | None]:
        """The description of each image, None where it has none: one per image, never one per caption."""
        return [record.dense for record in self.records]

    @property
    def sources(self) -> list[ImageSource]:
        """Where each image is."""
        return [record.source for record in self.records]

    def caption(self, image: int, index: int) -> str:
        """Caption `index` of image `image`."""
        return self.records[image].captions[index]

    def subset(self, indices: Iterable[int]) -> RetrievalDataset:
        """The images at `indices`, in that order, each with its captions and description."""
        return replace(self, records=tuple(self.records[int(index)] for index in indices))
