"""Recall both ways: golden figures, a plain loop twin, ties, streams and refusals."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from messages import naming
from seps.metrics import five_fold, metrics_from_ranks, ranks, ranks_chunked, recall, rsum_by_image

GOLDEN = Path(__file__).parents[1] / "golden" / "retrieval_metrics.safetensors"
recall_module = importlib.import_module("seps.metrics.recall")


def loop_ranks(sims: Tensor, owners: Tensor) -> tuple[list[int], list[int]]:
    scores, owner = sims.tolist(), owners.tolist()
    i2t, t2i = [], []
    for image, row in enumerate(scores):
        own = [row[c] for c in range(len(owner)) if owner[c] == image]
        others = [row[c] for c in range(len(owner)) if owner[c] != image]
        i2t.append(sum(score >= max(own) for score in others) if own else -1)
    for caption, image in enumerate(owner):
        mine = scores[image][caption]
        t2i.append(sum(scores[i][caption] >= mine for i in range(len(scores)) if i != image))
    return i2t, t2i


def random_case(seed: int, images: int, captions: int, levels: int) -> tuple[Tensor, Tensor]:
    """Few levels make many ties; owners drawn freely leave some images without captions."""
    generator = torch.Generator().manual_seed(seed)
    sims = torch.randint(0, levels, (images, captions), generator=generator).float()
    return sims, torch.randint(0, images, (captions,), generator=generator)


def test_golden() -> None:
    with safe_open(GOLDEN, "pt") as file:
        sims, i2t, t2i = (file.get_tensor(name) for name in ("sims", "i2t", "t2i"))
        rsum = float(file.metadata()["rsum"])
    result = recall(sims, torch.arange(200) // 5)
    for got, want in ((result.i2t, i2t), (result.t2i, t2i)):
        figures = [got.r1, got.r5, got.r10, got.median_rank, got.mean_rank]
        assert figures == pytest.approx(want.tolist(), abs=1e-9)
    assert result.rsum == pytest.approx(rsum, abs=1e-9)
    assert (result.images, result.captions) == (40, 200)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 14), st.integers(1, 6))
def test_ranks_equal_the_loop(seed: int, images: int, captions: int, levels: int) -> None:
    sims, owners = random_case(seed, images, captions, levels)
    i2t, t2i = ranks(sims, owners)
    assert (i2t.tolist(), t2i.tolist()) == loop_ranks(sims, owners)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_stream_in_any_order_equals_the_matrix(rows: int) -> None:
    sims, owners = random_case(3, 23, 61, 5)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for start in reversed(range(0, 23, rows)):
            yield start, sims[start : start + rows]

    for got, want in zip(ranks_chunked(blocks, owners), loop_ranks(sims, owners), strict=True):
        assert got.tolist() == want


@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16, torch.float64])
def test_blocks_of_several_dtypes_are_ranked_by_what_they_hold(first: torch.dtype) -> None:
    """A caption's own score is compared as it is, not rounded to the dtype of another block."""
    # Own scores that lie between two numbers of half precision, each with a wrong image just below or above.
    sims = torch.tensor([[0.5, 0.1, 0.2], [0.7, 1.0003, 0.2], [0.25, 1.0002, 0.9]], dtype=torch.float64)
    owners, kinds = [0, 1, 2], [first, torch.float32, torch.float64]

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for row, kind in enumerate(kinds):
            yield row, sims[row : row + 1].to(kind)

    held = torch.cat([block.double() for _, block in blocks()])
    assert [part.tolist() for part in ranks_chunked(blocks, owners)] == list(loop_ranks(held, torch.tensor(owners)))


@pytest.mark.parametrize("ks", [(1.5,), (1, True), (0,), (), ("5",), (1, 5.0), 5])
def test_cut_offs_are_whole_numbers(ks: object) -> None:
    sims, owners = random_case(4, 8, 12, 3)
    i2t, t2i = ranks(sims, owners)
    for call in (
        lambda: recall(sims, owners, ks=ks),
        lambda: five_fold(sims, owners, 1, ks=ks),
        lambda: metrics_from_ranks(i2t, t2i, ks=ks),
        lambda: rsum_by_image(i2t, t2i, owners, ks=ks),
    ):
        with pytest.raises(ValueError, match="ks must"):
            call()


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sims, owners = random_case(4, 31, 50, 9)
    whole = recall(sims, owners)
    monkeypatch.setattr(recall_module, "_BLOCK_ENTRIES", 120)
    assert recall(sims, owners) == whole


