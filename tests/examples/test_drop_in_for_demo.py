"""The model of `examples/drop_in_for_demo.py` with its hand-written selection and with ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import seps

EXAMPLE = Path(__file__).parents[2] / "examples/drop_in_for_demo.py"
PARTS = (
    "sparse.score_predictor.0.weight",
    "sparse.score_predictor.0.bias",
    "sparse.score_predictor.2.weight",
    "sparse.score_predictor.2.bias",
    "aggr.scale",
    "aggr.weight.0.weight",
    "aggr.weight.0.bias",
    "aggr.weight.1.weight",
    "aggr.weight.1.bias",
    "aggr.weight.3.weight",
    "aggr.weight.3.bias",
)
"""The names that a state of `modeling/sdtps_complete.py` has for each sensor."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drop_in_for_demo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(example: ModuleType, **settings: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model with its own selection and, its state loaded, with ours."""
    theirs = example.ThreeSensors(example.HandWritten(**example.SETTINGS, **settings))
    with torch.no_grad():  # no weight has a value that another of its kind also has at the start
        for weight in theirs.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    ours = example.ThreeSensors(seps.MultiModalSDTPS(**example.SETTINGS, **settings))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def pictures(example: ModuleType, count: int = 4) -> dict[str, torch.Tensor]:
    return {key: torch.randn(count, 3, 256, 128) for key in example.SENSORS.values()}


def loss_of(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    """Identity loss of both branches, and something that depends on both features."""
    sdtps_score, sdtps_feat, ori_score, ori_feat = output
    identity = F.cross_entropy(sdtps_score, target) + F.cross_entropy(ori_score, target)
    return identity + sdtps_feat.square().mean() + ori_feat.square().mean()


def test_the_state_has_their_names_and_no_others(example: ModuleType) -> None:
    expected = {f"{sensor}_{part}" for sensor in ("rgb", "nir", "tir") for part in PARTS}
    for selection in (example.HandWritten(**example.SETTINGS), seps.MultiModalSDTPS(**example.SETTINGS)):
        assert set(selection.state_dict()) == expected
    theirs, ours = both(example)
    assert list(theirs.state_dict()) and set(theirs.state_dict()) == set(ours.state_dict())


def test_a_state_of_a_later_version_is_refused_by_name(example: ModuleType) -> None:
    """Later versions of their module have no aggregation, or a learned cross attention."""
    state = example.HandWritten(**example.SETTINGS).state_dict()
    module = seps.MultiModalSDTPS(**example.SETTINGS)
    without = {name: value for name, value in state.items() if not name.startswith("tir_aggr")}
    with pytest.raises(RuntimeError, match=r"Missing key.*tir_aggr\.scale"):
        module.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rgb_cross_nir\.q_proj\.weight"):
        module.load_state_dict({**state, "rgb_cross_nir.q_proj.weight": torch.zeros(64, 64)})


def test_selection_has_their_shapes_and_values(example: ModuleType) -> None:
    theirs, ours = both(example)
    given = [torch.randn(3, 128, 64) for _ in range(3)] + [torch.randn(3, 64) for _ in range(3)]
    expected, found = theirs.sdtps.eval()(*given), ours.sdtps.eval()(*given)
    assert [part.shape for part in found] == [(3, 26, 64)] * 3 + [(3, 128)] * 3
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=f"output {number}")
    names = ("RGB_cash", "NI_cash", "TI_cash", "RGB_global", "NI_global", "TI_global")
    named = ours.sdtps(**dict(zip(names, given, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(named, found, strict=True))


@pytest.mark.parametrize(("pattern", "width"), [(1, 192), (2, 192), (3, 384)])
def test_the_three_patterns(example: ModuleType, pattern: int, width: int) -> None:
    theirs, ours = both(example)
    shots = pictures(example)
    with torch.no_grad():
        expected, found = (model.eval()(shots, return_pattern=pattern) for model in (theirs, ours))
    assert found.shape == (4, width)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_training_step_is_theirs(example: ModuleType) -> None:
    """The same four outputs, the same gradient at every weight, the same weights after the step."""
    theirs, ours = both(example)
    shots, target = pictures(example), torch.tensor([0, 1, 2, 3])
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model.train()(shots)
        assert [tuple(part.shape) for part in output] == [(4, 10), (4, 192), (4, 10), (4, 192)]
        loss = loss_of(output, target)
        loss.backward()
        optimizer.step()
        assert loss_of(model(shots), target).item() < loss.item()
    mine = dict(ours.named_parameters())
    for name, weight in theirs.named_parameters():
        assert weight.grad is not None and mine[name].grad is not None, name
        assert float(weight.grad.abs().max()) > 0, name
        torch.testing.assert_close(mine[name].grad, weight.grad, rtol=1e-3, atol=1e-6, msg=name)
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_gumbel_is_theirs_forward_and_bounded_backward(example: ModuleType) -> None:
    shots, target = pictures(example), torch.tensor([0, 1, 2, 3])
    largest = {}
    for gumbel in (False, True):
        for name, model in zip(("theirs", "ours"), both(example, use_gumbel=gumbel), strict=True):
            first, second = model.train()(shots)[1].detach(), model(shots)[1].detach()
            torch.testing.assert_close(first, second, rtol=0, atol=1e-5)  # noise changes nothing forward
            loss_of(model(shots), target).backward()
            gradients = [p.grad for key, p in model.named_parameters() if "score_predictor" in key]
            assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
            largest[name, gumbel] = max(float(gradient.abs().max()) for gradient in gradients)
    assert largest["theirs", True] > 1e6 * largest["theirs", False]
    assert largest["ours", True] < 1e3 * largest["ours", False]


def test_a_step_under_autocast_as_demo_trains(example: ModuleType) -> None:
    _, ours = both(example, use_gumbel=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours.train()(pictures(example))
    assert [tuple(part.shape) for part in output] == [(4, 10), (4, 192), (4, 10), (4, 192)]
    loss_of(tuple(part.float() for part in output), torch.tensor([0, 1, 2, 3])).backward()
    gradients = {name: weight.grad for name, weight in ours.sdtps.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert float(gradients["tir_sparse.score_predictor.0.weight"].abs().max()) > 0
