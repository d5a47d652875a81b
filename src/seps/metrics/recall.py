"""Recall at k of image-text retrieval in both directions, from scores or from a stream of score blocks.

Shape letters: I images, T captions, R rows of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._checks import check_cut_offs, labels, matrix, refuse_nan

if TYPE_CHECKING:
    from ._checks import Array

Blocks = Callable[[], Iterable[tuple[int, Tensor]]]
"""Called once a pass: yields (first row, scores (R, T)) until every image had its row."""

_BLOCK_ENTRIES = 1 << 24


@dataclass(frozen=True)
class DirectionMetrics:
    """One direction: recalls in percent by k, and the median and mean of the ranks counted from 1."""

    recalls: Mapping[int, float]
    median_rank: float
    mean_rank: float

    def at(self, k: int) -> float:
        """Recall at `k` in percent; raises ValueError if it was not asked for."""
        if k not in self.recalls:
            raise ValueError(f"Recall at {k} was not computed: ask for it with ks (got {sorted(self.recalls)}).")
        return self.recalls[k]

    @property
    def r1(self) -> float:
        return self.at(1)

    @property
    def r5(self) -> float:
        return self.at(5)

    @property
    def r10(self) -> float:
        return self.at(10)

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for JSON: `r1`, `r5`, ..., `median_rank`, `mean_rank`."""
        named = {f"r{k}": value for k, value in self.recalls.items()}
        return {**named, "median_rank": self.median_rank, "mean_rank": self.mean_rank}


@dataclass(frozen=True)
class RetrievalMetrics:
    """Both directions; `i2t` asks with images, `t2i` with captions. With `folds` > 1, means over them."""

    i2t: DirectionMetrics
    t2i: DirectionMetrics
    images: int
    captions: int
    folds: int = 1

    @property
    def rsum(self) -> float:
        """Sum of the recalls of both directions, in percent (six of them for the usual 1, 5, 10)."""
        return sum(self.i2t.recalls.values()) + sum(self.t2i.recalls.values())

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        return {
            "rsum": self.rsum,
            "i2t": self.i2t.as_dict(),
            "t2i": self.t2i.as_dict(),
            "images": self.images,
            "captions": self.captions,
            "folds": self.folds,
        }


