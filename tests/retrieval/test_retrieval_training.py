"""Training: it learns, resumes after SIGKILL to the same losses, and one process equals two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from seps.cli.main import main
from seps.config import ConfigError, LossConfig
from seps.retrieval.config import DataConfig, ModelConfig, PartWeights, RunConfig
from seps.retrieval.data import NothingDescribed, load_jsonl
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.task import RetrievalTask
from seps.retrieval.training import read_data, train_model
from seps.training import TrainConfig
from tiny import save_vision_encoder


def config(encoders, scenes, dev_scenes, *, model=None, **changes) -> RunConfig:
    settings = {
        "epochs": 10,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "backbone_lr_scale": 1.0,
        "weight_decay": 0.0,
        "eval_every": 5,
        "prefetch": 0,
    }
    train = TrainConfig(**{**settings, **changes.pop("train", {})})
    data = DataConfig(str(scenes), (str(dev_scenes),), crop_scale=(0.9, 1.0), jitter=0.0, **changes.pop("data", {}))
    made = ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0, **(model or {})})
    return RunConfig(model=made, data=data, train=train, **changes)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_it_learns_and_the_best_model_is_saved(encoders, scenes, dev_scenes, tmp_path):
    parts = PartWeights(fused=0.5, pixels=1.0, description=0.5)
    result = train_model(
        config(encoders, scenes, dev_scenes, parts=parts, choose_trust=True, train={"epochs": 25}), tmp_path / "run"
    )
    assert result.step == result.total_steps and not result.interrupted
    curve = losses(tmp_path / "run")
    assert sum(curve[-3:]) < 0.6 * sum(curve[:3])
    chance = 100 * 2 * sum(k / 24 for k in (1, 5, 10))
    assert result.best_score > chance + 60
    model = from_pretrained(tmp_path / "run" / "model")
    assert model.trust is not None and 0 < model.trust < 1
    assert from_pretrained(tmp_path / "run").config.vision == encoders["vision"]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "rSum" in card and "`none`" in card and "`image`" in card and "`published` |" not in card


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"head": "mean"}},
        {"model": {"head": "scan"}},
        {"model": {"head": "description"}},
        {"model": {"preset": "open_source"}, "pairing": "published"},
        {"model": {"preset": "paper"}, "loss": LossConfig(kind="triplet", ratio_weight=0.0), "warmup_epochs_sum": 1},
        {"model": {"slimming": {"decision": "binary"}}, "loss": LossConfig(ratio_weight=2.0, target_ratio=0.3)},
        {"data": {"texts": "mixed", "caption_noise": 0.2}},
        {"freeze_text": -1, "freeze_vision": True},
        {"train": {"chunk_size": 8}},
        {"train": {"precision": "bf16", "ema_decay": 0.9}},
    ],
    ids=lambda change: str(change)[:60],
)
def test_every_head_and_option_trains_a_step(encoders, scenes, dev_scenes, tmp_path, changes):
    change = {**changes, "train": {"epochs": 1, "eval_every": 1, **changes.get("train", {})}}
    result = train_model(config(encoders, scenes, dev_scenes, **change), tmp_path / "run")
    assert result.step == 3
    assert all(loss == loss for loss in losses(tmp_path / "run"))


@pytest.mark.parametrize("family", ["swin", "clip"])
def test_other_encoders_train_from_their_folders(encoders, scenes, dev_scenes, tmp_path, family):
    folder = save_vision_encoder(tmp_path / family, family)
    change = {"model": {"vision": str(folder)}, "train": {"epochs": 1}}
    assert train_model(config(encoders, scenes, dev_scenes, **change), tmp_path / "run").step == 3


def test_cached_gradients_give_the_gradients_of_the_whole_batch(encoders, scenes, dev_scenes, tmp_path):
    for chunk in (0, 5):
        run = config(encoders, scenes, dev_scenes, train={"epochs": 1, "chunk_size": chunk, "eval_every": 0})
        train_model(run, tmp_path / str(chunk))
    assert losses(tmp_path / "0") == pytest.approx(losses(tmp_path / "5"), rel=1e-4)


def test_the_query_is_never_in_its_own_description(encoders, scenes, dev_scenes):
    run = config(encoders, scenes, dev_scenes, data={"texts": "mixed"})
    dataset = load_jsonl(scenes)
    task = RetrievalTask(RetrievalModel(run.model), run, dataset, [])
    tokenizer = task.model.model.text.tokenizer
    for step in range(3):
        batch = task.batch(0, step, 0, 1)
        for ids, mask, dense, shown in zip(batch.ids, batch.mask, batch.dense_ids, batch.dense_mask, strict=True):
            query = tokenizer.decode(ids[mask][1:-1])
            assert query not in tokenizer.decode(dense[shown][1:-1])


def test_training_reads_the_files_of_seps_caption(encoders, scenes, dev_scenes, tmp_path):
    dev = load_jsonl(dev_scenes)
    path = tmp_path / "dense.jsonl"
    path.write_text(json.dumps({"image": dev.records[3].id, "dense": "made anew"}) + "\n")
    train_set, (dev_set,) = read_data(config(encoders, scenes, dev_scenes, data={"dense": str(path)}), lambda _: None)
    assert dev_set.dense == [*dev.dense[:3], "made anew", *dev.dense[4:]]
    assert train_set.dense == load_jsonl(scenes).dense
    path.write_text(json.dumps({"image": "nobody", "dense": "x"}) + "\n")
    with pytest.raises(NothingDescribed, match="No line of"):
        read_data(config(encoders, scenes, dev_scenes, data={"dense": (str(path),)}), lambda _: None)


def arguments(encoders, scenes, dev_scenes, run: Path, epochs: int = 6) -> list[str]:
    words = ["train", "--out", str(run), "--device", "cpu", "--data.train", str(scenes)]
    words += ["--data.dev", str(dev_scenes), "--model.dropout", "0.0", "--model.embed_size", "16"]
    words += ["--model.vision", encoders["vision"], "--model.text", encoders["text"]]
    words += ["--train.epochs", str(epochs), "--train.batch_size", "16", "--train.checkpoint_every", "2"]
    return [*words, "--train.eval_every", "2", "--train.learning_rate", "0.003"]


def test_resume_after_sigkill_goes_on_to_the_same_losses(encoders, scenes, dev_scenes, tmp_path):
    assert main(arguments(encoders, scenes, dev_scenes, tmp_path / "whole")) == 0
    command = [sys.executable, "-m", "seps.cli.main", *arguments(encoders, scenes, dev_scenes, tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    for _ in range(600):
        if (tmp_path / "killed" / "metrics.jsonl").exists() and len(losses(tmp_path / "killed")) >= 5:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(arguments(encoders, scenes, dev_scenes, tmp_path / "killed")) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_two_processes_train_as_one_does(encoders, scenes, dev_scenes, tmp_path):
    assert main(arguments(encoders, scenes, dev_scenes, tmp_path / "one", epochs=2)) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "seps.cli.main", *arguments(encoders, scenes, dev_scenes, tmp_path / "two", epochs=2)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)
    one, two = (from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-3, rtol=1e-2)


def test_mistakes_get_a_sentence(encoders, scenes, dev_scenes, tmp_path, capsys):
    words = arguments(encoders, scenes, dev_scenes, tmp_path / "run")
    missing = [word.replace(str(scenes), str(tmp_path / "nothing.jsonl")) for word in words]
    assert main(missing) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
    assert main([*words, "--train.batch_size", "500"]) == 2
    assert "batch_size" in capsys.readouterr().err
    for wrong, said in (
        ("--train.epochs=many", "train.epochs"),
        ("--no.such=1", "--no.such"),
        ("--config=no.yaml", "no.yaml"),
    ):
        assert main([*words, wrong]) == 2
        shown = capsys.readouterr().err
        assert said in shown and len(shown.splitlines()) == 1
    with pytest.raises(ConfigError, match="pairing='published'"):
        RunConfig(model=ModelConfig(head="mean"), pairing="published")
    with pytest.raises(ConfigError, match="nothing would train"):
        PartWeights(fused=0.0)
