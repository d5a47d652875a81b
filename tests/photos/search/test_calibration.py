"""Confidences: distribution by hand, in small galleries, and the calibration of old, new and unfinished stores."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from messages import naming
from seps.cli.main import call
from seps.photos import Searcher
from seps.photos.indexing import maintenance
from seps.photos.indexing.build import report_if_current
from seps.photos.store.rows import OutdatedStoreError
from seps.photos.store.store import Store
from seps.photos.store.tables import Columns
from seps.retrieval.ranking import bank
from seps.retrieval.ranking.bank import ASKED, GOOD_CONFIDENCE, sentences
from seps.retrieval.ranking.confidence import REFERENCE, Calibration, expected_largest
from stores import index, model, model_folder


def test_the_confidence_is_the_part_of_background_queries_below() -> None:
    """A Gumbel sample gives its own distribution back; a higher score never has a lower confidence."""
    draws = [0.3 - 0.1 * math.log(-math.log((i + 0.5) / 4000)) for i in range(4000)]
    found = Calibration.of(draws, 10)
    for part in (0.1, 0.5, 0.9):
        assert found.confidence(sorted(draws)[int(part * 4000)]) == pytest.approx(part, abs=0.02)
    values = [found.confidence(0.1 * step) for step in range(-50, 50)]
    assert values == sorted(values) and values[0] == 0.0 and values[-1] == 1.0
    assert Calibration.from_dict(found.as_dict()) == found
    assert Calibration.from_dict({}) is None and Calibration.from_dict({"other": 1.0}) is None
    with pytest.raises(ValueError, match="least"):
        Calibration.of([], 3)


def test_a_small_gallery_is_as_sure_as_a_large_one() -> None:
    """The best of few normal scores is raised to that of `REFERENCE`; a gallery of that size is left as it is."""
    draws = torch.Generator().manual_seed(0)
    queries = 0.3 * torch.randn(1, 2000, generator=draws)
    large = Calibration.of_scores(queries + torch.randn(REFERENCE, 2000, generator=draws))
    plain = Calibration.of((queries + torch.randn(20, 2000, generator=draws)).amax(dim=0).tolist(), 20)
    assert plain.place < large.place - 0.8  # what was taken for a match among few
    for images in (5, 20, 100):
        small = Calibration.of_scores(queries + torch.randn(images, 2000, generator=draws))
        assert small.place == pytest.approx(large.place, abs=0.15) and small.images == images
    same = (queries + torch.randn(REFERENCE + 1, 2000, generator=draws)).amax(dim=0).tolist()
    assert Calibration.of(same, REFERENCE + 1, spread=5.0) == Calibration.of(same, REFERENCE + 1)
    alone = Calibration.of_scores(torch.randn(1, 2000, generator=draws))
    assert alone.place > 2  # one image: the spread of the queries stands for that of the images
    assert [expected_largest(n) for n in (1, 2, 10, 100)] == pytest.approx([0, 0.5642, 1.5388, 2.5076], abs=0.03)


@pytest.mark.parametrize("constant", ["BACKGROUND_STRENGTH", "BEST"])
def test_scores_made_in_another_way_are_refused_until_they_are_made_again(
    photos: Path, tmp_path: Path, constant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The strength is part of a calibration, the number of best scores also of every level."""
    index(photos, tmp_path / "s", bank=True)
    right = Store.open(tmp_path / "s").settings.calibration
    names = (bank.bank_name, bank.calibration_name)
    with monkeypatch.context() as patch:
        patch.setattr(bank, constant, getattr(bank, constant) * 2)
        for name in names:
            name.cache_clear()
        assert report_if_current(photos, tmp_path / "s") is None
        with pytest.raises(OutdatedStoreError, match=naming("seps index", "--store", f"{tmp_path}/s")):
            Searcher(tmp_path / "s", model())
        assert call("index", ["--store", str(tmp_path / "s"), "--model", model_folder()]) == 0
        assert "0 changed" in (told := capsys.readouterr().out) and "12 of them" in told
        assert Searcher(tmp_path / "s", model()).search("a dog", 1)[0].confidence is not None
        assert report_if_current(photos, tmp_path / "s") is not None
    for name in names:
        name.cache_clear()
    assert index(photos, tmp_path / "s", bank=True).rescored == 12
    assert Store.open(tmp_path / "s").settings.calibration == pytest.approx(right, abs=1e-5)
    assert index(photos, tmp_path / "s", bank=True).rescored == 0


def test_a_run_that_ends_while_it_calibrates_leaves_confidences_and_is_made_up_for(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(photos, tmp_path / "s", bank=True)
    store = Store.open(tmp_path / "s")
    right = store.settings.calibration
    store.set_settings(replace(store.settings, calibrated="another way"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("seps.photos.indexing.maintenance.calibrate", killed)
        index(photos, tmp_path / "s", bank=True)
    assert Searcher(tmp_path / "s", model()).search("a dog", 1)[0].confidence is not None
    assert report_if_current(photos, tmp_path / "s") is None
    index(photos, tmp_path / "s", bank=True)
    assert Store.open(tmp_path / "s").settings.calibration == pytest.approx(right, abs=1e-5)
    assert report_if_current(photos, tmp_path / "s") is not None


def test_a_calibration_scores_few_images_of_a_large_gallery_exactly(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact scores of all candidates of a search took a third of the time of indexing a thousand photos."""
    counts: list[int] = []
    scored = Searcher.scored

    def counted(own: Searcher, images: Columns, part: Any) -> Any:
        counts.append(len(images))
        return scored(own, images, part)

    monkeypatch.setattr(Searcher, "scored", counted)
    monkeypatch.setattr(maintenance, "REFERENCE", 12)
    monkeypatch.setattr(maintenance, "CANDIDATES", 3)
    found = maintenance.calibrate(searcher, 12)
    assert counts == [3] * ASKED and found is not None
    best = [searcher.search(text, 1, exact=True)[0].score for text in sentences()[-ASKED:]]
    assert found.place == pytest.approx(Calibration.of(best, 12, searcher.strength).place, abs=0.05)


def test_confidence_of_hits(searcher: Searcher) -> None:
    """That of the calibration by hand, from all scores of the background queries."""
    asked = sentences()[-ASKED:]
    scores = torch.tensor([sorted(hit.score for hit in searcher.search(text, 12)) for text in asked]).T
    calibration = searcher.calibration
    assert calibration is not None
    expected = replace(Calibration.of_scores(scores), gap=calibration.gap)
    assert calibration.as_dict() == pytest.approx(expected.as_dict(), abs=1e-4)
    best = [searcher.search(text, 1)[0] for text in asked]
    assert [hit.confidence for hit in best] == [calibration.confidence(hit.score) for hit in best]
    assert all(hit.good == ((hit.confidence or 0) >= GOOD_CONFIDENCE) for hit in best)
    hits = searcher.search("a dog", 12)
    limit = hits[4].confidence
    assert limit is not None
    sure = [hit for hit in hits if (hit.confidence or 0) >= limit]  # equal confidences are kept together
    assert 5 <= len(sure) < 12 and searcher.search("a dog", 12, min_confidence=limit) == sure
    with pytest.raises(ValueError, match="between 0 and 1"):
        searcher.search("a dog", min_confidence=1.5)