def ranks(sims: Array, image_of_caption: Array) -> tuple[Tensor, Tensor]:
    """Ranks, counted from 0, of the right answers in a score matrix: `(i2t (I,), t2i (T,))`, long.

    sims (I, T): higher is closer. image_of_caption (T,): the row of each caption's image.
    The rank is the number of wrong candidates that score at least as high, so a tie counts against us. An
    image asks with its best own caption; an image without captions asks nothing and has rank -1.
    Needs little more memory than `sims`. Raises ValueError on wrong shapes, indices out of range or NaN.
    """
    scores = matrix("sims", sims)
    images, captions = scores.shape
    owners = _owners(image_of_caption, captions, images, scores.device)
    rows = max(1, _BLOCK_ENTRIES // captions)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for start in range(0, images, rows):
            yield start, scores[start : start + rows]

    return ranks_chunked(blocks, owners)


def ranks_chunked(blocks: Blocks, image_of_caption: Array) -> tuple[Tensor, Tensor]:
    """`ranks` of a matrix that is never held whole.

    blocks: called twice, each time yielding (first row, scores (R, T)) so that every image has one row; the
    second pass is needed because a caption's rank can be counted only once its own image's score is known.
    Holds one block, a few masks of its size, and vectors of length I and T. Raises as `ranks` does, and
    ValueError if rows are missing, repeated, or different in the second pass.
    """
    captions = torch.as_tensor(image_of_caption).numel()
    own_score: Tensor | None = None
    seen: dict[int, Tensor] = {}
    for start, block in _checked(blocks, captions):
        owners = labels("image_of_caption", image_of_caption, captions, block.device)
        if own_score is None:
            own_score = block.new_zeros(captions)
        if start in seen:
            raise ValueError(f"The block starting at row {start} was added twice: every image needs exactly one row.")
        own = owners[None, :] == torch.arange(start, start + len(block), device=block.device)[:, None]
        seen[start] = _image_ranks(block, own)
        mine = own.any(dim=0)
        # Blocks may differ in dtype; rounding a score to another's would make or break ties.
        own_score = own_score.to(torch.promote_types(own_score.dtype, block.dtype))
        own_score[mine] = block[owners[mine] - start, mine.nonzero().squeeze(1)].to(own_score.dtype)
    images = _covered({start: len(part) for start, part in seen.items()})
    if own_score is None:
        raise ValueError("There are no score blocks: at least one image is needed.")
    owners = _owners(image_of_caption, captions, images, own_score.device)
    i2t = torch.cat([seen[start] for start in sorted(seen)])

    t2i = torch.zeros(captions, dtype=torch.long, device=own_score.device)
    again: dict[int, int] = {}
    for start, block in _checked(blocks, captions):
        again[start] = len(block)
        wrong = owners[None, :] != torch.arange(start, start + len(block), device=block.device)[:, None]
        t2i += ((block >= own_score) & wrong).sum(dim=0)
    if again != {start: len(part) for start, part in seen.items()}:
        raise ValueError("The second pass over the score blocks gave other rows than the first; make it repeatable.")
    return i2t, t2i


def recall(sims: Array, image_of_caption: Array, *, ks: Sequence[int] = (1, 5, 10)) -> RetrievalMetrics:
    """Recall at each k both ways, median and mean rank, from sims (I, T) and image_of_caption (T,).

    Any number of captions per image; see `ranks` for ties, images without captions, and what is refused.
    """
    return metrics_from_ranks(*ranks(sims, image_of_caption), ks=ks)


def metrics_from_ranks(i2t: Tensor, t2i: Tensor, *, ks: Sequence[int] = (1, 5, 10)) -> RetrievalMetrics:
    """Recall at each k of `ks`, median and mean rank of both directions, from ranks that are counted from 0.

    i2t (I,), t2i (T,): as `ranks` and `ranks_chunked` give them. Images of rank -1, which have no captions, are not
    counted. Raises ValueError for `ks` that are not whole numbers of at least 1.
    """
    check_cut_offs(ks)
    return RetrievalMetrics(_summary(i2t[i2t >= 0], ks), _summary(t2i, ks), images=len(i2t), captions=len(t2i))


def five_fold(
    sims: Array, image_of_caption: Array, folds: int = 5, *, ks: Sequence[int] = (1, 5, 10)
) -> RetrievalMetrics:
    """Mean of `recall` over `folds` equal runs of consecutive images with their captions (COCO 1K).

    Raises as `recall` does, and ValueError if the images do not divide evenly or a fold has no caption.
    """
    scores = matrix("sims", sims)
    images, captions = scores.shape
    owners = _owners(image_of_caption, captions, images, scores.device)
    if folds < 1 or images % folds:
        raise ValueError(f"{images} images cannot be cut into {folds} equal folds; choose a divisor of {images}.")
    size = images // folds
    parts = []
    for fold in range(folds):
        columns = (owners // size == fold).nonzero().squeeze(1)
        if len(columns) == 0:
            raise ValueError(f"Images {fold * size} to {(fold + 1) * size - 1} have no caption: a fold needs some.")
        block = scores[fold * size : (fold + 1) * size].index_select(1, columns)
        parts.append(recall(block, owners[columns] - fold * size, ks=ks))
    return RetrievalMetrics(
        _mean([part.i2t for part in parts]), _mean([part.t2i for part in parts]), images, captions, folds
    )


def rsum_by_image(i2t: Tensor, t2i: Tensor, image_of_caption: Array, *, ks: Sequence[int] = (1, 5, 10)) -> Tensor:
    """(I,) float64: what each image and its captions add to rSum, scaled so that the mean over the images is rSum.

    i2t (I,), t2i (T,): as `ranks` gives them. For comparing two models image by image. An image without captions adds
    nothing. Raises ValueError for `ks` that are not whole numbers of at least 1.
    """
    check_cut_offs(ks)
    cuts = torch.tensor(list(ks), device=i2t.device)
    asked = i2t >= 0
    found = ((i2t[:, None] < cuts).sum(dim=1) * asked).double() * (len(i2t) / max(1, int(asked.sum())))
    owners = _owners(image_of_caption, len(t2i), len(i2t), t2i.device)
    hits = (t2i[:, None] < cuts).sum(dim=1).double() * (len(i2t) / len(t2i))
    return 100 * found.index_add(0, owners, hits)


def _owners(image_of_caption: Array, captions: int, images: int, device: torch.device) -> Tensor:
    owners = labels("image_of_caption", image_of_caption, captions, device)
    low, high = int(owners.min()), int(owners.max())
    if low < 0 or high >= images:
        raise ValueError(
            f"image_of_caption runs from {low} to {high}, but the scores have {images} images, "
            f"so it must lie in 0 to {images - 1}."
        )
    return owners


def _checked(blocks: Blocks, captions: int) -> Iterator[tuple[int, Tensor]]:
    for start, values in blocks():
        block = matrix(f"The score block at row {start}", values)
        if block.shape[1] != captions or start < 0:
            raise ValueError(
                f"The score block at row {start} has shape {tuple(block.shape)}, but image_of_caption names "
                f"{captions} captions: one column each, rows counted from 0."
            )
        refuse_nan("The score matrix", block, start)
        yield start, block


def _image_ranks(block: Tensor, own: Tensor) -> Tensor:
    best = block.masked_fill(~own, -torch.inf).amax(dim=1, keepdim=True)
    rank = ((block >= best) & ~own).sum(dim=1)
    return rank.masked_fill(~own.any(dim=1), -1)


def _covered(lengths: Mapping[int, int]) -> int:
    """Number of rows if the blocks (first row -> rows) lie end to end from 0; else ValueError."""
    end = 0
    for start in sorted(lengths):
        if start != end:
            raise ValueError(f"The score blocks do not lie end to end: row {end} was due, but one starts at {start}.")
        end += lengths[start]
    return end


def _summary(rank: Tensor, ks: Sequence[int]) -> DirectionMetrics:
    ordered = rank.sort().values
    count = len(ordered)
    # As published: the median is rounded down, and both count the first place as 1.
    median = int(ordered[(count - 1) // 2] + ordered[count // 2]) // 2 + 1
    recalls = {int(k): 100.0 * int((ordered < k).sum()) / count for k in ks}
    return DirectionMetrics(recalls, float(median), int(ordered.sum()) / count + 1.0)


def _mean(parts: Sequence[DirectionMetrics]) -> DirectionMetrics:
    count = len(parts)
    return DirectionMetrics(
        {k: sum(part.recalls[k] for part in parts) / count for k in parts[0].recalls},
        sum(part.median_rank for part in parts) / count,
        sum(part.mean_rank for part in parts) / count,
    )
