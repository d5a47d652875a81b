"""How a store keeps one picture: a named size, the columns that it fills, and the way back.

Each image also has one vector, by which a vector index finds the candidates that are then scored exactly.

Shapes: B images, P prefix tokens, N patches, M stored patches or means, L description words, C width, E width of the
description's words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from seps.retrieval.config import SIZES, VECTOR, PatchSize
from seps.retrieval.engine.mean import MeanLayout
from seps.retrieval.engine.packing import Array, Precision, pack, packed_shape, unpack, unpack_all, unpack_padded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seps.retrieval.engine.pictures import PatchPictures, VectorPictures

PACKED = ("tokens", "positions", "mean", "words")
"""Columns of packed values; a layout that does not use one leaves it empty."""
VECTORS_PRECISION: Precision = "float16"
"""Of the description's words beside one vector of a picture."""


class ImageColumns(Protocol):
    """Some columns of some images, as a store reads them."""

    def __len__(self) -> int:
        """Images."""
        ...

    def values(self, name: str) -> list[Any]:
        """One column as plain values."""
        ...

    def vectors(self, name: str = "vector") -> Array:
        """(B, C) float32: a column of vectors."""
        ...

    def blobs(self, name: str) -> Array | list[bytes]:
        """A column of bytes: (B, size) uint8 where all have one size, else a list."""
        ...


@dataclass(frozen=True)
class Kept:
    """What a store keeps of B images, not yet packed, in the processor's memory."""

    vectors: Tensor | Array
    """(B, width of search vectors)."""
    tokens: Tensor | None = None
    """(B, P + M, C): the prefix and the kept patches, or means of patches."""
    positions: Tensor | None = None
    """(B, M) places of the kept patches; None where all are kept, or their means."""
    means: Tensor | Sequence[Array | None] | None = None
    """(B, 1, C) the mean of all patches, where not all are kept; of one vector per picture None without description."""
    words: Tensor | None = None
    mask: Tensor | None = None
    """(B, L, E) words of the descriptions, and which of them count."""

    def packed(self, precision: Precision) -> list[dict[str, Any]]:
        """Per image its columns: the vector, and those of `PACKED`."""
        vectors = np.asarray(self.vectors).astype(np.float16)
        of_mean: Precision = "float16" if precision == "float16" else "int4"
        states = []
        for i, vector in enumerate(vectors):
            state: dict[str, Any] = {"vector": vector, "tokens": b"", "positions": None, "mean": None, "words": None}
            if self.positions is not None:
                state["positions"] = self.positions[i].numpy().astype("<u2").tobytes()
            if self.means is not None and self.means[i] is not None:
                state["mean"] = pack(self.means[i], of_mean)
            if self.tokens is not None:
                state["tokens"] = pack(self.tokens[i], precision)
            if self.words is not None and self.mask is not None and bool(self.mask[i].any()):
                state["words"] = pack(self.words[i][self.mask[i]], precision)
            states.append(state)
        return states


class Layout(Protocol):
    """How a store keeps one picture. It is made of plain values, and needs no model."""

    kind: ClassVar[str]
    """Its name in the settings of a store."""

    @property
    def size(self) -> str:
        """Its name."""
        ...

    @property
    def precision(self) -> Precision:
        """Of packed values."""
        ...

    @property
    def width(self) -> int:
        """C of the vectors of pixels alone."""
        ...

    @property
    def grid(self) -> tuple[int, int]:
        """What is kept of the patches, down and across."""
        ...

    @property
    def vector_width(self) -> int:
        """Values of the column `vector`."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """What scores are computed from."""
        ...

    @property
    def described_column(self) -> str:
        """One of them that only described pictures have."""
        ...

    @property
    def slope(self) -> float | None:
        """What a score gains with the product of search vectors where it is nothing else; None: it is more."""
        ...

    @property
    def appearance_columns(self) -> tuple[str, ...]:
        """What `appearance` is computed from."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What is kept, for people."""
        ...

    def unpack(self, images: ImageColumns, device: torch.device | str = "cpu") -> Any:
        """The pictures, as the engine scores them, of images read with `columns`."""
        ...

    def appearance(self, images: ImageColumns) -> Array:
        """(B, C) float32 vectors of length one of the pixels alone. Not the column `vector`: descriptions are in it."""
        ...

    def faults(self, row: Mapping[str, Any]) -> list[str]:
        """What is wrong with the values of one image, read with `columns` and `vector`."""
        ...