def test_all_tied_is_the_worst_rank() -> None:
    i2t, t2i = ranks(torch.zeros(4, 8), torch.arange(8) // 2)
    assert i2t.tolist() == [6] * 4
    assert t2i.tolist() == [3] * 8


def test_no_score_at_all_is_the_worst_rank() -> None:
    sims = torch.full((2, 2), -math.inf)
    assert [part.tolist() for part in ranks(sims, [0, 1])] == [[1, 1], [1, 1]]


def test_perfect_scores_and_image_without_caption() -> None:
    sims = torch.tensor([[9.0, 8.0, 0.0], [0.0, 0.0, 9.0], [1.0, 1.0, 1.0]])
    result = recall(sims, torch.tensor([0, 0, 1]))
    assert result.rsum == 600.0
    assert result.i2t.median_rank == result.i2t.mean_rank == 1.0
    assert ranks(sims, torch.tensor([0, 0, 1]))[0].tolist() == [0, 0, -1]


def test_half_precision_and_plain_lists() -> None:
    sims, owners = random_case(5, 12, 30, 20)
    assert recall(sims.half(), owners) == recall(sims.numpy(), owners.tolist()) == recall(sims.double(), owners)


def test_median_rounds_down_and_other_cut_offs() -> None:
    result = metrics_from_ranks(torch.tensor([0, 3]), torch.tensor([0, 1, 2, 50]), ks=(1, 3))
    assert (result.i2t.median_rank, result.i2t.mean_rank) == (2.0, 2.5)
    assert (result.t2i.median_rank, result.t2i.mean_rank) == (2.0, 14.25)
    assert result.t2i.recalls == {1: 25.0, 3: 75.0}
    assert result.rsum == 50.0 + 50.0 + 25.0 + 75.0
    with pytest.raises(ValueError, match=naming("5", "computed")):
        _ = result.i2t.r5


def test_as_dict_is_json() -> None:
    result = recall(*random_case(6, 12, 30, 20))
    read = json.loads(json.dumps(result.as_dict()))
    assert read["rsum"] == result.rsum
    assert read["t2i"]["r10"] == result.t2i.r10
    assert (read["images"], read["captions"], read["folds"]) == (12, 30, 1)


def test_five_fold_is_the_mean_of_the_folds() -> None:
    sims, owners = random_case(7, 20, 90, 30)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    folds = []
    for first in range(0, 20, 4):
        mine = (owners >= first) & (owners < first + 4)
        folds.append(recall(sims[first : first + 4, mine], owners[mine] - first))
    result = five_fold(sims[:, order], owners[order])
    assert result.rsum == pytest.approx(sum(fold.rsum for fold in folds) / 5)
    assert result.t2i.mean_rank == pytest.approx(sum(fold.t2i.mean_rank for fold in folds) / 5)
    assert result.i2t.median_rank == pytest.approx(sum(fold.i2t.median_rank for fold in folds) / 5)
    assert (result.images, result.captions, result.folds) == (20, 90, 5)
    assert five_fold(sims, owners, folds=1) == recall(sims, owners)


def test_refusals() -> None:
    sims, owners = random_case(8, 6, 12, 9)
    with pytest.raises(ValueError, match=naming("(6,)")):
        recall(sims[:, 0], owners)
    with pytest.raises(ValueError, match=naming("(12,)")):
        recall(sims, owners[:-1])
    with pytest.raises(ValueError, match="numbers"):
        recall(sims, owners.float())
    with pytest.raises(ValueError, match="5"):
        recall(sims, owners.clone().fill_(6))
    with pytest.raises(ValueError, match="ks"):
        recall(sims, owners, ks=())
    with pytest.raises(ValueError, match="equal"):
        five_fold(sims, owners)
    with pytest.raises(ValueError, match=naming("3", "5", "caption")):
        five_fold(sims, owners % 3, folds=2)


def test_nan_is_refused_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sims, owners = random_case(9, 6, 12, 9)
    sims[4, 7] = math.nan
    monkeypatch.setattr(recall_module, "_BLOCK_ENTRIES", 36)
    with pytest.raises(ValueError, match=naming("NaN", "4", "7")):
        recall(sims, owners)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 4), naming("2", "row")),
        ((0, 0, 2), "twice"),
        ((), "blocks"),
        ((-1,), "counted"),
    ],
)
def test_broken_streams_are_refused(starts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranks_chunked(lambda: [(start, torch.zeros(2, 3)) for start in starts], [0, 1, 0])


def test_second_pass_must_repeat_the_first() -> None:
    passes = iter([[(0, torch.zeros(2, 3)), (2, torch.zeros(2, 3))], [(0, torch.zeros(2, 3))]])
    with pytest.raises(ValueError, match="second"):
        ranks_chunked(lambda: next(passes), [0, 1, 3])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu() -> None:
    sims, owners = random_case(10, 40, 130, 50)
    assert recall(sims.cuda(), owners) == recall(sims, owners)
