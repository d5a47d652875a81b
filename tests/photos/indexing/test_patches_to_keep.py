"""Which patches a store keeps of a picture: half by their score, half spread over the rest of the picture."""

from __future__ import annotations

import pytest
import torch

from seps.retrieval.config import ModelConfig
from seps.retrieval.engine.keeping import fixed_patch_scores, patches_to_keep, spread
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from stores import model


def by_hand(scores: list[float], order: list[float], count: int) -> list[int]:
    """The best patches, then the others in the order of the spread."""
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: count - count // 2]
    others = sorted((place for place in range(len(scores)) if place not in best), key=lambda place: order[place])
    return sorted(best + others[: count // 2])


def test_half_are_the_best_and_half_are_spread() -> None:
    net = model()
    torch.manual_seed(0)
    cells = net.vision.num_patches
    images = ImageFeatures(torch.randn(3, net.vision.num_prefix_tokens + cells, net.config.embed_size))
    scores, order = fixed_patch_scores(net, images), spread(net.vision.grid_for(*net.image_size)).tolist()
    for count in (1, 2, 3, cells // 2, cells - 1, cells):
        kept = patches_to_keep(net, images, count)
        assert kept.tolist() == [by_hand(row, order, count) for row in scores.tolist()]
        alone = patches_to_keep(net, ImageFeatures(images.tokens[1:2]), count)
        assert torch.equal(alone, kept[1:2])


def test_a_head_without_selection_has_them_spread() -> None:
    """Whatever the patches are: those most like their mean, by which it once went, are background."""
    net = RetrievalModel(ModelConfig(image_size=(96, 96), embed_size=32, head="maxsim"))
    images = ImageFeatures(torch.randn(2, net.vision.num_prefix_tokens + 9, 32))
    order = spread((3, 3)).tolist()
    for count in (1, 4, 9):
        expected = sorted(sorted(range(9), key=lambda place: order[place])[:count])
        assert patches_to_keep(net, images, count).tolist() == [expected, expected]


@pytest.mark.parametrize("grid", [(16, 16), (24, 24), (16, 8), (7, 7), (1, 5)])
def test_the_first_cells_of_a_spread_leave_no_large_hole(grid: tuple[int, int]) -> None:
    order = spread(grid)
    cells = grid[0] * grid[1]
    assert order.shape == (cells,) and len(order.unique()) == cells
    assert float(order.min()) >= 0 and float(order.max()) < 1
    for count in (cells // 16, cells // 8, cells // 4):
        if count < 2:
            continue
        chosen = order.argsort()[:count]
        rows, columns = torch.arange(cells) // grid[1], torch.arange(cells) % grid[1]
        apart = (rows[:, None] - rows[chosen]) ** 2 + (columns[:, None] - columns[chosen]) ** 2
        farthest = float(apart.amin(dim=1).max()) ** 0.5
        # Squares of one chosen cell each have the side (cells / count) ** 0.5.
        assert farthest <= 1.6 * (cells / count) ** 0.5, (count, farthest)
