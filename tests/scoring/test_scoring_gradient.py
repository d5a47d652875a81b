"""Gradients of the recomputed factored form against those of the network's own loop."""

from __future__ import annotations

import pytest
import torch

from scoring_cases import CONFIGS, make_inputs, make_net
from seps.method import select as selection_module
from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.method.published import score_published_pairing
from seps.scoring import score_with_gradient
from seps.scoring import train as train_module
from seps.scoring.blocks import block_costs
from seps.scoring.inputs import SortedTexts, shapes_of


def gradients(net, leaves, sims):
    net.zero_grad()
    weight = torch.linspace(-0.5, 1, sims.numel()).view_as(sims)
    used = [leaf for leaf in leaves if leaf.requires_grad]
    parameters = dict(net.named_parameters())
    found = torch.autograd.grad((sims * weight).sum(), used + list(parameters.values()), allow_unused=True)
    names = [f"input {i}" for i in range(len(used))] + list(parameters)
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def assert_same(ours, theirs):
    # The last bias of the aggregation cancels in its softmax: its gradient is rounding and nothing else.
    noise = 1e-6 * max(value.norm().item() for value in theirs.values())
    for name in ours.keys() | theirs.keys():
        mine, other = ours.get(name), theirs.get(name)
        size = max(x.norm().item() for x in (mine, other) if x is not None)
        if mine is None or other is None:
            assert size < 1e-9, name
        else:
            assert (mine - other).norm().item() <= 1e-4 * size + noise, name


DUAL = [name for name, config in CONFIGS.items() if config.aggregation == "dual"]


@pytest.fixture(autouse=True)
def by_tables(monkeypatch):
    """Two merged sets take the tables, which few texts would not."""
    monkeypatch.setattr(train_module, "_TABLES", 0.0)


