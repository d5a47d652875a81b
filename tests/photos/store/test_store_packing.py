"""Packed matrices: what comes back is what went in, up to the precision."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import hypothesis.strategies as st
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

from seps.photos.store.lance.table import ArrowColumns
from seps.retrieval.engine.packing import PackingError, Precision, pack, packed_shape, unpack, unpack_all, unpack_padded


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 7), st.integers(1, 9), st.floats(1e-4, 1e3), st.integers(0, 99))
def test_round_trip(rows: int, width: int, scale: float, seed: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    assert torch.equal(torch.from_numpy(unpack(pack(values, "float32"))), values)
    half = torch.from_numpy(unpack(pack(values, "float16")))
    assert torch.equal(half, values.half().float())
    assert packed_shape(pack(values, "int4")) == (rows, width)


def test_large_values_do_not_become_infinite() -> None:
    assert unpack(pack(torch.tensor([[1e6, -1e6]]), "float16")).tolist() == [[65504.0, -65504.0]]


@pytest.mark.parametrize("blob", [b"", b"\x00", b"\x09\x01\x00\x01\x00aaaa", pack(torch.ones(2, 3))[:-1]])
def test_broken_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(PackingError):
        unpack(blob)


def test_padding() -> None:
    values, mask = unpack_padded([pack(torch.ones(2, 3)), None, pack(torch.ones(1, 3))], 3)
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    assert values.sum(axis=(1, 2)).tolist() == [6, 0, 3]


def read(column: pa.Array | pa.ChunkedArray) -> torch.Tensor:
    """A column of matrices, as the search reads it."""
    return torch.from_numpy(unpack_all(ArrowColumns(pa.table({"tokens": column})).blobs("tokens")))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.sampled_from(get_args(Precision)))
def test_all_at_once_is_one_by_one(count: int, rows: int, width: int, precision: Precision) -> None:
    values = torch.randn(count + 2, rows, width, generator=torch.Generator().manual_seed(count))
    blobs = [pack(each, precision) for each in values]
    wanted = [torch.from_numpy(unpack(blob)) for blob in blobs[1:-1]]
    column = pa.array(blobs, pa.large_binary()).slice(1, count)  # a slice begins within its buffers
    for given_column in (column, pa.chunked_array([column[:1], column[1:]])):
        assert torch.equal(read(given_column), torch.stack(wanted))


def test_all_at_once_with_mixed_precisions_and_damage() -> None:
    values = torch.randn(2, 8)
    mixed = pa.array([pack(values, "float16"), pack(values, "float32")], pa.large_binary())
    assert read(mixed).shape == (2, 2, 8)
    with pytest.raises(PackingError):
        read(pa.array([pack(values)[:-1]] * 2, pa.large_binary()))
    with pytest.raises(ValueError):
        read(pa.array([pack(values), pack(values)[:-1]], pa.large_binary()))


def test_four_bits_are_coded_without_loss(tmp_path: Path) -> None:
    """Codes of normal values take about 3.8 bits each on disk."""
    from seps.images.sources import row_id
    from seps.photos.store.rows import Row, StoreSettings
    from seps.photos.store.store import Store
    from seps.retrieval.engine.layout import PatchLayout

    store = Store.create(tmp_path / "s", StoreSettings("/x", "mini", "0" * 32, PatchLayout("small", 384, (8, 8), 0)))
    blobs = {row_id(str(i), None): pack(torch.randn(64, 384), "int4") for i in range(20)}
    facts = (None, 1, 1, "0" * 64, 9, 9, b"", [0.0] * 384)
    store.put([Row(name, name, *facts, blob, None, None, None, None) for name, blob in blobs.items()])
    assert {name: row.tokens for name, row in store.rows(list(blobs)).items()} == blobs
    # Beside the codes: vectors and facts of the rows, and what a file and its versions take by themselves.
    assert store.disk_bytes() < 0.96 * sum(map(len, blobs.values())) + 20 * 1000 + 8000
