import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training_toys import Contrastive, Regression, quick

from seps.training.optim import (
    WeightAverage,
    backbone_groups,
    build_optimizer,
    clip_gradients,
    lr_factor,
    set_learning_rate,
    split_decay,
)


def test_groups_scale_backbones_and_spare_biases_and_norms() -> None:
    model = nn.ModuleDict(
        {
            "backbone": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm((2, 2))),
            "head": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        }
    )
    groups = backbone_groups(model, lambda name: name.startswith("backbone"), 1.0, 0.1)
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in split_decay(model, groups, 0.3)
        for name in group["names"]
    }
    assert found == {
        "backbone.0.weight": (0.1, 0.3),
        "backbone.0.bias": (0.1, 0.0),
        "backbone.1.weight": (0.1, 0.0),
        "backbone.1.bias": (0.1, 0.0),
        "head.0.weight": (1.0, 0.3),
        "head.0.bias": (1.0, 0.0),
        "head.1.weight": (1.0, 0.0),
        "head.1.bias": (1.0, 0.0),
    }


def test_stray_and_doubled_parameters_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="model"):
        split_decay(model, [{"params": [nn.Parameter(torch.ones(3))], "lr": 1.0}], 0.1)
    with pytest.raises(ValueError, match="weight"):
        split_decay(model, [{"params": [model.weight], "lr": 1.0}] * 2, 0.1)


def test_task_groups_are_used_and_scaled_by_the_schedule() -> None:
    optimizer = build_optimizer(Contrastive(), quick(learning_rate=1.0))
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.1, 1.0]
    assert set_learning_rate(optimizer, 0.5) == 0.5
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.05, 0.5]
    assert len(build_optimizer(Regression(), quick()).param_groups) == 2


def test_schedules_by_hand() -> None:
    def factors(**changes: object) -> list[float]:
        config = quick(epochs=3, **changes)
        return [round(lr_factor(step, 4, config), 6) for step in range(12)]

    assert factors(warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75] + [1.0] * 9
    step = factors(warmup_steps=0, warmup_fraction=0.0, schedule="step", step_epochs=(1, 2), step_gamma=0.5)
    assert step == [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    cosine = factors(warmup_steps=0, warmup_fraction=0.0, final_lr_fraction=0.2)
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 12)) for step in range(12)]
    assert cosine == [round(value, 6) for value in expected]
    assert factors(warmup_steps=0, warmup_fraction=0.25)[:4] == [round(1 / 3, 6), round(2 / 3, 6), 1.0, 1.0]


@given(
    per_epoch=st.integers(1, 9),
    epochs=st.integers(1, 9),
    warmup=st.integers(0, 100),
    schedule=st.sampled_from(["cosine", "constant"]),
)
def test_factor_stays_in_range_and_falls_after_the_warm_up(
    per_epoch: int, epochs: int, warmup: int, schedule: str
) -> None:
    config = quick(epochs=epochs, warmup_steps=warmup, warmup_fraction=0.0, schedule=schedule)
    factors = [lr_factor(step, per_epoch, config) for step in range(per_epoch * epochs)]
    assert all(0 < factor <= 1 for factor in factors)
    rest = factors[warmup:]
    assert rest == sorted(rest, reverse=True)


def test_clipping_reports_the_norm_before() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([weight], 0.0) == 5.0
    assert weight.grad.tolist() == [3.0, 4.0]
    assert clip_gradients([weight], 1.0) == 5.0
    assert torch.allclose(weight.grad, torch.tensor([0.6, 0.8]), atol=1e-5)


def test_average_matches_the_loop_and_gives_the_weights_back() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, 0.5)
    expected = 0.0
    for step, value in enumerate([1.0, 5.0, -2.0, 4.0]):
        model.weight.data.fill_(value)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = value if step == 0 else decay * expected + (1 - decay) * value
    with pytest.raises(KeyError), average.applied():
        assert model.weight.item() == pytest.approx(expected)
        raise KeyError
    assert model.weight.item() == 4.0