@pytest.mark.parametrize("name", DUAL)
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_two_merged_sets_per_pair_have_the_same_gradients(name, at_once, monkeypatch):
    monkeypatch.setattr(train_module, "_TABLES", 1e9)
    monkeypatch.setattr(train_module, "_DIRECT", at_once)
    sizes, score = [], PatchSlimming.score

    def counted(net, images, texts, *more):
        sizes.append(texts.count)
        return score(net, images, texts, *more)

    monkeypatch.setattr(PatchSlimming, "score", counted)
    test_gradients_equal_the_networks(name, "ample", monkeypatch)
    assert (sizes[0] == 1) == (at_once == 1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_gradients_equal_the_networks(name, memory, monkeypatch):
    config = CONFIGS[name]
    net, data = make_net(config).train(), make_inputs(config)
    # The same noise for both, whatever the order in which they draw it.
    monkeypatch.setattr(
        selection_module, "_uniform", lambda like, _: torch.linspace(0.05, 0.95, like.shape[-1]).expand_as(like)
    )
    leaves = [data[key].requires_grad_() for key in ("images", "words", "dense")]
    described = {} if config.dense == "none" else {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    budget = 2**30
    if memory == "scarce":
        texts = SortedTexts(data["words"], [6] * len(data["words"]), dtype=torch.float32)
        shapes = shapes_of(config, config.num_patches, texts, data["dense"])
        budget = 4 * block_costs(shapes, torch.float32, gradient=True).least
    scored = score_with_gradient(
        net, data["images"], data["words"], data["lengths"], memory=budget, want_masks=True, **described
    )
    sims, masks = scored.similarity, scored.masks
    expected, expected_masks = net(data["images"], data["words"], data["lengths"], **described)
    torch.testing.assert_close(sims, expected, atol=1e-5, rtol=0)
    assert len(masks) == len(expected_masks)
    for mine, other in zip(masks, expected_masks, strict=True):
        torch.testing.assert_close(mine, other)
    assert_same(gradients(net, leaves, sims), gradients(net, leaves, expected))


@pytest.mark.parametrize("name", ["open_source", "paper", "default"])
def test_published_pairing_gradients(name):
    config = CONFIGS[name]
    net, data = make_net(config).train(), make_inputs(config)
    leaves = [data[key].requires_grad_() for key in ("images", "words", "paired")]
    scored = score_with_gradient(
        net,
        data["images"],
        data["words"],
        data["lengths"],
        paired_dense=data["paired"],
        paired_dense_lengths=data["paired_lengths"],
    )
    assert scored.masks == ()
    expected, _ = score_published_pairing(
        net, data["images"], data["words"], data["lengths"], data["paired"], data["paired_lengths"]
    )
    assert_same(gradients(net, leaves, scored.similarity), gradients(net, leaves, expected))


def test_far_spread_logits_have_the_same_gradients():
    config = CONFIGS["paper"]
    net, data = make_net(config, spread=60.0).train(), make_inputs(config)
    leaves = [data[key].requires_grad_() for key in ("images", "words")]
    sims = score_with_gradient(net, data["images"], data["words"], data["lengths"]).similarity
    expected, _ = net(data["images"], data["words"], data["lengths"])
    assert_same(gradients(net, leaves, sims), gradients(net, leaves, expected))


def test_nothing_dropped_gives_finite_gradients():
    config = SlimmingConfig.paper(embed_size=8, num_patches=4, sparse_ratio=1.0)
    net, data = make_net(config).train(), make_inputs(config)
    leaves = [data[key].requires_grad_() for key in ("images", "words")]
    ours = gradients(net, leaves, score_with_gradient(net, *leaves, data["lengths"]).similarity)
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert_same(ours, gradients(net, leaves, net(*leaves, data["lengths"])[0]))


@pytest.mark.parametrize("name", ["binary", "binary_sum"])
def test_a_learned_number_may_keep_everything(name, monkeypatch):
    """Then D still carries a gradient, and the extra token is the zero vector: no share of nothing may be taken."""
    config = CONFIGS[name]
    net, data = make_net(config).train(), make_inputs(config)
    monkeypatch.setattr(selection_module, "_uniform", lambda like, _: torch.full_like(like, 0.5))
    with torch.no_grad():
        for parameter_name, parameter in net.named_parameters():
            if parameter_name.endswith("threshold"):
                parameter.fill_(-0.5)
    described = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    leaves = [data[key].requires_grad_() for key in ("images", "words")]
    scored = score_with_gradient(net, data["images"], data["words"], data["lengths"], want_masks=True, **described)
    assert all((mask == 1).all() for mask in scored.masks)
    ours = gradients(net, leaves, scored.similarity)
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert_same(ours, gradients(net, leaves, net(data["images"], data["words"], data["lengths"], **described)[0]))


def test_an_image_without_description_gives_finite_gradients():
    config = CONFIGS["default"]
    net, data = make_net(config).train(), make_inputs(config)
    scored = score_with_gradient(
        net, data["images"], data["words"], data["lengths"], dense=data["dense"], dense_lengths=[0, 3, 0, 5]
    )
    scored.similarity.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    assert net.trust.grad is not None and net.trust.grad.abs() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_under_autocast(name):
    """Products in bfloat16 turned the weights' gradients by 40 degrees and more where features share a direction."""
    config = CONFIGS[name]
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        net, data = make_net(config).train(), make_inputs(config)
        images = (data["images"] + 3 * torch.ones(config.embed_size)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            torch.manual_seed(1)
            scored = score_with_gradient(net, images, data["words"], data["lengths"], want_masks=True)
        scored.similarity.sum().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        results.append([scored.similarity.detach(), *scored.masks, images.grad, *gradients])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_follows_autocast_where_asked():
    config = CONFIGS["default"]
    net, data = make_net(config).train(), make_inputs(config)
    images = data["images"].requires_grad_()
    exact = score_with_gradient(net, images, data["words"], data["lengths"]).similarity
    with torch.autocast("cpu", torch.bfloat16):
        coarse = score_with_gradient(net, images, data["words"], data["lengths"], precision=None).similarity
    assert 0 < (coarse - exact).abs().max() < 2e-2
    ours, theirs = (torch.autograd.grad(sims.sum(), images)[0].flatten() for sims in (coarse, exact))
    assert 0.99 < torch.cosine_similarity(ours, theirs, dim=0) < 1
    assert abs(ours.norm() / theirs.norm() - 1) < 0.03


def test_a_budget_too_small_is_refused_with_the_least_that_works():
    config = CONFIGS["default"]
    net, data = make_net(config).train(), make_inputs(config)
    with pytest.raises(InputError, match="allow") as caught:
        score_with_gradient(net, data["images"], data["words"], data["lengths"], memory=1000)
    least = int(str(caught.value).rsplit(" ", 1)[1].rstrip("."))
    score_with_gradient(net, data["images"], data["words"], data["lengths"], memory=least)
