"""Stores of models whose head selects no patches: searched by the score of that head, also with few patches kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seps.images.decoding import read_image
from seps.images.sources import ImageSource
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.search.searcher import Searcher
from seps.retrieval.config import ModelConfig
from seps.retrieval.engine.keeping import patches_to_keep
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from stores import TEXTS, custom_size, gallery

KEPT = 3


@pytest.fixture(params=["mean", "maxsim"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(5)
    config = ModelConfig(image_size=(96, 96), embed_size=32, head=request.param)
    save_pretrained(RetrievalModel(config), tmp_path / "model", form="delta")
    return tmp_path / "model"


@pytest.mark.parametrize("kept", [None, KEPT])
def test_a_search_gives_the_scores_of_the_head(folder: Path, tmp_path: Path, kept: int | None) -> None:
    """The mean patch is that of all patches, though a store holds few of them."""
    model = from_pretrained(folder)
    photos = gallery(tmp_path / "photos", described=0)
    options = IndexOptions(workers=2, bank=False, size=custom_size(patches=kept))
    index_folder(photos, tmp_path / "store", model, str(folder), options=options)
    searcher = Searcher(tmp_path / "store", model)
    found = {hit.path: hit.score for hit in searcher.search(TEXTS[0], k=8)}
    assert len(found) == 8
    text = model.encode_texts([TEXTS[0]])
    for path, score in found.items():
        pixels = read_image(ImageSource(photos / path), model.image_size)
        with torch.no_grad():
            tokens = model.encode_pixels(pixels[None].float() / 255)
        assert score == pytest.approx(expected(model, tokens, text, kept), abs=2e-3), path


def expected(model: RetrievalModel, tokens: torch.Tensor, text: TextFeatures, kept: int | None) -> float:
    """From all tokens: what is kept of them is aligned, and all of them make the mean."""
    images = ImageFeatures(tokens)
    prefix = model.vision.num_prefix_tokens
    if kept is not None:
        places = patches_to_keep(model, images, kept)[0] + prefix
        chosen = torch.cat([torch.arange(prefix), places])
        images = ImageFeatures(tokens[:, chosen], mean=tokens[:, prefix:].mean(dim=1))
    return float(model.score(images, text)[0, 0])
