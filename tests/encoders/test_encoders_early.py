"""Patches by themselves: the tokens stay those of `forward`, and no patch knows of another far away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seps.encoders import EfficientNetLite0, Preprocessing, VisionEncoder, ViT, ViTConfig, vision_encoder
from seps.encoders.vision import HALF, onto_grid
from seps.reid.network.backbone import OverlappingPatches, build_backbone

FAMILIES = ("vit", "swin", "clip", "siglip", "dinov2", "registers", "ijepa")
WIDTHS = dict.fromkeys(FAMILIES, 32) | {"swin": 16}


def check(encoder: VisionEncoder, size: tuple[int, int], apart: int) -> None:
    """Tokens bit by bit, and early features that change only within `apart` patches of the changed pixels."""
    rows, columns = encoder.grid_for(*size)
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1))
    marked = pixels.clone()
    marked[..., : size[0] // rows, : size[1] // columns] = 0.0  # the first patch
    tokens, early = encoder.forward_with_early(pixels)
    assert early.shape == (2, rows * columns, encoder.early_width) and not early.requires_grad
    assert torch.equal(tokens, encoder(pixels))
    changed = (encoder.forward_with_early(marked)[1] != early).any(dim=2)[0].view(rows, columns)
    near = torch.zeros(rows, columns, dtype=torch.bool)
    near[: apart + 1, : apart + 1] = True
    assert changed[0, 0] and not changed[~near].any() and (~near).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(saved: Any, family: str) -> None:
    encoder = vision_encoder(saved(family), image_size=(48, 32))
    assert encoder.early_width == WIDTHS[family]
    check(encoder, (48, 32), 0)


@pytest.mark.parametrize("prefix", [0, 1])
def test_our_own_vit(prefix: int) -> None:
    torch.manual_seed(0)
    encoder = ViT(ViTConfig(patch_size=8, width=16, depth=2, heads=2, hidden=32, grid=(4, 4), prefix=prefix), (32, 16))
    check(encoder, (32, 16), 0)
    if prefix:
        pixels, added = torch.rand(2, 3, 32, 16), torch.rand(2, 16)
        tokens, early = encoder.forward_with_early(pixels, added)
        assert torch.equal(tokens, encoder(pixels, added))
        # What is added to CLS, a camera, is no part of what the patches are.
        assert torch.equal(early, encoder.forward_with_early(pixels)[1])
        with pytest.raises(ValueError, match="CLS"):
            encoder.forward_with_early(pixels, torch.rand(2, 3))


@pytest.mark.parametrize("stride", [16, 32])
def test_the_embedded_encoder(stride: int) -> None:
    torch.manual_seed(0)
    encoder = build_backbone("mini", (128, 64), stride, pretrained=False)
    assert isinstance(encoder, EfficientNetLite0)
    check(encoder, (128, 64), 1)  # its blocks see 19 pixels: a patch and its neighbours


def test_overlapping_patches(saved: Any) -> None:
    encoder = OverlappingPatches(vision_encoder(saved("vit")), 6, (32, 32))
    assert encoder.grid == (5, 5)
    check(encoder, (32, 32), 1)


def test_rows_of_a_finer_grid_are_averaged() -> None:
    rows = torch.rand(2, 6 * 4, 3)
    found = onto_grid(rows, (3, 2)).view(2, 3, 2, 3)
    fine = rows.view(2, 6, 4, 3)
    torch.testing.assert_close(found[:, 1, 0], fine[:, 2:4, 0:2].mean(dim=(1, 2)))
    with pytest.raises(ValueError, match="3x2"):
        onto_grid(rows[:, :13], (3, 2))


def test_an_encoder_without_them_says_so() -> None:
    class Plain(VisionEncoder):
        pass

    plain = Plain(width=4, num_prefix_tokens=0, image_size=(8, 8), stride=(8, 8), preprocessing=Preprocessing(*HALF))
    with pytest.raises(ValueError, match="themselves"):
        plain.forward_with_early(torch.rand(1, 3, 8, 8))
