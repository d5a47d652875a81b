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
    ("override", "sentence"),
    [
        ("model.fusoin=concat", naming("model.fusion")),
        ("modle.fusion=concat", naming("model.fusion")),
        ("model.fusion=add", naming("sdtps", "concat")),
        ("train.epochs=many", naming("train.epochs", "many")),
        ("train.epochs=true", "number"),
        ("train.epochs=0", "least"),
        ("train.batch_size=10", "agree"),
        ("train.chunk_size=4", "batch"),
        ("model.image_size=64", "2"),
        ("model.image_size=[64]", naming("2", "list")),
        ("model.sparse_ratio=0", "above 0"),
        ("model.selection=oracle", naming("published", "gate")),
        ("loss.gate=-1", "0"),
        ("data.images=1", "triplet"),
        ("model.temperature=.inf", "finite"),
        ("model.beta=.inf", "finite"),
        ("data.holdout=1.5", "identities"),
        ("data.modalities=[RGB]", "more"),
        ("loss.modality_dropout=2", "probability"),
        ("epochs=3", naming("train.epochs")),
        ("train.epochs", "section.name=value"),
        ("train.epochs=[", "train.epochs is '['"),
        ("train=3", "settings"),
    ],
)
def test_mistakes_are_sentences(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(None, [override])
    assert sentence in str(caught.value)


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
