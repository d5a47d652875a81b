"""Settings: presets load, overrides act, every mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from messages import naming
from seps.reid.config import ReidConfig, from_mapping, load_config

PRESETS = Path(__file__).parents[2] / "configs" / "reid"


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_presets_load(name: str) -> None:
    config = load_config(PRESETS / f"{name}.yaml")
    assert config.train.batch_size == config.data.identities * config.data.images
    assert from_mapping(config.to_json()) == config


def test_overrides() -> None:
    config = load_config(None, ["model.fusion=concat", "train.learning_rate=1e-4", "model.image_size=[128, 64]"])
    assert config.model.fusion == "concat" and config.train.learning_rate == 1e-4
    assert config.model.image_size == (128, 64) and config.data == ReidConfig().data
    assert load_config(None, ["data.identities=4"]).train.batch_size == 16


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.fusoin=concat", ("model.fusoin", "model.fusion")),
        ("modle.fusion=concat", ("modle.fusion", "model.fusion")),
        ("model.fusion=add", ("model.fusion", "sdtps", "concat")),
        ("train.epochs=many", ("train.epochs", "many")),
        ("train.epochs=true", ("train.epochs", "number")),
        ("train.epochs=0", ("epochs", 0, 1)),
        ("train.batch_size=10", ("batch_size", 10)),
        ("train.chunk_size=4", ("train.chunk_size", "batch")),
        ("model.image_size=64", ("model.image_size", 2)),
        ("model.image_size=[64]", ("model.image_size", 2)),
        ("model.sparse_ratio=0", ("sparse_ratio", 0)),
        ("model.selection=oracle", ("model.selection", "published", "gate")),
        ("loss.gate=-1", ("gate", "-1.0")),
        ("data.images=1", ("images", "triplet")),
        ("model.temperature=.inf", ("temperature", "finite")),
        ("model.beta=.inf", ("beta", "finite")),
        ("data.holdout=1.5", ("holdout", 1.5, "identities")),
        ("data.modalities=[RGB]", ("modalities", "RGB")),
        ("loss.modality_dropout=2", ("modality_dropout", "2.0")),
        ("epochs=3", ("epochs", "train.epochs")),
        ("train.epochs", ("section.name=value",)),
        ("train.epochs=[", ("train.epochs", "'['")),
        ("train=3", ("train", 3)),
    ],
)
def test_a_mistake_is_named_with_what_to_give(override: str, parts: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*parts)):
        load_config(None, [override])


def test_bad_files(tmp_path: Path) -> None:
    for text, sentence in (("- 1\n", "sections"), ("model: 3\n", "values"), ("a: [", "YAML")):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            load_config(path)
    with pytest.raises(ValueError, match="read"):
        load_config(tmp_path / "none.yaml")
    path.write_text("train:\nmodel:\n")
    assert load_config(path, ["train.epochs=3"]) == load_config(None, ["train.epochs=3"])
