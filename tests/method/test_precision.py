"""Half precision around the method changes no decision and no gradient: autocast, half inputs, half weights."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import seps
from seps.method.losses import batch_hard_triplet, identity_loss, infonce, ratio_loss, sigmoid_loss, triplet_loss

HALVES = [torch.bfloat16, torch.float16]
PRESETS = {
    "paper": seps.SlimmingConfig.paper,
    "open_source": seps.SlimmingConfig.open_source,
    "default": seps.SlimmingConfig.default,
}
DECISIONS = ["topk", "gumbel", "binary"]


def cosine(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Cosine of two gradients, each a list of tensors, in float64."""
    a, b = (torch.cat([t.double().flatten() for t in side]) for side in (left, right))
    return float(F.cosine_similarity(a, b, dim=0))


def assert_same_gradients(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """Each gradient points where the float32 one does; what had none has none."""
    assert ours.keys() == exact.keys()
    largest = max(float(gradient.norm()) for gradient in exact.values())
    for name, gradient in exact.items():
        if gradient.norm() > 1e-6 * largest:
            assert cosine([ours[name]], [gradient]) > 0.999, name
    assert cosine(list(ours.values()), list(exact.values())) > 0.999


def close_identities(identities: int = 16, rows: int = 4, width: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of identities whose directions have a mean cosine of 0.95, as early in training."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return F.normalize(torch.randn(*shape, generator=generator), dim=-1)

    centres = F.normalize(noise(1, width) + (1 / 0.95 - 1) ** 0.5 * noise(identities, width), dim=-1)
    features = centres.repeat_interleave(rows, dim=0) + 0.15 * noise(identities * rows, width)
    return 10 * features, torch.arange(identities).repeat_interleave(rows)


FEATURES, LABELS = close_identities()
SCORES = 0.5 + 0.1 * torch.randn(48, 48, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(48) // 3
MASK = torch.rand(4, 48, 30, generator=torch.Generator().manual_seed(2))
LOSSES = {
    "batch hard triplet": (FEATURES, lambda x: batch_hard_triplet(x, LABELS)),
    "batch hard triplet, half of the rows": (
        FEATURES,
        lambda x: batch_hard_triplet(x[32:], LABELS[32:], x, LABELS, first=32),
    ),
    "identity": (0.1 * FEATURES, lambda x: identity_loss(x, LABELS)),
    "triplet, hardest": (SCORES, lambda x: triplet_loss(x, IDS, margin=0.2, hardest=True)),
    "triplet, sum": (SCORES, lambda x: triplet_loss(x, IDS, margin=0.2, hardest=False)),
    "infonce": (SCORES, lambda x: infonce(x, 50.0, IDS)),
    "sigmoid": (SCORES, lambda x: sigmoid_loss(x, 50.0, -25.0, IDS)),
    "ratio, unified": (MASK, lambda x: ratio_loss([x], target=0.3, form="unified")),
    "ratio, separate": (MASK, lambda x: ratio_loss([x[:2], x[2:]], target=0.3, form="separate")),
    "ratio, printed": (MASK, lambda x: ratio_loss([x[:2], x[2:]], target=0.3, form="printed")),
    **{
        f"configured {kind}": (
            SCORES,
            lambda x, kind=kind: seps.SEPSLoss.from_config(
                seps.LossConfig(kind=kind, ratio_weight=2.0, ratio_form="unified")
            )(x, x[None], IDS)[0],
        )
        for kind in ("triplet", "infonce", "sigmoid")
    },
}


def casting(dtype: torch.dtype | None):
    """Autocast to `dtype`, or none; entered for forward passes alone, as torch asks."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


def loss_gradient(name: str, values: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[float, torch.Tensor]:
    leaf = values.clone().requires_grad_()
    with casting(dtype):
        loss = LOSSES[name][1](leaf)
    assert loss.dtype == torch.float32
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.filterwarnings("ignore:The ratio loss cannot act")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_same_under_autocast(name, dtype):
    values = LOSSES[name][0]
    exact, gradient = loss_gradient(name, values)
    ours, cast = loss_gradient(name, values, dtype)
    assert ours == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(cast, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The ratio loss cannot act")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_half_precision_values_is_computed_in_float32(name, dtype):
    values = LOSSES[name][0].to(dtype)
    exact, gradient = loss_gradient(name, values.float())
    ours, rounded = loss_gradient(name, values)
    assert ours == pytest.approx(exact, rel=1e-6)
    assert cosine([rounded], [gradient]) > 0.9999


@pytest.mark.parametrize("dtype", HALVES)
def test_the_hardest_rows_are_the_same_under_autocast(dtype):
    # A row that is no hardest positive or negative of any anchor, and whose own gradient is taken out, gets none.
    def used(first: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        leaf, own = FEATURES.clone().requires_grad_(), slice(first, first + 1)
        with casting(dtype):
            loss = batch_hard_triplet(FEATURES[own], LABELS[own], leaf, LABELS, first=first)
        loss.backward()
        return leaf.grad.abs().sum(dim=1) > 0

    for i in range(len(FEATURES)):
        rows = used(i)
        assert int(rows.sum()) == 2
        assert torch.equal(used(i, dtype), rows)


def make_net(preset: str, decision: str, **overrides) -> seps.PatchSlimming:
    torch.manual_seed(0)
    config = PRESETS[preset](**{"embed_size": 64, "num_patches": 25, "decision": decision, **overrides})
    return seps.PatchSlimming(config).train()


def make_inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    # One large common direction, as encoders give it: the patches differ little.
    common = 2 * torch.randn(64, generator=generator)

    def features(*shape: int) -> torch.Tensor:
        return (common + torch.randn(*shape, 64, generator=generator)).to(dtype)

    return {
        "images": features(8, 26),
        "words": features(8, 6),
        "lengths": torch.tensor([6, 5, 4, 3, 2, 1, 6, 2]),
        "dense": features(8, 9),
        "dense_lengths": torch.tensor([9, 3, 5, 7, 1, 2, 4, 9]),
    }


def train_step(net, inputs, dtype: torch.dtype | None = None):
    """Similarities, kept patches and gradients (inputs and weights) of one step."""
    net.zero_grad()
    leaves = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    torch.manual_seed(5)
    with casting(dtype):
        sims, masks = net(**leaves)
        loss = infonce(sims, 10.0)
    loss.backward()
    gradients = {k: v.grad for k, v in leaves.items() if v.is_floating_point()}
    gradients |= {k: p.grad for k, p in net.named_parameters() if p.grad is not None}
    return sims.detach(), masks, {k: v.float() for k, v in gradients.items() if v is not None}


@pytest.mark.parametrize(("preset", "decision"), list(itertools.product(PRESETS, DECISIONS)))
@pytest.mark.parametrize("dtype", HALVES)
def test_a_network_keeps_the_same_patches_and_gradients_under_autocast(preset, decision, dtype):
    net, inputs = make_net(preset, decision), make_inputs()
    exact, masks, gradients = train_step(net, inputs)
    ours, cast_masks, cast = train_step(net, inputs, dtype)
    assert all(torch.equal(a, b) for a, b in zip(masks, cast_masks, strict=True))
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    assert_same_gradients(cast, gradients)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", HALVES)
def test_half_inputs_without_autocast(preset, dtype):
    net, inputs = make_net(preset, "topk"), make_inputs(dtype)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    exact, masks, gradients = train_step(net, wide)
    ours, half_masks, half = train_step(net, inputs)
    assert all(torch.equal(a, b) for a, b in zip(masks, half_masks, strict=True))
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    assert_same_gradients(half, gradients)


@pytest.mark.parametrize(("preset", "decision"), list(itertools.product(PRESETS, DECISIONS)))
def test_half_weights_decide_as_the_same_weights_in_float32(preset, decision):
    net, inputs = make_net(preset, decision).to(torch.bfloat16), make_inputs(torch.bfloat16)
    ours, masks, half = train_step(net, inputs)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    exact, exact_masks, gradients = train_step(net.float(), wide)
    assert all(torch.equal(a, b) for a, b in zip(masks, exact_masks, strict=True))
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    # Gradients of half weights add up in half precision, so the smallest are rounding alone.
    assert cosine(list(half.values()), list(gradients.values())) > 0.999


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("way", ["autocast", "half inputs", "half weights"])
def test_predicted_scores_and_kept_sets(width, decision, way):
    torch.manual_seed(0)
    sparse = seps.TokenSparse(width, 0.5, True, decision=decision)
    tokens = (torch.randn(1, 1, width) + 0.5 * torch.randn(64, 49, width)).bfloat16().float()
    if way == "half weights":
        sparse = sparse.bfloat16().float()

    def keep(module, given):
        torch.manual_seed(1)
        predicted = module.predict(given)
        return predicted, module.decide(predicted)

    exact, kept = keep(sparse, tokens)
    if way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, ours_kept = keep(sparse, tokens)
    elif way == "half inputs":
        ours, ours_kept = keep(sparse, tokens.bfloat16())
    else:
        ours, ours_kept = keep(sparse.bfloat16(), tokens.bfloat16())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours_kept, kept)


@pytest.mark.parametrize(("guides", "decision"), list(itertools.product(("vector", "position"), DECISIONS)))
@pytest.mark.parametrize("way", ["autocast", "half inputs"])
def test_sensors_keep_the_same_patches_and_gradients(guides, decision, way):
    torch.manual_seed(0)
    net = seps.MultiModalSDTPS(64, 32, guides=guides, decision=decision).train()
    inputs = [t.bfloat16().float() for t in (*torch.randn(3, 4, 32, 64), *torch.randn(3, 4, 64))]
    target = torch.randn(12, 64)

    def step(given, dtype=None):
        net.zero_grad()
        leaves = [t.clone().requires_grad_() for t in given]
        torch.manual_seed(6)
        with casting(dtype):
            out = net(*leaves)
        feature = torch.cat([tokens.float().mean(dim=1) for tokens in out[:3]])
        (feature * target).sum().backward()
        gradients = {str(i): leaf.grad.float() for i, leaf in enumerate(leaves[:3])}
        return out, gradients | {k: p.grad for k, p in net.named_parameters() if p.grad is not None}

    exact, gradients = step(inputs)
    if way == "autocast":
        ours, cast = step(inputs, torch.bfloat16)
    else:
        ours, cast = step([t.bfloat16() for t in inputs])
    assert all(torch.equal(a, b) for a, b in zip(ours[3:], exact[3:], strict=True))
    for a, b in zip(ours[:3], exact[:3], strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-8 if way == "half inputs" else 1e-6, atol=1e-6)
    assert_same_gradients(cast, gradients)


def test_modules_alone_are_the_same_under_autocast():
    torch.manual_seed(0)
    tokens, other = torch.randn(3, 20, 32), torch.randn(3, 20, 32)
    words = F.normalize(torch.randn(3, 5, 32), dim=-1)
    unit = F.normalize(tokens, dim=-1)
    keep = (torch.rand(3, 20) < 0.5).float()
    calls = {
        "single": partial(seps.TokenAggregation(32, 6), tokens, keep),
        "dual": partial(seps.DualTokenAggregation(32, 6), tokens, other, keep, 1 - keep),
        "mean": partial(seps.HRPA(32), unit, words),
        "topk": partial(seps.HRPA(32, use_paper_version=True), unit, words, keep),
        "sparse": partial(seps.TokenSparse(32, 0.5, True), tokens, keep, tokens[..., 0]),
    }
    for name, call in calls.items():
        exact = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(call(), exact, rtol=1e-6, atol=1e-6, msg=name)
