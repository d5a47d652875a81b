"""Who may see which text in an evaluation.

- `image` (the default): an image's description belongs to the image, on the gallery side. A score is a function of
  the image, its own description and the caption.
- `none`: no description at all.
- `published`: query-side descriptions, as the published code has them. Every caption comes with the description of *the
  image it should find*, so the query contains the answer: the protocol is leaky. It exists to reproduce published
  figures and to show what they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seps.images.sources import DataError
from seps.method.config import require_choice
from seps.retrieval.config import Protocol
from seps.retrieval.data import RetrievalDataset

PUBLISHED_WARNING = (
    "Protocol 'published' gives every query the description of the image it should find: these figures contain the "
    "answer and must not be compared with others."
)


class ProtocolError(ValueError):
    """An evaluation that would show the answer to the query."""


@dataclass(frozen=True)
class View:
    """What an evaluation under one protocol may see. Only `view` makes one."""

    protocol: Protocol
    image_descriptions: list[str | None] | None
    """One description per image, on the image's side; None where the protocol shows none."""
    captions: list[str]
    query_descriptions: list[str] | None
    """Leaky protocol alone: one description per caption, that of its target."""


def view(dataset: RetrievalDataset, protocol: Protocol, caption_dense: Sequence[str] | None = None) -> View:
    """What `protocol` lets an evaluation of `dataset` see.

    `caption_dense` are descriptions that a loader attached to the captions; they are refused under any protocol
    but `published`, which takes each caption's from its own image. Raises `ProtocolError`.
    """
    require_choice("protocol", protocol, Protocol)
    if caption_dense is not None and protocol != "published":
        raise ProtocolError(
            f"{len(caption_dense)} descriptions are bound to captions. Under protocol {protocol!r} a query may "
            "not carry a description of its target; bind descriptions to their images instead."
        )
    if protocol == "none":
        return View(protocol, None, dataset.captions, None)
    if protocol == "image":
        texts = dataset.dense
        return View(protocol, texts if any(text is not None for text in texts) else None, dataset.captions, None)
    missing = [record.id for record in dataset.records if record.dense is None]
    if missing:
        raise DataError(
            f"Protocol 'published' needs a description of every image, but {len(missing)} have none "
            f"(first: {missing[0]})."
        )
    paired = [str(record.dense) for record in dataset.records for _ in record.captions]
    return View(protocol, None, dataset.captions, paired)
