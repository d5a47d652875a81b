"""Settings of a training run that cannot work are refused by name and value."""

from __future__ import annotations

import pytest

from messages import naming
from seps.method.config import ConfigError
from seps.retrieval.config import DataConfig, ModelConfig, PartWeights, RunConfig


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ModelConfig(max_words=0), "max_words"),
        (lambda: ModelConfig(max_dense_words=True), "max_dense_words"),
        (lambda: ModelConfig(embed_size=8.5), "embed_size is 8.5"),
        (lambda: ModelConfig(dropout=float("nan")), "dropout is nan"),
        (lambda: ModelConfig(image_size=(224,)), r"image_size is \(224,\)"),
        (lambda: ModelConfig(slimming={"sparse_ratoi": 0.8}), "sparse_ratio"),
        (lambda: ModelConfig(slimming={"sparse_ratio": "a"}).slimming_config(16, 1), "wrong"),
        (lambda: DataConfig(crop_scale=(0.9, 0.5)), "crop_scale"),
        (lambda: DataConfig(jitter=-1), "jitter is -1"),
        (lambda: DataConfig(decode_size=(0, 5)), "decode_size is"),
        (lambda: PartWeights(pixels=float("inf")), r"parts\.pixels is inf"),
        (lambda: RunConfig(freeze_text=-2), "freeze_text is -2"),
        (lambda: RunConfig(text_lr_scale=-1.0), naming("text_lr_scale", "-1")),
        (lambda: RunConfig(warmup_epochs_sum=-1), "warmup_epochs_sum is -1"),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(make, named):
    with pytest.raises(ConfigError, match=named):
        make()
