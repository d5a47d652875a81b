"""`torch.compile` takes the modules as one graph, without falling back to Python between its parts."""

from __future__ import annotations

import pytest
import torch

import seps


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(module: torch.nn.Module):
    # Tracing is what can fail; generating machine code would take a minute.
    return torch.compile(module, fullgraph=True, backend="eager")


def test_sensors():
    net = seps.MultiModalSDTPS(16, 12).eval()
    inputs = [torch.randn(2, 12, 16) for _ in range(3)] + [torch.randn(2, 16) for _ in range(3)]
    torch.testing.assert_close(whole(net)(*inputs), net(*inputs))


def test_sensors_with_gumbel():
    net = seps.MultiModalSDTPS(16, 12, use_gumbel=True).train()
    *tokens, rgb, _, _ = whole(net)(*[torch.randn(2, 12, 16)] * 3, *[torch.randn(2, 16)] * 3)
    torch.stack(tokens).square().sum().backward()
    assert rgb.requires_grad and net.rgb_sparse.score_predictor[0].weight.grad.any()


def test_network():
    net = seps.CrossSparseAggrNet(16, 12, 0.5, 0.5, True, has_cls=True).eval()
    batch = torch.randn(2, 13, 16), torch.randn(2, 4, 16), torch.tensor([4, 2])
    torch.testing.assert_close(whole(net)(*batch), net(*batch))
