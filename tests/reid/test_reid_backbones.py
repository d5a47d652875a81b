"""Backbones of the network: patches that overlap, and grids finer than the encoder's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from reid_toys import rgbnt201, toy_config

from seps.encoders import registry
from seps.encoders.vision import Preprocessing, TransformersVision
from seps.reid.network.backbone import OverlappingPatches, build_backbone
from seps.reid.task import ReidTask, load_dataset


@pytest.mark.parametrize("family", ["vit", "clip", "dinov2"])
def test_overlapping_patches(family: str) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings = {**small, "image_size": 32, "patch_size": 8}
    models = {
        "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**settings)),
        "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**settings)),
        "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**settings)),
    }
    made = models[family]()
    tower = getattr(made, "vision_model", made)
    half = Preprocessing((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    pixels = torch.rand(2, 3, 48, 24)
    plain = TransformersVision(tower, half, (32, 32)).eval()
    expected = plain(pixels)
    same = OverlappingPatches(plain, 8, (48, 24))
    torch.testing.assert_close(same(pixels), expected)
    finer = OverlappingPatches(plain, 6, (48, 24))
    assert finer.grid == (7, 3) and finer(pixels).shape == (2, 1 + 21, 16)
    with pytest.raises(ValueError, match="patch"):
        OverlappingPatches(plain, 9, (48, 24))


def test_embedded_encoder_with_a_finer_grid() -> None:
    pixels = torch.rand(1, 3, 64, 32)
    for stride, grid in ((8, (8, 4)), (16, (4, 2)), (32, (2, 1))):
        encoder = build_backbone("mini", (64, 32), stride, pretrained=False)
        assert encoder.grid == grid and encoder(pixels).shape == (1, grid[0] * grid[1], 1280)
    with pytest.raises(ValueError, match="8, 16 or 32"):
        build_backbone("mini", (64, 32), 12, pretrained=False)


@pytest.mark.parametrize(
    ("name", "size", "patches", "prefix"),
    [("dinov2-s", (56, 28), 8, 1), ("dinov3-s", (64, 32), 8, 5), ("dinov3-b", (64, 32), 8, 5)],
)
def test_dino_backbones_train(
    name: str, size: tuple[int, int], patches: int, prefix: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The preset with one narrow block and random weights: shape, a step, and the gate that sees early patches."""
    preset = registry.PRESETS[name]
    narrow = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setitem(registry.PRESETS, name, replace(preset, config={**preset.config, **narrow}))
    changes = {"encoder": name, "image_size": list(size), "stride": None, "selection": "gate"}
    config = toy_config(rgbnt201(tmp_path), "rgbnt201", model=changes)
    task = ReidTask(config, load_dataset(config.data))
    assert task.model.backbones[0].num_prefix_tokens == prefix and task.model.num_patches == patches
    batch = task.batch(0, 0, 0, 1)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = task.loss(batch, 0)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    # No parameter of the encoder is left without gradient.
    assert [n for n, p in task.model.backbones.named_parameters() if p.requires_grad and p.grad is None] == []
    task.reader.close()
