"""What indexing with `base` saves: bfloat16 where the processor has it, and a quarter of the patches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from seps.encoders import ViT
from seps.retrieval.index import embedding
from seps.retrieval.index.build import IndexOptions, index_folder
from seps.retrieval.index.search import Searcher
from seps.retrieval.index.store import Store
from seps.retrieval.pretrained import embedded_folder, from_pretrained


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


def test_a_store_of_base_keeps_the_patches_that_matter(tmp_path: Path) -> None:
    """A quarter of them unless more are asked for; a store that is there keeps what it has."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("coffee-cup.jpg", "rabbit-lawn.jpg"):
        shutil.copy(embedded_folder("gallery") / name, photos)
    model = from_pretrained("base")
    index_folder(photos, tmp_path / "usual", model, "base", options=IndexOptions(bank=False))
    assert Store.open(tmp_path / "usual").settings.keep_patches == 64
    index_folder(photos, tmp_path / "all", model, "base", options=IndexOptions(keep_patches=256, bank=False))
    index_folder(photos, tmp_path / "all", model, "base", options=IndexOptions(bank=False))
    assert Store.open(tmp_path / "all").settings.keep_patches is None
    found = Searcher(tmp_path / "usual", model).search("a cup of coffee", 1)
    assert found[0].path == "coffee-cup.jpg"
    mini = from_pretrained("mini")
    index_folder(photos, tmp_path / "mini", mini, "mini", options=IndexOptions(bank=False))
    assert Store.open(tmp_path / "mini").settings.keep_patches is None
