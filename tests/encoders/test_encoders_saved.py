"""Encoders saved without their weights: rebuilt from the files alone, they take the weights and compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seps.encoders import EfficientNetLite0, text_encoder, vision_encoder
from seps.encoders.saved import save_text_files, save_vision_files


@pytest.mark.parametrize("family", ["vit", "swin", "clip", "siglip", "dinov2", "registers", "ijepa"])
def test_vision_encoders_come_back(saved: Any, tmp_path: Path, family: str) -> None:
    encoder = vision_encoder(saved(family), image_size=(32, 48) if family == "vit" else None)
    assert save_vision_files(encoder, tmp_path / "vision")
    assert not list((tmp_path / "vision").glob("*.safetensors"))
    back = vision_encoder(tmp_path / "vision", pretrained=False)
    back.load_state_dict(encoder.state_dict())
    pixels = torch.rand(2, 3, *encoder.image_size)
    assert back.image_size == encoder.image_size and torch.equal(back(pixels), encoder(pixels))


@pytest.mark.parametrize("family", ["bert", "roberta", "clip", "siglip"])
def test_text_encoders_come_back(saved: Any, tmp_path: Path, family: str) -> None:
    encoder = text_encoder(saved(family))
    assert save_text_files(encoder, tmp_path / "text")
    back = text_encoder(tmp_path / "text", pretrained=False)
    back.load_state_dict(encoder.state_dict())
    one, two = (part.tokenize(["a dog runs", "the park , in a t-shirt"]) for part in (encoder, back))
    assert torch.equal(one.ids, two.ids) and back.max_length == encoder.max_length
    assert torch.equal(encoder(one.ids, one.mask), back(two.ids, two.mask))


def test_the_embedded_encoder_needs_no_files(tmp_path: Path) -> None:
    assert not save_vision_files(EfficientNetLite0((32, 32), pretrained=False), tmp_path / "vision")
    assert not (tmp_path / "vision").exists()