@dataclass(frozen=True)
class PatchLayout:
    """Tokens of a picture: all patches, some of them, or means over a coarser grid."""

    kind: ClassVar[str] = "patches"
    described_column: ClassVar[str] = "words"
    slope: ClassVar[None] = None

    size: str
    width: int
    """C."""
    grid: tuple[int, int]
    """Patches, or means of them, down and across."""
    num_prefix_tokens: int
    patches: int | None = None
    """How many of the grid are kept; None: all."""
    means: bool = False
    """The tokens are means of the patches in each cell of `grid`, which is coarser than the model's."""

    @classmethod
    def of(cls, size: str, width: int, grid: tuple[int, int], num_prefix_tokens: int) -> PatchLayout:
        """The layout of this size for a model whose pictures have `grid` patches. Raises ValueError for no size."""
        if size not in SIZES:
            raise ValueError(f"The size is {size!r}; choose one of {', '.join((VECTOR, *SIZES))}.")
        spec = SIZES[size]
        cells = grid if spec.means is None else (min(spec.means, grid[0]), min(spec.means, grid[1]))
        patches = spec.patches if spec.patches is not None and spec.patches < grid[0] * grid[1] else None
        return cls(size, width, cells, num_prefix_tokens, patches, cells != grid)

    def __post_init__(self) -> None:
        """Raises ValueError for values that no layout has."""
        numbers = (self.width, *self.grid, self.patches or 1)
        if not all(type(value) is int and value > 0 for value in numbers) or self.num_prefix_tokens < 0:
            raise ValueError("width, grid and counts must be positive numbers")
        if self.size not in SIZES:
            raise ValueError(f"the size is {self.size!r}")
        if self.means is not bool(self.means) or (self.means and self.patches is not None):
            raise ValueError(f"means is {self.means!r} beside {self.patches!r} patches")

    @property
    def spec(self) -> PatchSize:
        """What its name stands for."""
        return SIZES[self.size]

    @property
    def precision(self) -> Precision:
        """See `Layout`."""
        return self.spec.precision

    @property
    def keep_words(self) -> int | None:
        """Words of a description, merged; None: all."""
        return self.spec.words

    @property
    def stored(self) -> int:
        """Patches, or means of them, that are kept per image."""
        return self.patches or self.grid[0] * self.grid[1]

    @property
    def vector_width(self) -> int:
        """See `Layout`."""
        return self.width

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Layout`."""
        return PACKED

    @property
    def appearance_columns(self) -> tuple[str, ...]:
        """See `Layout`."""
        return ("mean",) if self.patches is not None or self.means else ("tokens",)

    @property
    def facts(self) -> dict[str, Any]:
        """See `Layout`."""
        facts = {"precision": self.precision, "patches": self.stored, "means": self.means, "words": self.keep_words}
        return {**facts, "kind": self.kind}

    def unpack(self, images: ImageColumns, device: torch.device | str = "cpu") -> PatchPictures:
        """See `Layout`."""
        import torch

        from seps.retrieval.engine.pictures import PatchPictures
        from seps.retrieval.heads import ImageFeatures

        words, mask = map(torch.from_numpy, unpack_padded(images.values("words"), self.width))
        features = ImageFeatures(torch.from_numpy(unpack_all(images.blobs("tokens"))).to(device))
        if mask.shape[1]:
            features.dense, features.dense_mask = words.to(device), mask.to(device)
        if self.patches is None and not self.means:
            return PatchPictures(features, self.num_prefix_tokens, self)
        features.mean = torch.from_numpy(np.concatenate([unpack(blob) for blob in images.values("mean")])).to(device)
        if self.means:
            return PatchPictures(features, self.num_prefix_tokens, self)
        places = np.stack([np.frombuffer(blob, "<u2") for blob in images.values("positions")]).astype(np.int64)
        return PatchPictures(features, self.num_prefix_tokens, self, torch.from_numpy(places).to(device))

    def appearance(self, images: ImageColumns) -> Array:
        """See `Layout`: the mean patch."""
        if self.appearance_columns == ("mean",):
            return _unit(np.concatenate([unpack(blob) for blob in images.values("mean")]))
        return _unit(unpack_all(images.blobs("tokens"))[:, self.num_prefix_tokens :].mean(axis=1))

    def faults(self, row: Mapping[str, Any]) -> list[str]:
        """See `Layout`."""
        faults = []
        try:
            shape = packed_shape(row["tokens"])
            if shape != (self.num_prefix_tokens + self.stored, self.width):
                faults.append(
                    f"its state holds {shape[0]} tokens of width {shape[1]}, not {self.stored} of {self.width}"
                )
            faults += _wrong_words(row, self.width)
            if row["mean"] is not None and packed_shape(row["mean"]) != (1, self.width):
                faults.append("the mean of its patches has another width")
        except ValueError as error:
            faults.append(f"its state is damaged: {error}")
        if self.means and row["mean"] is None:
            faults.append("the mean of its patches is missing")
        if self.patches is not None and (row["mean"] is None or len(row["positions"] or b"") != 2 * self.stored):
            faults.append("the positions of its patches are missing")
        return faults


@dataclass(frozen=True)
class VectorLayout:
    """One vector of a picture's pixels, and the words of its description."""

    kind: ClassVar[str] = "vectors"
    size: ClassVar[str] = VECTOR
    described_column: ClassVar[str] = "words"
    slope: ClassVar[None] = None
    precision: ClassVar[Precision] = VECTORS_PRECISION
    grid: ClassVar[tuple[int, int]] = (1, 1)

    width: int
    """C of the picture's vector."""
    words_width: int
    """E, where another model than the pictures' encodes descriptions."""

    def __post_init__(self) -> None:
        """Raises ValueError for values that no layout has."""
        if not all(type(value) is int and value > 0 for value in (self.width, self.words_width)):
            raise ValueError("the widths must be positive numbers")

    @property
    def vector_width(self) -> int:
        """See `Layout`: that of the picture, of the description, and 1."""
        return self.width + self.words_width + 1

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Layout`."""
        return "vector", "words"

    @property
    def appearance_columns(self) -> tuple[str, ...]:
        """See `Layout`."""
        return ("vector",)

    @property
    def facts(self) -> dict[str, Any]:
        """See `Layout`."""
        return {"precision": self.precision, "patches": 0, "means": False, "words": None, "kind": self.kind}

    def unpack(self, images: ImageColumns, device: torch.device | str = "cpu") -> VectorPictures:
        """See `Layout`."""
        import torch

        from seps.retrieval.engine.pictures import VectorPictures

        words, mask = map(torch.from_numpy, unpack_padded(images.values("words"), self.words_width))
        vectors = torch.from_numpy(images.vectors()[:, : self.width])
        return VectorPictures(vectors.to(device), words.to(device), mask.to(device))

    def appearance(self, images: ImageColumns) -> Array:
        """See `Layout`."""
        return _unit(images.vectors()[:, : self.width])

    def faults(self, row: Mapping[str, Any]) -> list[str]:
        """See `Layout`."""
        faults = []
        length = np.linalg.norm(np.array(row["vector"], np.float32)[: self.width])
        if not abs(length - 1) < 1e-3:
            faults.append(f"its vector has the length {length:.3f}, not 1; run seps index into another store")
        try:
            faults += _wrong_words(row, self.words_width)
        except ValueError as error:
            faults.append(f"its state is damaged: {error}")
        return faults


LAYOUTS: dict[str, type[PatchLayout] | type[VectorLayout] | type[MeanLayout]] = {
    kind.kind: kind for kind in (PatchLayout, VectorLayout, MeanLayout)
}
"""By name."""


def layout_values(layout: Layout) -> dict[str, Any]:
    """A layout as plain values."""
    return {"kind": layout.kind, **asdict(layout)}  # type: ignore[call-overload]


def read_layout(values: Mapping[str, Any]) -> Layout:
    """What `layout_values` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    own = {name: tuple(value) if name == "grid" else value for name, value in values.items() if name != "kind"}
    made: Layout = LAYOUTS[values["kind"]](**own)  # type: ignore[arg-type]
    return made


def _wrong_words(row: Mapping[str, Any], width: int) -> list[str]:
    right = row["words"] is None or packed_shape(row["words"])[1] == width
    return [] if right else ["its description has another width"]


def _unit(vectors: Array) -> Array:
    unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit
