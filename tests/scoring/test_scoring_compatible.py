"""The compatible network through the scorers, straight after construction and in both of its modes."""

from __future__ import annotations

import pytest
import torch
from test_scoring_gradient import assert_same, gradients

import seps
from scoring_cases import make_inputs
from seps.scoring import score_matrix, score_with_gradient

MODES = {
    "open source": {},
    "open source, no CLS": {"has_cls": False},
    "paper": {"use_paper_version": True},
    "paper, no CLS": {"use_paper_version": True, "has_cls": False},
    "paper, single": {"use_paper_version": True, "use_dual_aggr": False},
    "gumbel": {"use_gumbel_softmax": True},
}


def make(name):
    torch.manual_seed(0)
    net = seps.CrossSparseAggrNet(16, 12, 0.5, 0.5, **{"has_cls": True, **MODES[name]})
    return net, make_inputs(net.config, texts=40)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("backend", ["auto", "reference", "factored"])
@pytest.mark.parametrize("paired", [False, True])
def test_score_matrix_before_any_forward(name, backend, paired):
    net, data = make(name)
    call = (data["images"], data["words"], data["lengths"])
    extra, long = {}, ()
    if paired:
        extra = {"paired_dense": data["paired"], "paired_dense_lengths": data["paired_lengths"]}
        long = (data["paired"], data["paired_lengths"])
    found = score_matrix(net, *call, backend=backend, **extra)
    torch.testing.assert_close(found, net.eval()(*call, *long), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in MODES if name != "gumbel"])
@pytest.mark.parametrize("paired", [False, True])
def test_score_with_gradient_before_any_forward(name, paired):
    net, data = make(name)
    leaves = [data[key].requires_grad_() for key in ("images", "words", "paired")]
    call = (data["images"], data["words"], data["lengths"])
    extra, long = {}, ()
    if paired:
        extra = {"paired_dense": data["paired"], "paired_dense_lengths": data["paired_lengths"]}
        long = (data["paired"], data["paired_lengths"])
    found = score_with_gradient(net, *call, want_masks=True, **extra)
    expected, masks = net(*call, *long)
    torch.testing.assert_close(found.similarity, expected, atol=1e-5, rtol=0)
    assert_same(gradients(net, leaves, found.similarity), gradients(net, leaves, expected))
    mine = found.masks if isinstance(masks, tuple) else (torch.stack(found.masks).sum(dim=0),)
    for ours, theirs in zip(mine, masks if isinstance(masks, tuple) else (masks,), strict=True):
        torch.testing.assert_close(ours, theirs)
