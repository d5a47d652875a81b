"""Each loss against a slow twin."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import seps
from seps.losses import infonce, ratio_loss, sigmoid_loss


def slow_triplet(scores, ids, margin, hardest):
    total = 0.0
    size = len(scores)
    for i in range(size):
        negatives = [j for j in range(size) if j != i and (ids is None or ids[j] != ids[i])]
        texts = [max(0.0, margin + scores[i][j] - scores[i][i]) for j in negatives]
        images = [max(0.0, margin + scores[j][i] - scores[i][i]) for j in negatives]
        for costs in (texts, images):
            total += (max(costs, default=0.0)) if hardest else sum(costs)
    return total


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("ids", [None, [0, 1, 0, 2, 1, 3]])
def test_triplet(hardest, ids):
    scores = torch.randn(6, 6)
    ours = seps.ContrastiveLoss(0.2, hardest)(scores, None if ids is None else torch.tensor(ids))
    assert ours.item() == pytest.approx(slow_triplet(scores.tolist(), ids, 0.2, hardest), rel=1e-5)


@pytest.mark.parametrize("ids", [None, [0, 1, 0, 2]])
def test_infonce_and_sigmoid(ids):
    scores = torch.randn(4, 4)
    s = scores.tolist()
    same = [[i != j and ids is not None and ids[i] == ids[j] for j in range(4)] for i in range(4)]
    nce = sig = 0.0
    for i in range(4):
        row = sum(math.exp(5 * s[i][j]) for j in range(4) if not same[i][j])
        column = sum(math.exp(5 * s[j][i]) for j in range(4) if not same[i][j])
        nce -= (math.log(math.exp(5 * s[i][i]) / row) + math.log(math.exp(5 * s[i][i]) / column)) / 8
        for j in range(4):
            if not same[i][j]:
                sig += math.log(1 + math.exp(-(1 if i == j else -1) * (5 * s[i][j] - 1))) / 4
    tensor_ids = None if ids is None else torch.tensor(ids)
    assert infonce(scores, 5.0, tensor_ids).item() == pytest.approx(nce, rel=1e-5)
    assert sigmoid_loss(scores, 5.0, -1.0, tensor_ids).item() == pytest.approx(sig, rel=1e-5)


def test_ratio_forms():
    sparse, dense = torch.tensor([[1.0, 0, 1, 0]]), torch.tensor([[1.0, 0, 0, 0]])
    masks = (sparse, dense)
    settings = {"target": 0.3, "lambda_sparse": 0.5, "lambda_dense": 2.0}
    assert ratio_loss(masks, form="unified", **settings).item() == pytest.approx((0.75 - 0.3) ** 2)
    assert ratio_loss(masks, form="separate", **settings).item() == pytest.approx(0.5 * 0.2**2 + 2 * 0.05**2)
    assert ratio_loss(masks, form="printed", **settings).item() == pytest.approx((0.3 - 0.25 - 0.5) ** 2)


@pytest.mark.parametrize(("decision", "warns"), [("topk", True), ("gumbel", True), ("binary", False)])
def test_a_ratio_loss_that_cannot_act_says_so_once(decision, warns):
    config = seps.SlimmingConfig(embed_size=16, num_patches=20, num_prefix_tokens=0, decision=decision)
    net = seps.PatchSlimming(config).train()
    criterion = seps.SEPSLoss()
    sims, masks = net(torch.randn(4, 20, 16), torch.randn(4, 3, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        criterion(sims, masks)
        criterion(sims, masks)
    assert len([w for w in caught if "cannot act" in str(w.message)]) == int(warns)


def test_configured_losses():
    scores, masks = torch.randn(3, 3), (torch.ones(3, 3, 4),)
    for kind in ("triplet", "infonce", "sigmoid"):
        total, align, ratio = seps.SEPSLoss.from_config(seps.LossConfig(kind=kind))(scores, masks)
        assert torch.isfinite(total) and total == align and ratio == 0
