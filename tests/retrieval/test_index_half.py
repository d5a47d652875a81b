"""Indexing in bfloat16 where the processor has it: what is stored hardly changes, and other models are left alone."""

from __future__ import annotations

import pytest
import torch

from seps.encoders import ViT
from seps.retrieval.index import embedding
from seps.retrieval.pretrained import from_pretrained


def test_tokens_in_bfloat16_are_those_of_float32_within_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_pretrained("base")
    monkeypatch.setattr(embedding, "multiplies_bfloat16", lambda: True)
    vision = embedding.half_copy(model)
    assert isinstance(vision, ViT) and vision.patch.weight.dtype == torch.bfloat16
    assert model.vision.patch.weight.dtype == torch.float32
    pixels = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, half = model.encode_pixels(pixels), model.encode_pixels(pixels, vision)
    assert half.dtype == torch.float32
    cosines = torch.nn.functional.cosine_similarity(exact, half, dim=-1)
    assert cosines.min() > 0.99 and cosines.mean() > 0.999
    assert not torch.equal(exact, half)


def test_other_processors_and_encoders_keep_the_models_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "multiplies_bfloat16", lambda: True)
    assert embedding.half_copy(from_pretrained("mini")) is None
    monkeypatch.setattr(embedding, "multiplies_bfloat16", lambda: False)
    assert embedding.half_copy(from_pretrained("base")) is None
