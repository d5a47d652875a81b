"""Queries without padding in memory are those that they were packed from."""

from __future__ import annotations

import torch

from seps.retrieval.engine.queries import PackedQueries, Queries
from seps.retrieval.heads import TextFeatures


def queries() -> Queries:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([3, 7, 1, 5])[:, None]
    return Queries(TextFeatures(torch.randn(4, 7, 8, generator=generator) * mask[..., None], mask))


def test_packed_queries_are_equal_and_take_only_the_words() -> None:
    padded = queries()
    packed = padded.packed()
    assert isinstance(packed, PackedQueries) and len(packed) == len(padded)
    assert sum(value.numel() for value in packed.values.values()) == 16 * 8 + 4
    assert torch.equal(packed.text_features.words, padded.text_features.words)
    assert torch.equal(packed.text_features.mask, padded.text_features.mask)
    for name in ("words", "means", "counts", "starts"):
        assert torch.equal(getattr(packed.pool, name), getattr(padded.pool, name)), name
    some = packed.rows(slice(2, 4))
    assert torch.equal(some.text_features.words, padded.text_features.words[2:, :5])


def test_queries_without_words_are_not_packed() -> None:
    vectors = Queries(None, torch.eye(3))
    assert vectors.packed() is vectors
