"""Maps of features and gradients: the arithmetic against definitions, the command's files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from reid_toys import SENSORS, rgbnt201, toy_config, toy_model

from seps.cli.main import main
from seps.reid.data import load
from seps.reid.show import embedding
from seps.reid.show.embedding import affinities, explained, pca, tsne
from seps.reid.show.feature_map import features_picture, neighbours, shots_of
from seps.reid.show.gradients import gradients_picture, overlay, pair_gradients, per_patch
from seps.reid.show.pictures import ranking
from seps.reid.task import make_reader


def groups(count: int = 4, each: int = 8, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    centres = 5 * torch.randn(count, width)
    return (centres[:, None] + 0.3 * torch.randn(count, each, width)).flatten(0, 1), torch.arange(
        count
    ).repeat_interleave(each)


def test_pca_has_the_two_largest_variances() -> None:
    vectors = torch.randn(40, 5) @ torch.diag(torch.tensor([1.0, 9.0, 0.1, 4.0, 0.5]))
    points = pca(vectors)
    covariance = torch.cov(vectors.double().T)
    largest = torch.linalg.eigvalsh(covariance).flip(0)
    torch.testing.assert_close(points.var(dim=0), largest[:2])
    assert explained(vectors) == pytest.approx(float(largest[:2].sum() / largest.sum()))
    assert pca(torch.randn(3, 1)).shape == (3, 2)


def test_each_row_of_the_affinities_has_the_perplexity() -> None:
    vectors, _ = groups()
    vectors = vectors.double()
    found = affinities(vectors, 6.0)
    torch.testing.assert_close(found, found.T)
    assert float(found.sum()) == pytest.approx(1)
    # The rows before they were made symmetric: P_j|i + P_i|j is what is left of them.
    for i in (0, 9):
        squares = (vectors - vectors[i]).square().sum(dim=1)
        squares[i] = math.inf
        low, high = 1e-6, 1e6
        for _ in range(200):
            middle = math.sqrt(low * high)
            row = torch.softmax(-squares * middle, dim=0)
            wide = float(-torch.xlogy(row, row).sum()) > math.log(6.0)
            low, high = (middle, high) if wide else (low, middle)
        assert (2 * len(vectors) * found[i] >= row - 1e-9).all()


def test_the_gradient_is_that_of_the_divergence() -> None:
    vectors, _ = groups(3, 4)
    wanted = affinities(vectors.double(), 3.0)
    points = torch.randn(len(vectors), 2, dtype=torch.float64, requires_grad=True)
    squares = (points[:, None] - points[None]).square().sum(dim=2)
    kernel = (1 / (1 + squares)) * (1 - torch.eye(len(points), dtype=torch.float64))
    shown = kernel / kernel.sum()
    off = ~torch.eye(len(points), dtype=torch.bool)
    (wanted[off] * (wanted[off] / shown[off]).log()).sum().backward()
    assert points.grad is not None
    torch.testing.assert_close(embedding._gradient(points.detach(), wanted), points.grad)


def test_tsne_keeps_neighbours_and_is_the_same_every_time() -> None:
    vectors, labels = groups()
    points = tsne(vectors)
    nearest = torch.cdist(points, points).fill_diagonal_(math.inf).argmin(dim=1)
    assert torch.equal(labels[nearest], labels)
    assert torch.equal(points, tsne(vectors))
    assert tsne(vectors[:3]).shape == (3, 2)
    assert torch.isfinite(tsne(torch.ones(5, 4))).all()
    with pytest.raises(ValueError, match="PCA"):
        tsne(torch.zeros(embedding.LARGEST + 1, 2))


def test_a_patch_counts_by_what_the_similarity_would_lose() -> None:
    torch.manual_seed(3)
    model = toy_model().eval()
    pixels = torch.randint(0, 255, (2, 3, 3, 64, 32), dtype=torch.uint8)
    strengths, keep = pair_gradients(model, pixels, torch.zeros(2, dtype=torch.long))
    assert strengths.shape == (2, 3, 8) and keep is not None and keep.shape == (2, 3, 8)
    assert all(parameter.grad is None for parameter in model.parameters())

    torch.testing.assert_close(strengths, per_patch(images_effect(model, pixels), model.grid))
    blank = (255 * model.blank(pixels.float())).round().to(torch.uint8)
    shown = pixels.clone()
    shown[0, 1] = blank[0, 1]
    strengths, _ = pair_gradients(model, shown, torch.zeros(2, dtype=torch.long))
    assert float(strengths[0, 1].sum()) < 0.01 * float(strengths[0, 0].sum())


def images_effect(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """|gradient x (pixel - mean)| of every pixel, channels added, by the network's own call."""
    images = (pixels.float() / 255).requires_grad_(True)
    vectors = model.embed(images).pattern(3).view(2, 2, 48)
    torch.cosine_similarity(vectors[0], vectors[1], dim=1).mean().backward()
    assert images.grad is not None
    found = (images.grad * (images - model.blank(images))).detach().abs().sum(dim=2)
    for parameter in model.parameters():
        parameter.grad = None
    return found


