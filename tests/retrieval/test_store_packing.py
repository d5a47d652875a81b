"""Packed matrices: what comes back is what went in, up to the precision."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from seps.retrieval.packing import PackingError, pack, packed_shape, unpack, unpack_padded


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 7), st.integers(1, 9), st.floats(1e-4, 1e3), st.integers(0, 99))
def test_round_trip(rows: int, width: int, scale: float, seed: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    assert torch.equal(torch.from_numpy(unpack(pack(values, "float32"))), values)
    half = torch.from_numpy(unpack(pack(values, "float16")))
    assert torch.equal(half, values.half().float())
    eight = torch.from_numpy(unpack(pack(values, "int8")))
    if rows:
        step = values.abs().amax(dim=1, keepdim=True) / 127
        assert ((eight - values).abs() <= step * 0.5001 + 1e-9).all()
    assert packed_shape(pack(values, "int8")) == (rows, width)


def test_large_values_do_not_become_infinite() -> None:
    assert unpack(pack(torch.tensor([[1e6, -1e6]]), "float16")).tolist() == [[65504.0, -65504.0]]


@pytest.mark.parametrize("blob", [b"", b"\x00", b"\x09\x01\x00\x01\x00aaaa", pack(torch.ones(2, 3))[:-1]])
def test_broken_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(PackingError):
        unpack(blob)


def test_padding() -> None:
    values, mask = unpack_padded([pack(torch.ones(2, 3)), None, pack(torch.ones(1, 3))], 3)
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    assert values.sum(dim=(1, 2)).tolist() == [6, 0, 3]
