"""Typed queries as JSON lines: what is typed, which images are right for it, and for which nobody can say.

    {"kind": "query", "texts": ["red car", "a red car"], "right": ["17", "23"], "unknown": ["5"]}

`texts` are forms of one query, which mean the same. `right` and `unknown` name images of the training set by their ids;
every other image is wrong. `kind` is optional, and no other value of it is read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.files import write_text
from seps.images.sources import DataError
from seps.retrieval.data.records import RetrievalDataset

from ..lines import checked_text, json_lines

KIND = "query"


@dataclass(frozen=True)
class TypedQuery:
    """One query in several forms, with the ids of the images that are right, and of those of which nothing is known.

    Raises DataError without a text, without a right image, and for an image that is both.
    """

    texts: tuple[str, ...]
    right: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.texts:
            raise DataError("A typed query has no text.")
        if not self.right:
            raise DataError(f"The typed query {self.texts[0]!r} has no right image; leave it out.")
        if both := sorted(set(self.right) & set(self.unknown)):
            raise DataError(f"The typed query {self.texts[0]!r} names the image {both[0]!r} as right and as unknown.")


def load_queries(path: str | os.PathLike[str]) -> tuple[TypedQuery, ...]:
    """Read a JSONL file of typed queries. Raises DataError, with file and line."""
    path = Path(path)
    queries = []
    for place, value in json_lines(path):
        if value.get("kind", KIND) != KIND:
            raise DataError(f'{place}: "kind" is {value["kind"]!r}; a file of typed queries holds {KIND!r} alone.')
        try:
            queries.append(TypedQuery(*(_texts(value, name, place) for name in ("texts", "right", "unknown"))))
        except DataError as error:
            message = str(error)
            raise DataError(message if message.startswith(place) else f"{place}: {message}") from None
    if not queries:
        raise DataError(f"{path} holds no typed queries. Write one JSON object per line.")
    return tuple(queries)


def _texts(value: dict[str, Any], name: str, place: str) -> tuple[str, ...]:
    texts = value.get(name, [])
    if not isinstance(texts, list):
        raise DataError(f'{place}: "{name}" must be a list of texts.')
    # An id may be a number, as in the lines of images.
    texts_read = (str(text) if type(text) is int and name != "texts" else text for text in texts)
    return tuple(dict.fromkeys(checked_text(text, f'an entry of "{name}"', place).strip() for text in texts_read))


def save_queries(queries: Sequence[TypedQuery], path: str | os.PathLike[str]) -> None:
    """Write `queries` so that `load_queries` returns them; the file appears whole or not at all."""
    lines = []
    for query in queries:
        line = {"kind": KIND, "texts": list(query.texts), "right": list(query.right)}
        line |= {"unknown": list(query.unknown)} if query.unknown else {}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_text(Path(path), "".join(lines))


class TypedQueries:
    """Typed queries with the images of a data set by number.

    Images that the data set does not have are ignored, and so are queries without a right image in it. Raises DataError
    where no query is left.
    """

    def __init__(self, queries: Sequence[TypedQuery], dataset: RetrievalDataset) -> None:
        numbers = {record.id: number for number, record in enumerate(dataset.records)}

        def places(ids: Sequence[str]) -> Tensor:
            return torch.tensor(sorted(numbers[image] for image in ids if image in numbers), dtype=torch.long)

        self.texts: list[tuple[str, ...]] = []
        self.right: list[Tensor] = []
        self.unknown: list[Tensor] = []
        for query in queries:
            if len(right := places(query.right)):
                self.texts.append(query.texts)
                self.right.append(right)
                self.unknown.append(places(query.unknown))
        self.images = len(dataset)
        if not self.texts:
            raise DataError(f"No typed query names an image of {dataset.label} by its id as right.")

    def __len__(self) -> int:
        return len(self.texts)

    def marks(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(rows, images) bool of the queries with these numbers: the right images, and the unknown ones."""
        right = torch.zeros(len(rows), self.images, dtype=torch.bool)
        unknown = torch.zeros_like(right)
        for place, row in enumerate(rows):
            right[place, self.right[row]] = True
            unknown[place, self.unknown[row]] = True
        return right, unknown
