"""Each loss against a slow twin."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import seps
from seps.method.losses import distillation, infonce, ratio_loss, sigmoid_loss


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


@pytest.mark.parametrize("weight", [0.0, 1.5])
@pytest.mark.parametrize("form", ["unified", "separate", "printed"])
@pytest.mark.parametrize("kind", ["triplet", "infonce", "sigmoid"])
def test_configured_losses(kind, form, weight):
    scores, ids = torch.randn(5, 5), torch.tensor([0, 1, 2, 1, 3])
    masks = tuple((torch.rand(5, 5, 12) < share).float().requires_grad_() for share in (0.3, 0.6))
    config = seps.LossConfig(
        kind=kind,
        margin=0.3,
        hardest=False,
        temperature=0.25,
        ratio_form=form,
        ratio_weight=weight,
        target_ratio=0.4,
        lambda_sparse=0.5,
        lambda_dense=2.0,
    )
    total, align, ratio = seps.SEPSLoss.from_config(config)(scores, masks, ids)
    expected = {
        "triplet": lambda: slow_triplet(scores.tolist(), ids.tolist(), 0.3, False),
        "infonce": lambda: infonce(scores, 4.0, ids).item(),
        "sigmoid": lambda: sigmoid_loss(scores, 4.0, -10.0, ids).item(),
    }[kind]()
    settings = {"target": 0.4, "lambda_sparse": 0.5, "lambda_dense": 2.0}
    expected_ratio = ratio_loss(masks, form=form, **settings).item() if weight else 0.0
    assert align.item() == pytest.approx(expected, rel=1e-5)
    assert ratio.item() == pytest.approx(expected_ratio, rel=1e-5)
    assert total.item() == pytest.approx(expected + weight * expected_ratio, rel=1e-5)


LEARNED = {
    "infonce": (seps.InfoNCELoss, lambda scores, scale: infonce(scores, scale)),
    "sigmoid": (seps.SigmoidLoss, lambda scores, scale: sigmoid_loss(scores, scale, -10.0)),
}


@pytest.mark.parametrize("kind", LEARNED)
def test_a_learned_scale_is_bounded_and_its_gradient_is_that_of_the_scale(kind):
    module, function = LEARNED[kind]
    scores = torch.rand(6, 6)
    for temperature, scale in ((0.05, 20.0), (0.01, 100.0), (0.004, 100.0)):
        criterion = module(temperature)
        loss = criterion(scores)
        loss.backward()
        assert loss.item() == pytest.approx(function(scores, scale).item(), rel=1e-5)
        leaf = torch.tensor(math.log(scale), requires_grad=True)
        (slope,) = torch.autograd.grad(function(scores, leaf.exp()), leaf)
        assert slope > 0  # wrong pairs score above right ones: a lower scale is better
        assert criterion.log_scale.grad.item() == pytest.approx(slope.item(), rel=1e-4)


@pytest.mark.parametrize("kind", LEARNED)
def test_a_scale_beyond_its_bound_comes_back_and_never_drifts_further(kind):
    criterion = LEARNED[kind][0](0.004)
    optimizer = torch.optim.SGD([criterion.log_scale], lr=0.01)
    started = criterion.log_scale.item()
    right = 3 * torch.eye(6) - 1  # a higher scale would be better still
    for _ in range(5):
        optimizer.zero_grad()
        criterion(right).backward()
        optimizer.step()
    assert criterion.log_scale.item() == started
    wrong = torch.rand(6, 6)
    for _ in range(50):
        optimizer.zero_grad()
        criterion(wrong).backward()
        optimizer.step()
    assert criterion.log_scale.item() < math.log(100)


def test_the_ratio_loss_says_nothing_without_gradients_and_decides_later():
    config = seps.SlimmingConfig(embed_size=16, num_patches=20, num_prefix_tokens=0, decision="binary")
    net = seps.PatchSlimming(config).train()
    images, words = torch.randn(5, 20, 16), torch.randn(5, 3, 16)
    for decision, warns in (("binary", 0), ("topk", 1)):
        net.sparse_net_cap.decision = decision
        criterion = seps.RatioLoss()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                criterion(net(images, words)[1])
            assert not caught  # a validation pass before the first step knows nothing about training
            criterion(net(images, words)[1])
            criterion(net(images, words)[1])
        assert len(caught) == warns


def test_too_few_rows_of_one_count_prove_nothing():
    soft = torch.rand(2, 6, requires_grad=True)
    hard = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]])
    criterion = seps.RatioLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(hard + soft - soft.detach())  # both keep two, by chance or by rule
    with pytest.warns(UserWarning, match="cannot act"):
        criterion((hard + soft - soft.detach()).repeat(8, 1))


def test_distillation_is_the_mean_divergence_of_rows_and_columns():
    """Against a loop, and without a gradient into the teacher."""
    generator = torch.Generator().manual_seed(8)
    student = torch.randn(4, 4, generator=generator, requires_grad=True)
    teacher = torch.randn(4, 4, generator=generator, requires_grad=True)
    total = 0.0
    for one, other in [*zip(teacher, student, strict=True), *zip(teacher.T, student.T, strict=True)]:
        p, q = one.softmax(dim=0), other.softmax(dim=0)
        total += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True)) / 8
    loss = distillation(student, teacher)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    loss.backward()
    assert teacher.grad is None and student.grad is not None and student.grad.abs().max() > 0
    assert distillation(student, student).item() == pytest.approx(0.0, abs=1e-6)
