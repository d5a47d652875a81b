"""Queries without padding in memory are those that they were packed from."""

from __future__ import annotations

import torch

from seps.retrieval.engine.queries import PackedQueries, Queries, cut_arrays, packed_queries
from seps.retrieval.heads import TextFeatures


def queries() -> Queries:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([3, 7, 1, 5])[:, None]
    return Queries(TextFeatures(torch.randn(4, 7, 8, generator=generator) * mask[..., None], mask))


def test_packed_queries_are_equal_and_take_only_the_words() -> None:
    padded = queries()
    packed = packed_queries(padded.arrays(), "cpu", at_once=3)
    assert isinstance(packed, PackedQueries) and len(packed) == len(padded)
    assert packed.pool.words.shape == (16, 8)
    torch.testing.assert_close(packed.text_features.words, padded.text_features.words)
    assert torch.equal(packed.text_features.mask, padded.text_features.mask)
    for name in ("words", "means", "counts", "starts"):
        assert torch.equal(getattr(packed.pool, name), getattr(padded.pool, name)), name
    some = packed.rows(slice(2, 4))
    torch.testing.assert_close(some.text_features.words, padded.text_features.words[2:, :5])
    torch.testing.assert_close(packed.to("cpu").text_features.words, padded.text_features.words)


def test_arrays_are_cut_as_queries_are() -> None:
    padded = queries()
    for start, stop in ((0, 2), (1, 4), (3, 9)):
        expected = padded.rows(slice(start, stop))
        found = Queries.of_arrays(cut_arrays(padded.arrays(), start, stop))
        assert torch.equal(found.text_features.words, expected.text_features.words)
        assert torch.equal(found.text_features.mask, expected.text_features.mask)


def test_queries_without_words_are_not_packed() -> None:
    vectors = Queries(None, torch.eye(3))
    made = packed_queries(vectors.arrays(), "cpu")
    assert not isinstance(made, PackedQueries) and torch.equal(torch.as_tensor(made.vectors), torch.eye(3))
