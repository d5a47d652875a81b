import re

import pytest
from training_toys import quick

from seps.training import TrainConfig

WRONG = [
    ("epochs", 0),
    ("batch_size", -1),
    ("learning_rate", float("nan")),
    ("learning_rate", 0.0),
    ("backbone_lr_scale", -0.1),
    ("weight_decay", float("inf")),
    ("betas", (0.9,)),
    ("warmup_fraction", 1.0),
    ("schedule", "linear"),
    ("step_epochs", (3,)),
    ("clip_norm", -1.0),
    ("precision", "fp16"),
    ("chunk_size", -4),
    ("ema_decay", 1.0),
    ("keep_last", 0),
    ("final_lr_fraction", 2.0),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_values_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        quick(**{field: value})
    assert f"TrainConfig.{field} = {value!r}: " in str(caught.value)


@pytest.mark.parametrize("epochs", [(), (5, 3), (0, 3), (2, 2)])
def test_step_schedule_needs_rising_epochs(epochs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"TrainConfig.step_epochs"):
        TrainConfig(schedule="step", step_epochs=epochs)


def test_json_goes_round_and_tells_differences() -> None:
    config = TrainConfig(schedule="step", step_epochs=(3, 5), betas=(0.9, 0.98))
    assert TrainConfig(**config.to_json()) == config
    assert config.differences(config.to_json()) == []
    other = TrainConfig(schedule="step", step_epochs=(3,), betas=(0.9, 0.98), keep_last=9, eval_every=4)
    assert other.differences(config.to_json()) == ["step_epochs: [3, 5] -> [3]"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", "3"),
        ("epochs", 1.5),
        ("epochs", True),
        ("batch_size", -1),
        ("learning_rate", "fast"),
        ("learning_rate", float("nan")),
        ("clip_norm", None),
        ("betas", ("a", "b")),
        ("step_epochs", (1.5,)),
        ("seed", -1),
    ],
)
def test_wrong_types_and_values_name_field_and_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"TrainConfig\.{name} = {re.escape(repr(value))}: "):
        TrainConfig(**{name: value})  # type: ignore[arg-type]
