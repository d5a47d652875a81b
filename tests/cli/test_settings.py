"""One loader for every command and for Python: files, overrides, and sentences for every mistake."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from messages import naming
from seps import settings
from seps.cli.main import main
from seps.cli.shared.parser import Parser
from seps.method.config import ConfigError
from seps.reid.config import ReidConfig, load_config
from seps.retrieval.config import RunConfig
from seps.settings import load

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS: list[tuple[type[Any], Path]] = [(RunConfig, path) for path in sorted(CONFIGS.glob("*.yaml"))]
PRESETS += [(ReidConfig, path) for path in sorted((CONFIGS / "reid").glob("*.yaml"))]
# Values that fit where the default, turned into text, does not tell which.
OTHER = {"model.image_size": "[64, 32]", "train.batch_size": "64"}


@pytest.mark.parametrize(("cls", "path"), PRESETS, ids=lambda part: getattr(part, "name", None))
def test_presets_are_files_and_every_value_of_them_counts(cls: type[Any], path: Path, tmp_path: Path) -> None:
    made = load(cls, path)
    written = settings.to_plain(made)
    for section, values in yaml.safe_load(path.read_text()).items():
        for name, value in values.items() if isinstance(values, dict) else [(None, values)]:
            held = written[section] if name is None else written[section][name]
            assert held == value or held == float(value), (section, name)
    (tmp_path / "again.yaml").write_text(settings.to_yaml(made))
    assert load(cls, tmp_path / "again.yaml") == made == settings.from_mapping(cls, written)


@pytest.mark.parametrize("cls", [RunConfig, ReidConfig])
def test_every_setting_is_read_as_text_and_a_wrong_name_is_told_the_right_one(cls: type[Any]) -> None:
    known = settings.defaults(cls)
    assert len(known) > 50
    for name, value in known.items():
        text = OTHER.get(name, str(yaml.safe_dump(value, default_flow_style=True)).partition("\n...")[0].strip())
        made: Any = load(cls, overrides=[f"{name}={text if value != '' else ''}"])
        for part in name.split("."):
            made = getattr(made, part)
        assert name in OTHER or settings._plain(made) == value, name
        with pytest.raises(ConfigError) as caught:
            load(cls, overrides={f"{name}x": text})
        assert f"no setting {name}x; did you mean {name}?" in str(caught.value)


def test_the_last_word_wins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {epochs: 3, seed: 1}\nmodel: {slimming: {pooled: 1.0, beta: 0.1}}\n")
    (tmp_path / "b.yaml").write_text("train: {epochs: 4}\nmodel:\n")
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    made = load(RunConfig, files, {"model.slimming.pooled": "1e-3", "train.seed": 2})
    assert (made.train.epochs, made.train.seed) == (4, 2)
    assert made.model.slimming == {"pooled": 1e-3, "beta": 0.1}
    assert load(RunConfig, files, {"train": {"seed": 5}}).train == dataclasses.replace(made.train, seed=5)
    assert load(RunConfig, files, ["train={seed: 5}"]).train.seed == 5


def test_what_a_command_prints_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--config", str(CONFIGS / "mini.yaml"), "--train.epochs", "7", "--print_config"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["train"]["epochs"] == 7
    (tmp_path / "mine.yaml").write_text(printed)
    assert main(["train", "--config", str(tmp_path / "mine.yaml"), "--print_config"]) == 0
    assert capsys.readouterr().out == printed


def test_a_setting_that_follows_from_others() -> None:
    assert load(ReidConfig, overrides=["data.identities=4"]).train.batch_size == 16
    assert load_config(None, ["data.identities=4"]) == load(ReidConfig, None, {"data.identities": 4})


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"train.epochs": "many"}, ("train.epochs", "'many'", "whole number")),
        ({"train.epochs": True}, ("train.epochs", "True", "whole number")),
        ({"train.epochs": 2.5}, ("train.epochs", "2.5", "whole number")),
        ({"train.learning_rate": "fast"}, ("train.learning_rate", "'fast'", "number")),
        ({"freeze_vision": "x"}, ("freeze_vision", "'x'", "number", "true", "false", "null")),
        ({"pairing": "both"}, ("pairing", "'both'", "'image'", "'published'")),
        ({"train.betas": [0.9]}, ("train.betas", "[0.9]", "list", 2)),
        ({"train.step_epochs": "x"}, ("train.step_epochs", "'x'", "list")),
        ({"model.slimming": 3}, ("model.slimming", 3, "{name: value}")),
        ({"train.epochs.more": 3}, ("train.epochs.more",)),
        ({"epochs": 3}, ("epochs", "train.epochs")),
        ({"train": 3}, ("train", 3)),
        ({"train": "{epochs"}, ("train", "'{epochs'")),
        ({"zzz": 3}, ("zzz", "model.vision")),
    ],
)
def test_a_mistake_is_named_with_its_value_and_what_to_give(
    overrides: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        load(RunConfig, None, overrides)


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, named in (
        ("train: {epoch: 3}", ("train.epoch", "train.epochs")),
        ("train: [3]", ("train", "[3]")),
        ("- 3", ("[3]",)),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=naming(path, *named)):
            load(RunConfig, path)


def test_one_syntax_in_every_place() -> None:
    parser = Parser("x", settings=RunConfig)
    parser.add_argument("--data")
    parser.add_argument("--more", nargs="*")
    expected = {"train.epochs": "5", "pairing": "published", "model.slimming.beta": "-1"}
    for words in (
        ["--train.epochs", "5", "--pairing", "published", "--data", "a.b=c", "--model.slimming.beta", "-1"],
        ["--pairing=published", "--data", "a.b=c", "train.epochs=5", "--model.slimming.beta=-1"],
    ):
        options = parser.parse_args(words)
        assert (options.settings, options.data) == (expected, "a.b=c")
    with pytest.raises(ValueError, match=naming("--pairng", "--pairing")):
        parser.parse_args(["--pairng", "published"])
    assert "--train.epochs 10\n" in parser.format_help()
