"""Products by oneDNN are those of torch but for rounding, and only where torch would do nothing else."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from seps import products
from seps.products import Linear, linear, linear_gelu


@pytest.fixture(autouse=True)
def _available(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any processor with oneDNN: only speed asks for AVX-512."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    monkeypatch.setattr(products, "_AVAILABLE", known)
    monkeypatch.setattr(products, "_LEAST", 0)


@pytest.mark.parametrize("shape", [(7, 384), (3, 41, 96), (1, 16)])
@pytest.mark.parametrize("outputs", [1, 51, 400])
@pytest.mark.parametrize("bias", [True, False])
def test_values_are_those_of_torch(shape: tuple[int, ...], outputs: int, bias: bool) -> None:
    rows, weight = torch.randn(shape), torch.randn(outputs, shape[-1])
    extra = torch.randn(outputs) if bias else None
    exact = F.linear(rows.double(), weight.double(), None if extra is None else extra.double())
    size = (rows.abs().double() @ weight.abs().double().T).max()
    assert (linear(rows, weight, extra) - exact).abs().max() <= 4e-7 * size


def test_views_are_read_as_they_are() -> None:
    wide, weight = torch.randn(50, 70), torch.randn(64, 33)
    torch.testing.assert_close(linear(wide[:, 3:67], weight.T), wide[:, 3:67] @ weight)


@torch.no_grad()
def test_gelu_within_a_product_has_its_values() -> None:
    layer, rows = Linear(96, 200), torch.randn(3, 41, 96) * 4
    exact = F.gelu(F.linear(rows.double(), layer.weight.double(), layer.bias.double()))
    assert (linear_gelu(rows, layer) - exact).abs().max() < 1e-5


@torch.no_grad()
def test_gelu_within_a_product_calls_what_was_added_to_a_layer() -> None:
    layer, seen = Linear(96, 200), []
    layer.register_forward_hook(lambda module, given, found: seen.append(found.shape))
    linear_gelu(torch.randn(5, 96), layer)
    assert seen == [(5, 200)]

    class Doubled(Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    twice, rows = Doubled(96, 200), torch.randn(5, 96)
    torch.testing.assert_close(linear_gelu(rows, twice), F.gelu(2 * F.linear(rows, twice.weight, twice.bias)))


def test_equal_rows_get_equal_values() -> None:
    for count in (5, 49, 196, 401):
        rows = torch.randn(1, 64).expand(count, 64).contiguous()
        for columns in (2, 17, 64):
            found = linear(rows, torch.randn(columns, 64))
            assert torch.equal(found, found[:1].expand_as(found))
            found = linear(torch.randn(columns, 64), rows)
            assert torch.equal(found, found[:, :1].expand_as(found))


def test_gradients_tracing_transforms_and_other_types_stay_with_torch() -> None:
    layer = Linear(8, 4)
    rows = torch.randn(5, 8, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None and layer.weight.grad is not None
    assert layer.double()(torch.randn(2, 8).double()).dtype == torch.float64
    layer.float()
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(2, 8))
        assert "mkldnn" not in str(traced.inlined_graph)
        mapped = torch.func.vmap(lambda row: linear(row, layer.weight))(torch.randn(3, 2, 8))
        assert mapped.shape == (3, 2, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
