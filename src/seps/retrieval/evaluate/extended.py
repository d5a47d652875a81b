"""Figures of COCO's test split with more right answers than its own: ECCV Caption's and CxC's, by eccv-caption.

COCO calls one image right for a caption, although others fit it as well. CxC and ECCV Caption name more of them, and
the package eccv-caption holds both lists by COCO's ids and computes the figures from ranked ids. Here a matrix of
scores becomes those lists.

Shape letters: I images, T captions, Q queries, C candidates.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from seps.images.sources import DataError
from seps.retrieval.data import ImageRecord, RetrievalDataset

RECALLS = (1, 5, 10)
_BLOCK_ENTRIES = 1 << 24
_COCO_FILE = re.compile(r"(?:COCO_(?:train|val)2014_)?([0-9]{12})\.\w+")
_NUMBER = re.compile(r"[0-9]{1,12}")

CaptionIds = Literal["given", "by order"]
"""Where the caption ids came from: from the data, or from the order of the images in the split."""


@dataclass(frozen=True)
class ExtendedDirection:
    """One direction, all in percent: mAP@R, R-Precision and R@1 of ECCV Caption, recalls of CxC."""

    eccv_map_at_r: float
    eccv_rprecision: float
    eccv_r1: float
    cxc_r1: float
    cxc_r5: float
    cxc_r10: float


@dataclass(frozen=True)
class ExtendedFigures:
    """Both directions; `i2t` asks with images, `t2i` with captions."""

    i2t: ExtendedDirection
    t2i: ExtendedDirection
    caption_ids: CaptionIds

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def load_answers() -> Any:
    """The lists of right answers: `eccv_caption.Metrics`. Raises ValueError where the package is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where ujson or tqdm are missing, which it can do without
            from eccv_caption import Metrics
    except ImportError as error:
        raise ValueError(
            "The figures of ECCV Caption and CxC need the package eccv-caption: pip install 'seps[eccv]', or leave "
            "out --extended."
        ) from error
    return Metrics()


@dataclass(frozen=True)
class Extended:
    """The right answers, and COCO's ids of a data set's images (I) and captions (T). `extended` makes one."""

    answers: Any
    image_ids: tuple[int, ...]
    caption_ids: tuple[int, ...]
    source: CaptionIds

    def figures(self, scores: Tensor) -> ExtendedFigures:
        """The figures of scores (I, T), higher is closer. Raises ValueError for another shape or NaN."""
        if scores.shape != (len(self.image_ids), len(self.caption_ids)):
            raise ValueError(
                f"The scores have shape {tuple(scores.shape)}, and there are {len(self.image_ids)} images and "
                f"{len(self.caption_ids)} captions."
            )
        return ExtendedFigures(self.direction("i2t", scores), self.direction("t2i", scores.T), self.source)

    def direction(self, way: Literal["i2t", "t2i"], scores: Tensor) -> ExtendedDirection:
        """One direction from scores (Q, C)."""
        sides = (self.image_ids, self.caption_ids) if way == "i2t" else (self.caption_ids, self.image_ids)
        # The figures look at as many candidates as a query has right answers, and at ten for the recalls.
        depth = max(*RECALLS, *(len(right) for right in self.answers.eccv_gts[way].values()))
        ranked = {way: ranked_ids(scores, *sides, depth)}
        with contextlib.redirect_stderr(io.StringIO()):  # the package draws its progress there, asked or not
            named = {name: value[way] for name, value in self.answers.eccv_metrics(ranked, way).items()}
        named |= {f"cxc_r{k}": self.answers.cxc_recalls(ranked, way, K=k)[way] for k in RECALLS}
        return ExtendedDirection(**{name: 100.0 * float(value) for name, value in named.items()})


