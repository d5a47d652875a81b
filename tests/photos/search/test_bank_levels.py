"""Levels over the bank, some images at once, against one image and one sentence at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seps.method.encoded import Texts
from seps.photos.store.store import Store
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine import patches
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.patches import PatchScorer
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.ranking import bank as bank_module
from seps.retrieval.ranking.bank import BEST, bank_of, level
from stores import gallery, index, model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gallery(tmp_path_factory.mktemp("photos"), 12, described=6)


@pytest.mark.parametrize("options", [{}, {"precision": "int4", "patches": 5}, {"patches": 3}])
def test_levels_are_those_of_one_sentence_at_a_time(photos: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """A slow twin: each photo, some described, with each of its nearest sentences by the readable network."""
    index(photos, tmp_path / "s", bank=True, **options)
    store = Store.open(tmp_path / "s")
    layout = store.settings.layout
    texts = bank_of(engine_of(model()), store.settings.digests).texts.text_features
    (rows,) = store.scan(["path", "vector", "bank", *layout.columns])
    images, scorer = layout.unpack(rows), PatchScorer(model(), layout)
    means = texts.mean_word
    for i, row in enumerate(rows.rows()):
        cosines = (torch.tensor(row["vector"]).float() * means).sum(dim=1).tolist()
        nearest = sorted(range(len(cosines)), key=cosines.__getitem__, reverse=True)[: bank_module.SCORED_SENTENCES]
        side = scorer.side(images.rows(i, i + 1).features)
        with torch.no_grad():
            each = (Texts.of(texts.words[t][texts.mask[t]][None]) for t in nearest)
            found = [float(scorer.net.score(side, text).similarity) for text in each]
        assert row["bank"] == pytest.approx(sum(sorted(found)[-BEST:]) / BEST, abs=1e-6)


def test_known_networks_are_scored_some_images_at_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one image at a time, but for those that this form cannot score: they get the score they would have alone."""
    engine = engine_of(model())
    bank, dataset = bank_of(engine), load_jsonl(photos / "data.jsonl")
    pictures = engine.pictures(encode_images(engine, dataset), dataset.dense)
    vectors = engine.vectors(pictures)
    wanted = bank.levels(engine, pictures, vectors)
    asked: list[float] = []

    def alone(self: PatchScorer, images: ImageFeatures, texts: TextFeatures, memory: int | None = None) -> torch.Tensor:
        asked.append(len(images.tokens))
        return torch.full((1, len(texts.words)), 9.0)

    def unsafe(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        scores, flags = known(*given)
        if len(flags) == 4:  # the last images: 8 are scored at once
            flags[1] = True
        return scores, flags

    known = patches.score_own_texts
    monkeypatch.setattr(patches, "score_own_texts", unsafe)
    monkeypatch.setattr(PatchScorer, "score", alone)
    nearest = (vectors @ bank.vectors.T).topk(bank_module.SCORED_SENTENCES, dim=1).indices
    scores = engine.score(pictures, bank.texts, chosen=nearest.numpy())
    assert asked == [1] and set(scores[9].tolist()) == {9.0}
    others = [i for i in range(12) if i != 9]
    assert level(scores)[others].tolist() == pytest.approx(wanted[others].tolist(), abs=1e-6)
