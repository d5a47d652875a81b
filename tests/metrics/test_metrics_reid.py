"""CMC, mAP and mINP: golden figures, a plain loop twin, ties, scenes and refusals."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from messages import naming
from seps.metrics import cmc_map, reid_metrics

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "reid_metrics.safetensors")
IDS = tuple(GOLDEN[name] for name in ("q_pids", "g_pids", "q_camids", "g_camids"))
reid_module = importlib.import_module("seps.metrics.reid")


def loop_twin(
    distmat: Tensor, q_pids: Tensor, g_pids: Tensor, q_place: Tensor, g_place: Tensor, reach: int
) -> tuple[list[float], float, float, int]:
    """One query at a time, one gallery entry at a time."""
    curve, precisions, inverses = [0.0] * reach, [], []
    for q, row in enumerate(distmat.tolist()):
        order = sorted(range(len(row)), key=lambda g: (row[g], g))
        hits = []
        for g in order:
            same = g_pids[g] == q_pids[q]
            if not (same and g_place[g] == q_place[q]):
                hits.append(bool(same))
        places = [place for place, hit in enumerate(hits, start=1) if hit]
        if places:
            precisions.append(sum(i / place for i, place in enumerate(places, start=1)) / len(places))
            inverses.append(len(places) / places[-1])
            for place in range(places[0] - 1, reach):
                curve[place] += 1
    count = len(precisions)
    if not count:
        return curve, math.nan, math.nan, 0
    return [c / count for c in curve], sum(precisions) / count, sum(inverses) / count, count


def test_golden() -> None:
    cmc, mean_precision = cmc_map(GOLDEN["distmat"], *IDS)
    torch.testing.assert_close(cmc, GOLDEN["cmc"], rtol=0, atol=1e-6)
    assert mean_precision == pytest.approx(GOLDEN["mAP"].item(), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 25), st.integers(1, 12))
def test_equals_the_loop(seed: int, queries: int, gallery: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    distmat = torch.randint(0, levels, (queries, gallery), generator=generator).float()
    ids = [torch.randint(0, 3, (n,), generator=generator) for n in (queries, gallery, queries, gallery)]
    reach = min(10, gallery)
    curve, precision, inverse, count = loop_twin(distmat, *ids, reach)
    if count == 0:
        with pytest.raises(ValueError, match="queries"):
            reid_metrics(distmat, *ids, max_rank=10)
        return
    result = reid_metrics(distmat, *ids, max_rank=10)
    assert result.cmc.tolist() == pytest.approx(curve, abs=1e-6)
    assert (result.mAP, result.mINP) == pytest.approx((precision, inverse), abs=1e-12)
    assert result.valid_queries == count


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reid_metrics(GOLDEN["distmat"], *IDS)
    monkeypatch.setattr(reid_module, "_BLOCK_ENTRIES", 7 * 160)
    parts = reid_metrics(GOLDEN["distmat"], *IDS)
    assert torch.equal(whole.cmc, parts.cmc)
    assert (whole.mAP, whole.mINP) == pytest.approx((parts.mAP, parts.mINP), abs=1e-14)


def test_scenes_take_the_place_of_cameras() -> None:
    generator = torch.Generator().manual_seed(1)
    q_scenes, g_scenes = (torch.randint(0, 4, (n,), generator=generator) for n in (40, 160))
    result = reid_metrics(GOLDEN["distmat"], *IDS, q_sceneids=q_scenes, g_sceneids=g_scenes)
    curve, precision, inverse, count = loop_twin(GOLDEN["distmat"], *IDS[:2], q_scenes, g_scenes, 50)
    assert result.cmc.tolist() == pytest.approx(curve, abs=1e-6)
    assert (result.mAP, result.mINP, result.valid_queries) == pytest.approx((precision, inverse, count))
    assert result.mAP != pytest.approx(reid_metrics(GOLDEN["distmat"], *IDS).mAP, abs=1e-4)


def test_worked_example() -> None:
    # In order: same camera (passed over), right, wrong, right. AP = (1/1 + 2/3) / 2, mINP = 2/3.
    result = reid_metrics([[0.1, 0.2, 0.3, 0.4]], [5], [5, 5, 6, 5], [0], [0, 1, 0, 2])
    assert result.cmc.tolist() == [1.0] * 4
    assert result.mAP == pytest.approx(5 / 6)
    assert result.mINP == pytest.approx(2 / 3)
    assert json.loads(json.dumps(result.as_dict())) == pytest.approx(
        {"mAP": 500 / 6, "mINP": 200 / 3, "r1": 100.0, "valid_queries": 1}
    )


def test_equal_distances_keep_the_gallery_order() -> None:
    ids = ([1], [2] * 30 + [1] + [2] * 30, [0], [1] * 61)
    cmc, mean_precision = cmc_map(torch.zeros(1, 61), *ids)
    assert int(cmc.sum()) == 20
    assert mean_precision == pytest.approx(1 / 31)


def test_refusals() -> None:
    distmat = GOLDEN["distmat"].clone()
    with pytest.raises(ValueError, match=naming("g_pids", "(160,)")):
        cmc_map(distmat, IDS[0], IDS[1][:-1], *IDS[2:])
    with pytest.raises(ValueError, match="distmat"):
        cmc_map(distmat[0], *IDS)
    with pytest.raises(ValueError, match="max_rank"):
        cmc_map(distmat, *IDS, max_rank=0)
    with pytest.raises(ValueError, match="side"):
        reid_metrics(distmat, *IDS, q_sceneids=IDS[2])
    with pytest.raises(ValueError, match=naming("40", "queries")):
        cmc_map(distmat, IDS[0] + 100, *IDS[1:])
    distmat[3, 5] = math.nan
    with pytest.raises(ValueError, match=naming("NaN", "3", "5")):
        cmc_map(distmat, *IDS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu() -> None:
    here, there = reid_metrics(GOLDEN["distmat"], *IDS), reid_metrics(GOLDEN["distmat"].cuda(), *IDS)
    assert torch.equal(here.cmc, there.cmc)
    assert (here.mAP, here.mINP) == pytest.approx((there.mAP, there.mINP), abs=1e-12)


def test_whole_numbers_are_ranked_exactly() -> None:
    """Squared distances as whole numbers: 2 ** 24 and the next one are the same float32."""
    matrix = np.array([[2**24 + 1, 2**24]])
    result = reid_metrics(matrix, [1], [0, 1], [0], [1, 1])
    assert (result.mAP, float(result.cmc[0])) == (1.0, 1.0)


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    """A reversed array is read; names and gaps are refused in a sentence."""
    reversed_rows = np.array([[0.1, 0.2], [0.4, 0.3]])[::-1]
    assert reid_metrics(reversed_rows, [1, 1], [1, 2], [0, 0], [1, 1]).mAP == 0.75
    matrix, ids = [[0.1, 0.2]], ([1], [1, 2], [0], [1, 1])
    with pytest.raises(ValueError, match="q_pids"):
        reid_metrics(matrix, ["anna"], *ids[1:])
    with pytest.raises(ValueError, match="g_pids"):
        reid_metrics(matrix, [1], np.array(["anna", "bert"]), *ids[2:])
    for broken in (None, [[0.1, 0.2], [0.3]], np.array([[0.1, None]], dtype=object)):
        with pytest.raises(ValueError, match="distmat"):
            reid_metrics(broken, *ids)  # type: ignore[arg-type]
