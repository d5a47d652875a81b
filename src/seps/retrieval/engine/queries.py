"""Queries as the engines score them: sentences, or pictures that others are searched by.

Shapes: T texts, M words of a text, C width of a picture's vector, E width of words.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seps.retrieval.heads import TextFeatures
    from seps.scoring.own_texts import TextPool

Array = np.ndarray[Any, np.dtype[Any]]
_PLAIN = "arrays"
"""Marks queries of an engine without torch in a file."""


def as_array(values: Tensor | Array) -> Array:
    """A tensor on any device, or an array, as an array."""
    if isinstance(values, np.ndarray):
        return values
    array: Array = values.detach().cpu().numpy()
    return array


def joined(parts: Sequence[Any]) -> Any:
    """Arrays or tensors, one below the other."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))


@dataclass
class Queries:
    """Encoded queries."""

    words: TextFeatures | None
    """(T, M, E), by which patches and descriptions are scored; None: descriptions take no part."""
    vectors: Tensor | Array | None = None
    """(T, C) of length one, by which the vectors of pictures are scored; None: pictures have no such vectors."""

    def __len__(self) -> int:
        if self.vectors is not None:
            return len(self.vectors)
        return 0 if self.words is None else len(self.words.words)

    @property
    def text_features(self) -> TextFeatures:
        """Their words. Raises ValueError where they have none."""
        if self.words is None:
            raise ValueError("These queries have no words.")
        return self.words

    @functools.cached_property
    def pool(self) -> TextPool:
        """The words, prepared once for pictures that are scored with queries of their own."""
        from seps.scoring.own_texts import TextPool

        return TextPool(self.text_features.words, self.text_features.mask)

    def rows(self, rows: Tensor | slice) -> Queries:
        """Some of them, without padding that none of them needs."""
        words = None
        if self.words is not None:
            mask = self.words.mask[rows]
            longest = int(mask.sum(dim=1).max())
            words = type(self.words)(self.words.words[:, :longest][rows], mask[:, :longest])
        return Queries(words, None if self.vectors is None else self.vectors[rows])

    def to(self, device: torch.device | str) -> Queries:
        """The same on another device; arrays stay as they are."""
        if self.words is None and isinstance(self.vectors, np.ndarray):
            return self
        from seps.method.encoded import map_tensors

        moved: Queries = map_tensors(self, lambda tensor: tensor.to(device))
        return moved

    def tensors(self) -> dict[str, Any]:
        """Plain tensors without padding; arrays where an engine without torch made them."""
        values: dict[str, Any] = {} if self.vectors is None else {"vectors": self.vectors}
        if self.words is not None:
            values |= {"words": self.words.words[self.words.mask], "counts": self.words.mask.sum(dim=1)}
        return values

    @classmethod
    def of_tensors(cls, values: Mapping[str, Any]) -> Queries:
        """What `tensors` gave."""
        words = None
        if "counts" in values:
            import torch

            from seps.retrieval.heads import TextFeatures

            counts = values["counts"]
            mask = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]
            padded = torch.zeros(*mask.shape, values["words"].shape[1], device=counts.device)
            padded[mask] = values["words"]
            words = TextFeatures(padded, mask)
        return cls(words, values.get("vectors"))

    def arrays(self) -> dict[str, Array]:
        """Arrays without padding, for files."""
        values = {name: as_array(value) for name, value in self.tensors().items()}
        if isinstance(self.vectors, np.ndarray):
            values[_PLAIN] = np.ones(1, np.uint8)
        return values

    @classmethod
    def of_arrays(cls, values: Mapping[str, Array]) -> Queries:
        """What `arrays` gave."""
        if _PLAIN in values:
            return cls(None, values["vectors"])
        import torch

        return cls.of_tensors({name: torch.from_numpy(value) for name, value in values.items()})


class PackedQueries(Queries):
    """Many queries with words, which are padded only when they are asked for.

    `values` are those of `Queries.tensors`, `means` (T, E) their normalised mean words. Of the words their directions
    and lengths are kept, so that there is one copy of them: what is padded is equal but for rounding.
    """

    def __init__(self, values: Mapping[str, Any], means: Tensor) -> None:
        from seps.scoring.own_texts import TextPool

        words = values["words"].float()
        self.lengths = words.norm(dim=-1, keepdim=True)
        self.pool = TextPool.packed(words, values["counts"], means)
        self.vectors = values.get("vectors")

    def __len__(self) -> int:
        return len(self.pool.counts)

    @property
    def words(self) -> TextFeatures | None:  # type: ignore[override]
        """See `Queries`."""
        return Queries.of_tensors(self.tensors()).words

    def tensors(self) -> dict[str, Any]:
        """See `Queries`."""
        found = {} if self.vectors is None else {"vectors": self.vectors}
        return {**found, "words": self.pool.words * self.lengths, "counts": self.pool.counts}

    def to(self, device: torch.device | str) -> Queries:
        """See `Queries`."""
        moved = {name: value.to(device) for name, value in self.tensors().items()}
        return PackedQueries(moved, self.pool.means.to(device))


def cut_arrays(values: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    """Of what `Queries.arrays` gave the queries `start` to `stop`."""
    found = {name: values[name][start:stop] for name in ("vectors", "counts") if name in values}
    if "counts" in values:
        first, last = (int(values["counts"][:end].sum()) for end in (start, stop))
        found["words"] = values["words"][first:last]
    return found | {name: values[name] for name in (_PLAIN,) if name in values}


def packed_queries(values: Mapping[str, Array], device: torch.device | str, at_once: int = 128) -> Queries:
    """Queries of what `Queries.arrays` gave, without padding, and never all of them with it."""
    if "words" not in values:
        return Queries.of_arrays(values).to(device)
    import torch
    from torch.nn import functional as F

    from seps.method.score import masked_mean

    means = []
    for start in range(0, len(values["counts"]), at_once):
        some = Queries.of_arrays(cut_arrays(values, start, start + at_once)).text_features
        means.append(F.normalize(masked_mean(some.words, some.mask), dim=-1))
    tensors = {name: torch.from_numpy(value).to(device) for name, value in values.items()}
    return PackedQueries(tensors, torch.cat(means).to(device))
