"""Which texts a training step shows for an image: one caption as the query, and the image's description.

The query is never part of the description it is trained against.
"""

from __future__ import annotations

import re

import torch

from .records import ImageRecord

_SENTENCE = re.compile(r"[^.!?]+[.!?]*")
MOST_IN_DESCRIPTION = 4


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
