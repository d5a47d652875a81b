"""k-reciprocal re-ranking: golden figures, a dense twin, chunks, ties and refusals."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from seps.metrics import cmc_map, rerank

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "reid_metrics.safetensors")
rerank_module = importlib.import_module("seps.metrics.rerank")


def dense_twin(
    query: Tensor, gallery: Tensor, k1: int, k2: int, weight: float, dtype: type[np.floating]
) -> npt.NDArray[np.float64]:
    """The formula with N x N matrices and Python sets; sums of minima are rounded to `dtype` at each step."""
    features = torch.cat([query, gallery]).double().numpy()
    total, asked = len(features), len(query)
    distance = ((features[:, None] - features[None]) ** 2).sum(-1)
    order = np.argsort(distance, kind="stable", axis=1)
    scaled = distance / np.maximum(distance.max(1, keepdims=True), np.finfo(np.float32).tiny)

    def mutual(i: int, k: int) -> list[int]:
        return [j for j in order[i, : k + 1] if i in order[j, : k + 1]]

    encoding = np.zeros((total, total), dtype)
    for i in range(total):
        own = mutual(i, k1)
        members = set(own)
        for j in own:
            offered = mutual(j, round(k1 / 2))
            if 3 * len(set(offered) & set(own)) > 2 * len(offered):
                members |= set(offered)
        chosen = sorted(members)
        strength = np.exp(-scaled[i, chosen])
        encoding[i, chosen] = strength / strength.sum()
    encoding = np.stack([encoding[order[i, :k2]].astype(np.float64).mean(0) for i in range(total)]).astype(dtype)
    shared = np.zeros((asked, total), dtype)
    for j in range(total):
        shared = shared + np.minimum(encoding[:asked, j, None], encoding[None, :, j])
    jaccard = 1 - shared / (2 - shared)
    return (jaccard * dtype(1 - weight) + weight * scaled[:asked])[:, asked:]


def features(seed: int, count: int, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(6, width, generator=torch.Generator().manual_seed(99))
    return centres[torch.arange(count) % 6] + 0.8 * torch.randn(count, width, generator=generator)


def test_golden() -> None:
    distances = rerank(GOLDEN["query"], GOLDEN["gallery"], k1=20, k2=6, lambda_value=0.3)
    torch.testing.assert_close(distances, GOLDEN["rerank_distmat"], rtol=0, atol=1e-5)
    ids = (GOLDEN[name] for name in ("q_pids", "g_pids", "q_camids", "g_camids"))
    cmc, mean_precision = cmc_map(distances, *ids)
    torch.testing.assert_close(cmc, GOLDEN["rerank_cmc"], rtol=0, atol=1e-6)
    assert mean_precision == pytest.approx(GOLDEN["rerank_mAP"].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("queries", "gallery", "k1", "k2", "weight"),
    [(7, 40, 20, 6, 0.3), (12, 60, 5, 1, 0.0), (3, 50, 9, 14, 0.5), (2, 6, 20, 6, 0.3), (1, 1, 3, 2, 0.7)],
)
def test_equals_the_dense_twin(queries: int, gallery: int, k1: int, k2: int, weight: float) -> None:
    query, rest = features(1, queries), features(2, gallery)
    got = rerank(query.double(), rest.double(), k1, k2, weight, dtype=torch.float64)
    want = dense_twin(query, rest, k1, k2, weight, np.float64)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-9)
    half = rerank(query, rest, k1, k2, weight)
    assert half.dtype == torch.float32
    # A value on the edge of two float16 neighbours may fall either way; it must be rare and one step at most.
    gap = np.abs(half.numpy() - dense_twin(query, rest, k1, k2, weight, np.float16))
    assert gap.max() < 2e-3
    assert (gap > 1e-5).mean() < 0.02


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, rest = features(3, 30), features(4, 90)
    whole = rerank(query, rest, 10, 4, dtype=torch.float32)
    monkeypatch.setattr(rerank_module, "_TILE_ENTRIES", 120 * 11)
    monkeypatch.setattr(rerank_module, "_BLOCK_ENTRIES", 500)
    monkeypatch.setattr(rerank_module, "_QUERY_ROWS", 7)
    torch.testing.assert_close(rerank(query, rest, 10, 4, dtype=torch.float32), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tile", [80, 80 * 9, 1 << 20])
def test_ties_go_by_index(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    # Whole-numbered features: distances are exact, and most of them are equal.
    points = torch.randint(0, 3, (80, 2), generator=torch.Generator().manual_seed(5)).double()
    monkeypatch.setattr(rerank_module, "_TILE_ENTRIES", tile)
    got = rerank(points[:20], points[20:], 6, 3, dtype=torch.float64)
    np.testing.assert_allclose(got.numpy(), dense_twin(points[:20], points[20:], 6, 3, 0.3, np.float64), atol=1e-9)


def test_equal_features_everywhere_are_no_division_by_zero() -> None:
    query, rest = torch.ones(3, 4).double(), torch.ones(40, 4).double()
    got = rerank(query, rest, 5, 2, dtype=torch.float64)
    np.testing.assert_allclose(got.numpy(), dense_twin(query, rest, 5, 2, 0.3, np.float64), rtol=0, atol=1e-9)


def test_inputs_are_left_alone_and_gradients_ignored() -> None:
    query, rest = features(6, 5).requires_grad_(), features(7, 30)
    before = query.detach().clone()
    distances = rerank(query, rest, 5, 2)
    assert not distances.requires_grad
    assert torch.equal(query, before)
    assert distances.shape == (5, 30)
    torch.testing.assert_close(rerank(before.numpy(), rest.numpy(), 5, 2), distances)


def test_only_the_original_distance_when_its_weight_is_one() -> None:
    query, rest = features(8, 5), features(9, 30)
    everything = torch.cat([query, rest])
    scale = torch.cdist(query, everything).square().amax(dim=1, keepdim=True)
    want = torch.cdist(query, rest).square() / scale
    torch.testing.assert_close(rerank(query, rest, 5, 2, 1.0), want, rtol=0, atol=1e-5)


def test_refusals() -> None:
    query, rest = features(1, 4), features(2, 9)
    with pytest.raises(ValueError, match="width"):
        rerank(query[:, :3], rest)
    with pytest.raises(ValueError, match="gallery"):
        rerank(query, rest[:0])
    with pytest.raises(ValueError, match="k1=0"):
        rerank(query, rest, k1=0)
    with pytest.raises(ValueError, match=r"from 0 to 1; got 1\.5"):
        rerank(query, rest, lambda_value=1.5)
    with pytest.raises(ValueError, match=r"torch\.int8"):
        rerank(query, rest, dtype=torch.int8)
    with pytest.raises(ValueError, match="NaN"):
        rerank(query / 0, rest)
    # Finite, but their squares are not: the distances were NaN.
    with pytest.raises(ValueError, match="large"):
        rerank(query * 1e25, rest * 1e25)
    assert rerank(query.double() * 1e25, rest.double() * 1e25).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu() -> None:
    query, rest = features(1, 30).double(), features(2, 90).double()
    there = rerank(query.cuda(), rest.cuda(), dtype=torch.float64).cpu()
    torch.testing.assert_close(there, rerank(query, rest, dtype=torch.float64), rtol=0, atol=1e-9)
