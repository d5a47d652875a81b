"""A run without a dev set, or with one that cannot tell: the last weights are the model, and nothing is chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from seps.cli.main import main
from seps.retrieval.config import DataConfig, ModelConfig, PartWeights, RunConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.train.run import choose_description_weight, train_model
from seps.settings import to_yaml
from seps.training import TrainConfig


def config(encoders, scenes, *dev: Path) -> RunConfig:
    parts = PartWeights(fused=0.5, pixels=1.0, description=0.5)
    train = TrainConfig(epochs=3, batch_size=16, learning_rate=3e-3, eval_every=1, prefetch=0)
    data = DataConfig(str(scenes), tuple(map(str, dev)), crop_scale=(0.9, 1.0), jitter=0.0)
    made = ModelConfig(**encoders, embed_size=16, dropout=0.0)
    return RunConfig(model=made, data=data, train=train, parts=parts, choose_trust=True)


def test_without_dev_the_last_weights_are_saved(encoders, scenes, tmp_path):
    said: list[str] = []
    result = train_model(config(encoders, scenes), tmp_path / "run", log=said.append)
    assert result.step == result.total_steps == 9 and result.best_score is None
    assert result.best_checkpoint is not None and result.best_checkpoint.name == "step-00000009"
    saved, last = from_pretrained(tmp_path / "run" / "model"), from_pretrained(tmp_path / "run")
    assert saved.description_weight == last.description_weight != 0.2
    assert all(torch.equal(value, last.state_dict()[name]) for name, value in saved.state_dict().items())
    assert any("weight" in sentence for sentence in said)
    assert not any("chosen" in sentence for sentence in said)


def test_the_command_does_not_speak_of_a_dev_set_that_is_not_there(encoders, scenes, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(to_yaml(config(encoders, scenes)))
    command = ["train", "--config", str(tmp_path / "run.yaml"), "--train.epochs", "1", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "--data.dev" in out and "best score" not in out


def test_a_weight_is_not_chosen_where_no_picture_is_described(encoders, scenes, dev_scenes, tmp_path):
    model = from_pretrained(_trained(encoders, scenes, dev_scenes, tmp_path))
    model.set_description_weight(0.7)
    data = load_jsonl(dev_scenes)
    bare = dataclasses.replace(data, records=[dataclasses.replace(one, dense=None) for one in data.records])
    assert choose_description_weight(model, [bare]) is None
    assert model.description_weight == pytest.approx(0.7)
    assert choose_description_weight(model, [bare, data]) is not None


def _trained(encoders, scenes, dev_scenes, folder: Path) -> Path:
    run = config(encoders, scenes, dev_scenes)
    run = dataclasses.replace(run, choose_trust=False, train=dataclasses.replace(run.train, epochs=1))
    train_model(run, folder / "other")
    return folder / "other"
