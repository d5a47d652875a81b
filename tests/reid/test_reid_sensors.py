"""What the sensors hand to the selection: sets that do not fit are refused by name, absent ones have no influence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import seps
from messages import naming

SENSORS = ("rgb", "nir", "tir")


def module(**settings: object) -> seps.MultiModalSDTPS:
    torch.manual_seed(0)
    return seps.MultiModalSDTPS(16, 12, 0.5, 0.5, **settings)  # type: ignore[arg-type]


def inputs(samples: int = 4) -> list[Tensor]:
    """Patches of three sensors, then their global vectors."""
    chance = torch.Generator().manual_seed(1)
    shapes = [(samples, 12, 16)] * 3 + [(samples, 16)] * 3
    return [torch.randn(*shape, generator=chance) for shape in shapes]


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (1, lambda x: x[:3], ["nir patches", "(3, 12, 16)", "rgb patches are (4, 12, 16)", "samples"]),
        (0, lambda x: x[:1], ["rgb global vector", "(4, 16)", "rgb patches are (1, 12, 16)", "samples"]),
        (2, lambda x: x[..., :8], ["tir patches", "16 wide", "(4, 12, 8)"]),
        (5, lambda x: x[:1], ["tir global vector", "(1, 16)", "rgb patches are (4, 12, 16)", "samples"]),
        (4, lambda x: x[:, :3], ["nir global vector", "16 wide", "(4, 3)"]),
        (3, lambda x: x[0], ["rgb global vector", "2 axes", "(16,)"]),
        (0, lambda x: x.long(), ["rgb patches", "floating point"]),
        (1, lambda x: x.to("meta"), ["nir patches", "meta", "cpu"]),
        (5, lambda x: x.to("meta"), ["tir global vector", "meta", "cpu"]),
    ],
)
def test_sensors_that_do_not_go_together_are_refused_by_name(
    place: int, change: Callable[[Tensor], Tensor], words: list[str]
) -> None:
    given = inputs()
    given[place] = change(given[place])
    with pytest.raises(seps.InputError) as caught, torch.no_grad():
        module()(*given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def by_name(given: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return dict(zip(SENSORS, given[:3], strict=True)), dict(zip(SENSORS, given[3:], strict=True))


def test_names_numbers_of_patches_and_presence_are_checked() -> None:
    patches, vectors = by_name(inputs())
    with pytest.raises(seps.InputError, match=naming("'tir'", "'rgb'", "'nir'")):
        module().slim("rgb", patches, {name: vectors[name] for name in ("rgb", "nir")})
    with pytest.raises(seps.InputError, match=r"patches: .*'sonar'"):
        module().slim("rgb", {**patches, "sonar": patches["rgb"]}, vectors)
    short = {**patches, "tir": patches["tir"][:, :9]}
    with pytest.raises(seps.InputError, match=r"tir patches .*12 patches.*\(4, 9, 16\)"):
        module().slim("rgb", short, vectors)
    with pytest.raises(seps.InputError, match=r"tir patches .*\(4, 9, 16\).*place by place"):
        module(guides="position", check_num_patches=False).slim("rgb", short, vectors)
    # By vectors each sensor may have a grid of its own, where the number is not checked.
    tokens, keep = module(check_num_patches=False).slim("tir", short, vectors)
    assert tokens.shape == (4, 4, 16) and keep.shape == (4, 9)
    there = {name: torch.ones(4, dtype=torch.bool) for name in SENSORS}
    for wrong in (torch.ones(3, dtype=torch.bool), torch.ones(4)):
        with pytest.raises(seps.InputError, match="nir"):
            module().slim("rgb", patches, vectors, {**there, "nir": wrong})
    with pytest.raises(seps.InputError, match=naming("rgb", "(4, 12, 16)", "(4, 5, 16)")):
        module().slim("rgb", patches, vectors, features=torch.zeros(4, 5, 16))


@pytest.mark.parametrize("guides", ["vector", "position"])
def test_what_an_absent_sensor_holds_does_not_reach_the_others(guides: str) -> None:
    """NaN times zero is NaN: an absent sensor must be left out, not weighed with nothing."""
    patches, vectors = by_name(inputs())
    there = {name: torch.full((4,), name != "nir") for name in SENSORS}
    expected = module(guides=guides).slim("rgb", patches, vectors, there)
    patches["nir"], vectors["nir"] = torch.full_like(patches["nir"], torch.nan), torch.full((4, 16), torch.nan)
    tokens, keep = module(guides=guides).slim("rgb", patches, vectors, there)
    assert torch.equal(tokens, expected[0]) and torch.equal(keep, expected[1])


def test_features_are_merged_by_the_decision_of_the_patches() -> None:
    """The tokens of `features`, the kept set of `patches`: by a slow sum over both."""
    patches, vectors = by_name(inputs())
    net = module()
    features = patches["rgb"] * 2 + 1
    tokens, keep = net.slim("rgb", patches, vectors, None, features)
    scores, decision = net.choose("rgb", patches, vectors)
    assert torch.equal(keep, decision)
    logits = net.rgb_aggr.logits(features)
    for sample in range(4):
        kept = keep[sample] > 0
        weights = torch.softmax(logits[sample][kept], dim=0)
        expected = [sum(weights[i, q] * features[sample][kept][i] for i in range(6)) for q in range(3)]
        dropped = torch.softmax(scores[sample][~kept], dim=0)
        expected.append(sum(dropped[i] * features[sample][~kept][i] for i in range(6)))
        torch.testing.assert_close(tokens[sample], torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guides", ["vector", "position"])
def test_the_decision_is_that_of_float32_under_autocast(guides: str) -> None:
    """Scores in bfloat16 flip patches at the boundary; the same float32 features must be kept either way."""
    torch.manual_seed(0)
    net = seps.MultiModalSDTPS(64, 128, guides=guides).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name in SENSORS:
            # A predictor that has learned to tell patches apart.
            getattr(net, f"{name}_sparse").score_predictor[0].weight.mul_(8)
    given = [torch.randn(32, 128, 64) for _ in SENSORS] + [torch.randn(32, 64) for _ in SENSORS]
    patches, vectors = by_name(given)
    for name in SENSORS:
        expected = net.choose(name, patches, vectors)[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(net.choose(name, patches, vectors)[1], expected), name
