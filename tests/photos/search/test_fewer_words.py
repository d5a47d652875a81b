"""Descriptions merged to fewer words: runs of equal length, the mean kept, scores close, explanations whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from seps.photos.indexing.maintenance import status, verify
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError
from seps.retrieval.engine.packing import packed_shape
from seps.retrieval.merging import merge_words, segment_ids
from stores import explain_row, gallery, index, model


@pytest.mark.parametrize(("count", "most"), [(7, 3), (8, 8), (100, 1), (5, 9), (158, 24)])
def test_segments_are_of_equal_length(count: int, most: int) -> None:
    ids = segment_ids(count, most)
    lengths = torch.bincount(ids)
    assert len(lengths) == min(count, most) and lengths.sum() == count
    assert lengths.max() - lengths.min() <= 1
    assert torch.equal(ids, ids.sort().values)


def test_merged_by_hand() -> None:
    words = torch.randn(3, 6, 4)
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4, [0] * 6], dtype=torch.bool)
    merged, left = merge_words(words, mask, 3)
    assert left.tolist() == [[True] * 3, [True, True, False], [False] * 3]
    unit = F.normalize(words[0], dim=-1)
    torch.testing.assert_close(merged[0], F.normalize(unit.view(3, 2, 4).sum(dim=1), dim=-1))
    assert torch.equal(merged[1, :2], words[1, :2])
    padded = merge_words(F.pad(words, (0, 0, 0, 5)), F.pad(mask, (0, 5)), 3)
    assert torch.equal(padded[0], merged) and torch.equal(padded[1], left)


@pytest.mark.parametrize("keep", [1, 4])
def test_a_store_of_merged_words(tmp_path: Path, keep: int) -> None:
    folder = gallery(tmp_path / "g", 6, described=3)
    index(folder, tmp_path / "s", words=keep)
    searcher = Searcher(tmp_path / "s", model())
    assert status(searcher.store)["words"] == keep and not verify(searcher.store)
    described = 0
    for hit in searcher.search("a dog on the stripes", k=6):
        table = searcher.store.select([hit.id], ["words", "dense"])
        text = table.values("dense")[0]
        found = explain_row(searcher, hit.id, "a dog on the stripes")
        assert found.score == pytest.approx(hit.score, abs=1e-4)
        if text is None:
            assert not found.description
            continue
        described += 1
        assert packed_shape(table.values("words")[0])[0] == keep
        # Every word of the text is there, and what they add is what the merged words add.
        assert "".join(part.word for part in found.description if not part.special) == text.replace(" ", "")
        whole = sum(part.contribution for part in found.description) + sum(found.patches) + found.elsewhere
        assert whole + found.rest == pytest.approx(hit.score, abs=1e-4)
    assert described == 3
    with pytest.raises(StoreError, match="--size"):
        index(folder, tmp_path / "s", words=keep + 1)


def test_enough_words_change_nothing(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 4, described=3)
    index(folder, tmp_path / "a")
    index(folder, tmp_path / "b", words=200)
    first, second = (Searcher(tmp_path / name, model()).search("a dog", k=4) for name in "ab")
    assert [(hit.id, hit.score) for hit in first] == [(hit.id, hit.score) for hit in second]