def test_pixels_are_added_by_patch() -> None:
    values = torch.arange(4 * 6.0).view(1, 4, 6)
    expected = [values[0, r : r + 2, c : c + 3].sum() for r in (0, 2) for c in (0, 3)]
    assert per_patch(values, (2, 2))[0].tolist() == expected
    pixels = torch.full((2, 3, 4, 6), 100, dtype=torch.uint8)
    shown = overlay(pixels, torch.tensor([[0.0, 0, 0, 9], [0, 0, 0, 0]]), (2, 2))
    assert shown[0, :, 3, 5].sum() > shown[0, :, 0, 0].sum() and torch.equal(shown[1, :, 0, 0], shown[0, :, 0, 0])
    # The strongest patch has the lightest shade, a fourth of its strength the second one.
    quarter = overlay(pixels, torch.tensor([[0.0, 1, 4, 4], [0, 0, 0, 4]]), (2, 2))
    for (row, column), shade in (((3, 5), (252, 255, 164)), ((0, 3), (87, 16, 110))):
        expected = 0.35 * 100 + 0.65 * torch.tensor(shade, dtype=torch.float32)
        torch.testing.assert_close(quarter[0, :, row, column].float(), expected, atol=1, rtol=0)


def test_a_map_takes_shots_of_identities_spread_over_the_queried_ones(tmp_path: Path) -> None:
    dataset = load("rgbnt201", rgbnt201(tmp_path))
    records, queries = shots_of(dataset, 2)
    assert len({record.pid for record in records}) == 2 and len(records) == queries == 8
    features = torch.nn.functional.normalize(torch.eye(8)[:, :4] + torch.eye(8)[:, 4:] + 0.01, dim=1)
    # Shots i and i + 4 point the same way: they are of two identities.
    assert "same identity 0%" in neighbours(features, dataset, records)
    model, config = toy_model(cameras=2).eval(), toy_config(tmp_path, "rgbnt201")
    with make_reader(config, dataset) as reader:
        for projection in ("pca", "tsne"):
            shown = features_picture(model, dataset, reader, identities=3, projection=projection)
            assert len(shown.getcolors(1 << 20) or ()) > 10
        matrix = ranking(model, dataset, reader)
        for pattern in (None, 1):
            assert gradients_picture(model, dataset, reader, matrix, [0, 5], pattern).height > 4 * 64


@pytest.mark.parametrize("fusion", ["sdtps", pytest.param("concat", marks=pytest.mark.slow)])
def test_the_command_writes_four_pictures(fusion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rgbnt201(tmp_path / "data")
    small = {"data.layout": "rgbnt201", "data.root": tmp_path / "data", "data.identities": 2, "data.images": 2}
    small |= {"data.holdout": 1, "model.image_size": "[64,32]", "model.width": 16, "model.stride": 16}
    small |= {"model.pretrained": "false", "model.aggr_ratio": 0.5, "train.epochs": 1, "model.fusion": fusion}
    words = ["reid", "train", "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main([*words, *(word for name, value in small.items() for word in (f"--{name}", str(value)))]) == 0
    capsys.readouterr()
    show = ["reid", "show", str(tmp_path / "run"), "--out", str(tmp_path / "pictures"), "--device", "cpu"]
    assert main([*show, "--queries", "2"]) == 0
    plain = {Path(line).name for line in capsys.readouterr().out.split()}
    assert main([*show, "--queries", "2", "--features", "--projection", "pca", "--identities", "2"]) == 0
    names = {Path(line).name for line in capsys.readouterr().out.split()}
    assert names - plain == {"gradients.png", "features.png"}
    assert ("kept.png" in plain) == (fusion == "sdtps")
    for name in names:
        Image.open(tmp_path / "pictures" / name).verify()
    Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / "features.png")
    assert main([*show, "--features"]) == 2
    assert main(show) == 0
    assert len(SENSORS) == 3
