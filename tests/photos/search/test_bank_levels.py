"""Levels over the bank, some images at once, against one image and one sentence at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seps.method.encoded import ImageSide
from seps.photos.store.store import Store
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine.codec import StoredScorer, image_side, image_vectors, restore, text_vectors
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.ranking import bank as bank_module
from seps.retrieval.ranking.bank import BEST, bank_of, image_levels, level
from stores import gallery, index, model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gallery(tmp_path_factory.mktemp("photos"), 12, described=6)


@pytest.mark.parametrize("options", [{}, {"precision": "int8", "keep_patches": 5}, {"keep_patches": 3}])
def test_levels_are_those_of_one_sentence_at_a_time(photos: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """A slow twin: each photo, some described, with each of its nearest sentences by the readable network."""
    index(photos, tmp_path / "s", bank=True, **options)
    store = Store.open(tmp_path / "s")
    texts = bank_of(model(), store.settings).texts
    assert isinstance(texts, TextFeatures)
    (rows,) = store.scan(["path", "vector", "bank", *store.settings.state])
    images, scorer = restore(rows, store.settings), StoredScorer(model(), store.settings)
    means = text_vectors(texts)
    for i, row in enumerate(rows.rows()):
        cosines = (torch.tensor(row["vector"]).float() * means).sum(dim=1).tolist()
        nearest = sorted(range(len(cosines)), key=cosines.__getitem__, reverse=True)[: bank_module.NEAR]
        side = scorer.side(images.rows(i, i + 1))
        with torch.no_grad():
            found = [float(scorer.net.score_text(side, texts.words[t][texts.mask[t]]).similarity) for t in nearest]
        assert row["bank"] == pytest.approx(sum(sorted(found)[-BEST:]) / BEST, abs=1e-6)


def test_known_networks_are_scored_some_images_at_once(photos: Path) -> None:
    """Not one image at a time, but for those that this form cannot score: they get the score they would have alone."""
    bank, head = bank_of(model()), model().head
    assert isinstance(head, SlimmingHead)
    dataset = load_jsonl(photos / "data.jsonl")
    images = ImageFeatures(encode_images(model(), dataset), *model().encode_descriptions(dataset.dense))
    asked: list[int] = []

    def alone(i: int, texts: bank_module.AnyTexts) -> torch.Tensor:
        asked.append(i)
        return torch.full((len(texts.words),), float(i))  # type: ignore[union-attr]

    def side(i: int, j: int) -> ImageSide:
        made = image_side(head.net, images.rows(i, j))
        if i <= 9 < j:
            made.logits["caption"][9 - i, 0] = 500.0
        return made

    scores = bank.near_scores(image_vectors(model(), images), alone, head.net, side)
    assert asked == [9] and set(scores[9].tolist()) == {9.0}
    wanted = image_levels(model(), images, bank)
    others = [i for i in range(12) if i != 9]
    assert level(scores)[others].tolist() == pytest.approx(wanted[others].tolist(), abs=1e-6)
