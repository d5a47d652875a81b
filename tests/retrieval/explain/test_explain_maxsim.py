"""Explanations of head `maxsim`: the shares sum to the score, and the kept patches are those that words chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from messages import mentions
from seps.cli.main import call
from seps.images.decoding import read_image
from seps.images.sources import ImageSource
from seps.method.config import SlimmingConfig
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.search.explaining import StoredExplainer, kept_patches
from seps.photos.search.searcher import Searcher
from seps.retrieval.config import ModelConfig
from seps.retrieval.explain.maxsim import maxsim_shares
from seps.retrieval.heads import ImageFeatures, MaxSimHead, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from stores import custom_size, gallery

QUERY = "an unbelievable dog, running!"


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("some", [True, False])
def test_shares_sum_to_the_score(described: bool, some: bool) -> None:
    """Also where a store kept some patches: what the others add to the mean is elsewhere."""
    torch.manual_seed(0)
    head = MaxSimHead(SlimmingConfig(embed_size=16, num_patches=12, num_prefix_tokens=2, pooled=1.5))
    assert head.trust is not None
    head.trust.data.fill_(0.4)
    tokens, words = torch.randn(1, 14, 16), torch.randn(7, 16)
    image = ImageFeatures(tokens)
    if some:
        image = ImageFeatures(tokens[:, :9], mean=tokens[:, 2:].mean(dim=1))
    if described:
        image.dense, image.dense_mask = torch.randn(1, 5, 16), torch.tensor([[True, True, True, True, False]])
    score = float(head(image, TextFeatures(words[None], torch.ones(1, 7, dtype=torch.bool))).similarity.detach())
    found = maxsim_shares(head, image, words, 12)
    count = 7 if some else 12
    assert found.score == pytest.approx(score, abs=1e-4)
    assert sum(found.terms.values()) == pytest.approx(score, abs=1e-4)
    assert found.patches.shape == (7, count) and found.description.shape == (7, 4 if described else 0)
    assert (float(found.elsewhere.abs().sum()) > 0.01) == some
    patches = image.tokens[0, 2:]
    cosines = [[float(F.cosine_similarity(word, patch, dim=0)) for patch in patches] for word in words]
    nearest = [row.index(max(row)) for row in cosines]
    assert found.kept.nonzero()[:, 0].tolist() == sorted(set(nearest))
    assert found.importance.tolist() == [nearest.count(i) for i in range(count)]


@pytest.mark.parametrize("kept", [None, 4])
def test_a_store_is_explained_with_the_score_of_its_search(tmp_path: Path, capsys, kept: int | None) -> None:
    torch.manual_seed(5)
    config = ModelConfig(image_size=(96, 96), embed_size=32, head="maxsim")
    save_pretrained(RetrievalModel(config), tmp_path / "model", form="delta")
    model = from_pretrained(tmp_path / "model")
    photos = gallery(tmp_path / "g", 4, described=2)
    options = IndexOptions(workers=2, bank=False, size=custom_size(patches=kept))
    index_folder(photos, tmp_path / "s", model, str(tmp_path / "model"), options=options)
    searcher = Searcher(tmp_path / "s", model)
    assert searcher.engine.traits.selects_patches
    hits = searcher.search(QUERY, k=4)
    for hit in hits:
        found = StoredExplainer(searcher).explain(hit.id, QUERY)
        assert found is not None
        explanation, _ = found
        assert explanation.score == pytest.approx(hit.score, abs=1e-5)
        words = sum(part.contribution for part in explanation.words) + explanation.rest + explanation.added
        image = sum(explanation.patches) + explanation.elsewhere + explanation.rest + explanation.added
        image += sum(part.contribution for part in explanation.description)
        assert (words, image) == pytest.approx((hit.score, hit.score), abs=1e-4)
        assert sum(explanation.stored) == (kept or 9) and 1 <= sum(explanation.kept) <= sum(explanation.stored)
        assert not any(k and not s for k, s in zip(explanation.kept, explanation.stored, strict=True))
        shown = kept_patches(searcher, hit.id, QUERY)
        assert shown is not None and shown["kept"] == "".join(str(int(cell)) for cell in explanation.kept)
    whole = ["explain", str(photos / "p00.jpg"), QUERY, "--model", str(tmp_path / "model"), "--json"]
    assert call(whole[0], whole[1:]) == 0
    with torch.no_grad():
        pixels = read_image(ImageSource(photos / "p00.jpg"), model.image_size)
        tokens = model.encode_pixels(pixels[None].float() / 255)
    score = float(model.score(ImageFeatures(tokens), model.encode_texts([QUERY])))
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score, abs=1e-4)
    assert call(whole[0], [*whole[1:-1], "-o", str(tmp_path / "why.png")]) == 0
    said = capsys.readouterr().out
    assert mentions(said, "9", "patches") and "unbelievable" in said and "dual encoder" not in said
    assert (tmp_path / "why.png").stat().st_size > 1000