def ranked_ids(scores: Tensor, queries: Sequence[int], candidates: Sequence[int], depth: int) -> dict[int, list[int]]:
    """By query id the ids of the `depth` best candidates, best first, from scores (Q, C); sorted block by block.

    Equal scores are in no particular order. Raises ValueError for NaN, which has no rank.
    """
    names = torch.tensor(candidates)
    depth = min(depth, len(candidates))
    rows = max(1, _BLOCK_ENTRIES // len(candidates))
    ranked: dict[int, list[int]] = {}
    for start in range(0, len(queries), rows):
        best = scores[start : start + rows].topk(depth, dim=1)
        if best.values[:, 0].isnan().any():  # topk puts NaN first
            raise ValueError("The score matrix holds NaN, which has no rank.")
        ranked.update(zip(queries[start : start + rows], names[best.indices.cpu()].tolist(), strict=True))
    return ranked


def extended(dataset: RetrievalDataset, answers: Any) -> Extended:
    """Find COCO's ids of all images and captions of `dataset`, which must be the whole test split.

    An image's id is in its file name (COCO_val2014_000000391895.jpg) or is the record's id. Captions have theirs as
    `caption_ids`; without, images in the order of the split with as many captions as it has are taken to have their
    captions in its order, too. Raises DataError, saying how to give the ids, where neither holds.
    """
    image_ids = _image_ids(dataset, answers.coco_gts["i2t"])
    given = [bool(record.caption_ids) for record in dataset.records]
    if any(given):
        if not all(given):
            raise DataError(
                f"{dataset.label}: image {dataset.records[given.index(False)].id!r} has no caption_ids, while others "
                "have: give them for all images."
            )
        return Extended(answers, image_ids, _given_captions(dataset, image_ids, answers.coco_gts["t2i"]), "given")
    in_order = [int(number) for number in answers.coco_ids]
    owners = [answers.coco_gts["t2i"][number][0] for number in in_order]
    if owners != [image_ids[row] for row in dataset.image_of_caption.tolist()]:
        raise DataError(
            f"{dataset.label} has no ids of its captions, and its images or captions are not in the order of COCO's "
            "test split (Karpathy's), which would tell them. Give COCO's own as \"caption_ids\" of each JSONL line, or "
            "in SPLIT_caption_ids.txt of the published layout, or leave out --extended."
        )
    return Extended(answers, image_ids, tuple(in_order), "by order")


def coco_image_id(record: ImageRecord) -> int | None:
    """COCO's id of an image: from its file name, else the record's id if it is a number; None without."""
    name = PurePosixPath(record.source.member or record.source.path.name).name
    match = _COCO_FILE.fullmatch(name)
    if match is not None:
        return int(match[1])
    return int(record.id) if _NUMBER.fullmatch(record.id) else None


def _image_ids(dataset: RetrievalDataset, split: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    found = [coco_image_id(record) for record in dataset.records]
    ids = [number for number in found if number in split]
    missing = len(split.keys() - set(ids))
    others = len(found) - len(set(ids))
    if missing or others:
        raise DataError(
            f"ECCV Caption and CxC are about the {len(split)} images of COCO's test split (Karpathy's), and "
            f"{dataset.label} is not it: {missing} of them are missing, and {others} of its images are of no use here "
            "(not of the split, or there twice). Evaluate the whole split with COCO's file names "
            "(COCO_val2014_000000391895.jpg) or COCO's number as id, or leave out --extended."
        )
    return tuple(number for number in ids if number is not None)


def _given_captions(
    dataset: RetrievalDataset, image_ids: Sequence[int], owner: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    ids = []
    for image, record in zip(image_ids, dataset.records, strict=True):
        for text in record.caption_ids:
            number = int(text) if _NUMBER.fullmatch(text) else None
            if number is None or image not in owner.get(number, ()):
                raise DataError(
                    f"{dataset.label}: {text!r} is not the id of one of the captions that COCO's test split "
                    f"(Karpathy's) has of image {record.id!r}. Give COCO's ids, of the first five captions of an image."
                )
            ids.append(number)
    if len(ids) != len(owner) or len(set(ids)) != len(ids):
        raise DataError(
            f"{dataset.label} has {len(set(ids))} of the {len(owner)} captions of COCO's test split (Karpathy's), and "
            f"{len(ids) - len(set(ids))} of them twice. Evaluate all of them, each once, or leave out --extended."
        )
    return tuple(ids)
