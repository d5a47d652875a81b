"""The calls of the first users' projects, as their documents write them: of the package and of the single files."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import seps as package
from messages import naming

OPTIONS = {"embed_size": 32, "num_patches": 16, "sparse_ratio": 0.5, "aggr_ratio": 0.5}

DEFAULTS: dict[str, dict[str, Any]] = {
    "TokenSparse": {"embed_dim": 512, "sparse_ratio": 0.6, "use_paper_version": False},
    "TokenAggregation": {"dim": 512, "keeped_patches": 64, "dim_ratio": 0.2},
    "DualTokenAggregation": {"dim": 512, "keeped_patches": 64, "dim_ratio": 0.2},
    "HRPA": {"embed_dim": 512, "top_k": 5, "use_paper_version": False, "bidirectional": True},
    "mask_xattn_one_text": {"i2t": True, "scan": True, "use_paper_version": False, "top_k": 5, "relevance_mlp": None},
    "CrossSparseAggrNet": {
        **{"embed_size": 512, "num_patches": 196, "sparse_ratio": 0.5, "aggr_ratio": 0.4, "use_paper_version": False},
        **{"top_k": 5, "use_gumbel_softmax": False, "gumbel_tau": 1.0, "use_dual_aggr": True, "beta": 0.25},
        **{"detach_patches": False},
    },
    "create_seps_model": {
        **{"embed_size": 512, "num_patches": 196, "sparse_ratio": 0.5, "aggr_ratio": 0.4, "use_paper_version": False},
        **{"use_gumbel_softmax": False, "gumbel_tau": 1.0, "has_cls": None},
    },
    "MultiModalSDTPS": {
        **{"embed_dim": 512, "num_patches": 128, "sparse_ratio": 0.5, "aggr_ratio": 0.4, "use_gumbel": False},
        **{"gumbel_tau": 1.0, "beta": 0.25, "dim_ratio": 0.2},
    },
    "ContrastiveLoss": {"margin": 0.2, "max_violation": False},
    "RatioLoss": {"target_ratio": 0.5, "lambda_sparse": 1.0, "lambda_dense": 1.0},
    "SEPSLoss": {"margin": 0.2, "target_ratio": 0.5, "ratio_weight": 2.0, "max_violation": False},
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def patches_and_attentions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(3, 16, 32), torch.rand(3, 16), torch.rand(3, 16)


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_not_given_is_as_they_have_it(seps: Any, name: str) -> None:
    parameters = inspect.signature(getattr(seps, name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("opt", [SimpleNamespace(**OPTIONS, ratio_weight=2.0), OPTIONS])
def test_the_published_class_takes_its_options(seps: Any, opt: object) -> None:
    net = seps.CrossSparseAggrNet_v2(opt)
    assert (net.num_patches, net.sparse_ratio, net.aggr_ratio, net.keeped_patches) == (16, 0.5, 0.5, 4)
    assert sum(p.numel() for p in net.parameters()) == 291
    torch.manual_seed(1)
    same = seps.CrossSparseAggrNet(**OPTIONS)
    same.load_state_dict(net.state_dict())
    images, words = torch.randn(2, 16, 32), torch.randn(3, 5, 32)
    assert torch.equal(net.eval()(images, words), same.eval()(images, words))


def test_options_that_lack_something_are_named(seps: Any) -> None:
    with pytest.raises(seps.InputError, match="no aggr_ratio"):
        seps.CrossSparseAggrNet_v2(SimpleNamespace(embed_size=32, num_patches=16, sparse_ratio=0.5))


def test_the_further_names_of_their_files(seps: Any) -> None:
    assert seps.SDTPS is seps.CrossSparseAggrNet_v2 is seps.CrossSparseAggrNet
    assert seps.SDTPS_TokenSparse is seps.TokenSparse and seps.SDTPS_TokenAggregation is seps.TokenAggregation
    assert seps.HRPA_function is seps.mask_xattn_one_text


def test_sensors_by_name_and_global_vectors_of_either_shape(seps: Any) -> None:
    module = seps.MultiModalSDTPS(embed_dim=16, num_patches=12).eval()
    patches = {name: torch.randn(2, 12, 16) for name in ("RGB_cash", "NI_cash", "TI_cash")}
    vectors = {name: torch.randn(2, 16) for name in ("RGB_global", "NI_global", "TI_global")}
    expected = module(*patches.values(), *vectors.values())
    wide = {name: vector[:, None] for name, vector in vectors.items()}
    for given in (
        module(**patches, **vectors),
        module(**patches, **wide),
        module(*patches.values(), *wide.values()),
        module(*patches.values(), **vectors),
    ):
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    with pytest.raises(seps.InputError, match=naming("TI_global", "TIR_global")):
        module(
            **patches, RGB_global=vectors["RGB_global"], NI_global=vectors["NI_global"], TIR_global=torch.ones(2, 16)
        )


def test_the_arguments_of_demo_s_versions(seps: Any) -> None:
    assert seps.MultiModalSDTPS(16, 12, dim_ratio=0.5).rgb_aggr.weight[1].out_features == 8
    seps.MultiModalSDTPS(16, 12, cross_attn_type="cosine")
    with pytest.raises(seps.InputError, match="cross_attn_type='attention'"):
        seps.MultiModalSDTPS(16, 12, cross_attn_type="attention")
    with pytest.raises(seps.InputError, match=naming("cross_attn_heads=4", "cross_attn_type", "cross_attn_heads")):
        seps.MultiModalSDTPS(16, 12, cross_attn_heads=4)


def test_hrpa_of_the_paper_is_the_plain_cosine(seps: Any) -> None:
    tokens, words = F.normalize(torch.rand(2, 6, 8), dim=-1), -F.normalize(torch.rand(2, 7, 8), dim=-1)
    hrpa = seps.HRPA(8, use_paper_version=True)
    cosines = words @ tokens.transpose(1, 2)
    rows, columns = cosines.amax(2), cosines.amax(1)
    top = [hrpa.relevance_mlp(best.topk(5).values).squeeze(-1) for best in (rows, columns)]
    expected = rows.mean(1) + top[0] + columns.mean(1) + top[1]
    torch.testing.assert_close(hrpa(tokens, words).squeeze(-1), expected)
    leaky = seps.HRPA(8, use_paper_version=True, scan=True)
    leaky.load_state_dict(hrpa.state_dict())
    assert leaky.scan and seps.HRPA(8).scan and not torch.equal(leaky(tokens, words), hrpa(tokens, words))


def test_kept_patches_and_the_decision_gathered_at_them(seps: Any) -> None:
    tokens, own, other = patches_and_attentions()
    sparse = seps.TokenSparse(32, 0.5)
    chosen = sparse.select(tokens, own, other)
    for image in range(3):
        best = sorted(range(16), key=lambda i: -float(own[image, i] + other[image, i]))[:8]
        assert chosen.indices[image].tolist() == best
        assert torch.equal(chosen.tokens[image], tokens[image, best])
    assert torch.equal(chosen.kept_mask, torch.ones(3, 8))
    assert all(torch.equal(a, b) for a, b in zip(sparse(tokens, own, other), chosen[:3], strict=True))


@pytest.mark.parametrize("kept_only", [False, True])
def test_composition_by_hand_trains_the_predictor(seps: Any, kept_only: bool) -> None:
    """Their flow: sparse with Gumbel, then aggregation with D, of all patches or of the kept ones."""
    tokens, own, other = patches_and_attentions()
    sparse, aggregate = seps.TokenSparse(32, 0.5, True).train(), seps.TokenAggregation(32, 4)
    chosen = sparse.select(tokens, own, other, use_gumbel=True)
    merged = aggregate(chosen.tokens, chosen.kept_mask) if kept_only else aggregate(tokens, chosen.mask)
    plain = aggregate(chosen.tokens)
    torch.testing.assert_close(merged, plain)
    (merged * torch.randn(3, 4, 32)).sum().backward()
    gradient = sparse.score_predictor[0].weight.grad
    assert gradient is not None and 0 < float(gradient.abs().max()) < 1e2


def test_a_mask_that_does_not_fit_says_what_to_pass(seps: Any) -> None:
    tokens, own, other = patches_and_attentions()
    chosen = seps.TokenSparse(32, 0.5).select(tokens, own, other)
    with pytest.raises(seps.InputError, match=r"\(3, 8\).*\(3, 16\).*kept_mask"):
        seps.TokenAggregation(32, 4)(chosen.tokens, chosen.mask)


def test_dual_aggregation_of_one_set(seps: Any) -> None:
    tokens = torch.randn(2, 6, 8)
    module = seps.DualTokenAggregation(8, 3)
    weights = torch.softmax(module.weight_sparse(tokens) * module.scale, dim=1)
    torch.testing.assert_close(module(tokens), weights.transpose(1, 2) @ tokens)
    with pytest.raises(seps.InputError, match=naming("mask_dense", "tokens_dense")):
        module(tokens, mask_dense=torch.ones(2, 6))


@pytest.mark.parametrize("paper", [False, True])
def test_their_gumbel_keeps_the_plain_top_k(seps: Any, paper: bool) -> None:
    """Noise lives in the relaxation alone: forward is the same in every call, and that of the plain top-K."""
    images, words = torch.randn(4, 16, 32), torch.randn(5, 6, 32)
    nets = []
    for gumbel in (False, True):
        torch.manual_seed(2)
        nets.append(
            seps.CrossSparseAggrNet(
                **OPTIONS, use_paper_version=paper, use_gumbel_softmax=gumbel, has_cls=False
            ).train()
        )
    plain, gumbel_net = nets
    expected, masks = plain(images, words)
    flat = [masks] if isinstance(masks, torch.Tensor) else list(masks)
    for _ in range(3):
        similarity, drawn = gumbel_net(images, words)
        torch.testing.assert_close(similarity, expected, rtol=0, atol=1e-6)
        again = [drawn] if isinstance(drawn, torch.Tensor) else list(drawn)
        assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(again, flat, strict=True))
    if paper:
        similarity.sum().backward()
        gradient = gumbel_net.sparse_net_cap.score_predictor[0].weight.grad
        assert gradient is not None and 0 < float(gradient.abs().max()) < 1e3


def test_gumbel_samples_in_the_network() -> None:
    sampled = package.PatchSlimming(
        package.SlimmingConfig.paper(embed_size=32, num_patches=16, num_prefix_tokens=0, decision="gumbel")
    ).train()
    images, words = torch.randn(4, 16, 32), torch.randn(5, 6, 32)
    masks_of = [sampled(images, words)[1][0].detach() for _ in range(3)]
    assert any(not torch.equal(masks_of[0], mask) for mask in masks_of[1:])


def test_relaxed_noise_is_in_the_gradient_alone(seps: Any) -> None:
    scores = torch.rand(2, 10, requires_grad=True)
    hard_topk = seps.method.select.hard_topk if seps.__name__ == "seps" else seps.hard_topk
    gradients = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = seps.TokenSparse(8, 0.5, decision="relaxed").train()
        keep = module.decide(scores)
        assert torch.equal(keep.detach(), hard_topk(scores, 0.5))
        gradients.append(torch.autograd.grad((keep * torch.arange(10.0)).sum(), scores)[0])
    assert not torch.equal(*gradients) and all(g.abs().max() > 0 for g in gradients)
    assert not module.eval().decide(scores).requires_grad


@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
def test_the_loss_takes_the_published_options(seps: Any, kind: Any) -> None:
    scores, ids = torch.randn(4, 4), torch.tensor([0, 0, 1, 2])
    plain = seps.ContrastiveLoss(0.3, True)
    for repeats, expected in ((True, plain(scores, ids)), (False, plain(scores))):
        loss = seps.ContrastiveLoss(opt=kind(margin=0.1, mask_repeat=repeats), margin=0.3, max_violation=True)
        assert torch.equal(loss(scores, ids), expected)
    assert torch.equal(
        seps.ContrastiveLoss(opt=kind(), margin=0.3, max_violation=True)(scores, ids), plain(scores, ids)
    )
    with pytest.raises(seps.InputError, match="opt=opt"):
        seps.ContrastiveLoss(kind(mask_repeat=True), 0.2)


def test_a_checkpoint_of_several_gpus_loads(seps: Any) -> None:
    for make in (
        lambda: seps.MultiModalSDTPS(16, 12),
        lambda: seps.CrossSparseAggrNet(**OPTIONS, use_paper_version=True),
        lambda: package.PatchSlimming(package.SlimmingConfig(**OPTIONS)),
    ):
        saved, net = torch.nn.DataParallel(make()).state_dict(), make()
        assert all(name.startswith("module.") for name in saved)
        assert str(net.load_state_dict(saved)) == "<All keys matched successfully>"
        assert all(torch.equal(value, saved[f"module.{name}"]) for name, value in net.state_dict().items())
        with pytest.raises(RuntimeError, match="Missing key"):
            net.load_state_dict(dict(list(saved.items())[1:]))
        # Names of which some alone begin so are read as they are.
        assert (
            "module.more" in net.load_state_dict({**net.state_dict(), "module.more": 0}, strict=False).unexpected_keys
        )


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_gumbel_tau_divides_the_score_and_its_noise_as_theirs(seps: Any, tau: float) -> None:
    """Their logits are `(score + noise) / tau`: the relaxation sees scores of the scale they have."""
    tokens, first, second = patches_and_attentions()
    select = seps.TokenSparse(32, 0.5).train()
    first.requires_grad_()
    torch.manual_seed(3)
    mask = select(tokens, first, second, use_gumbel=True, gumbel_tau=tau)[2]
    weights = torch.randn(3, 16)
    (found,) = torch.autograd.grad((mask * weights).sum(), first)
    torch.manual_seed(3)
    noise = -torch.log(-torch.log(torch.rand(3, 16).clamp(1e-6, 1 - 1e-6)))
    logits = (first + second + noise).detach().double()
    low, high = logits.amin(1, keepdim=True) - 40 * tau, logits.amax(1, keepdim=True) + 40 * tau
    for _ in range(100):
        middle = (low + high) / 2
        above = torch.sigmoid((logits - middle) / tau).sum(1, keepdim=True) > 8
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    soft = torch.sigmoid((logits - low) / tau)
    slope = soft * (1 - soft) / tau
    expected = slope * (weights - (slope * weights).sum(1, keepdim=True) / slope.sum(1, keepdim=True))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_the_compatible_networks_have_that_scale_too(seps: Any) -> None:
    net = seps.CrossSparseAggrNet(**OPTIONS, use_paper_version=True, use_gumbel_softmax=True, gumbel_tau=0.5)
    sensors = seps.MultiModalSDTPS(16, 12, use_gumbel=True, gumbel_tau=0.5)
    for part in (net.sparse_net_cap, net.sparse_net_long, sensors.rgb_sparse, sensors.tir_sparse):
        assert (part.decision, part.temperature, part.sharpness) == ("relaxed", 0.5, 1.0)
    natively = seps.MultiModalSDTPS(16, 12, decision="gumbel", sharpness=5.0)
    assert (natively.nir_sparse.decision, natively.nir_sparse.sharpness) == ("gumbel", 5.0)
    assert seps.MultiModalSDTPS(16, 12, decision="gumbel").nir_sparse.sharpness == 10.0
