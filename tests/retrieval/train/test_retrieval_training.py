"""Training: it learns, resumes after SIGKILL to the same losses, and one process equals two."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from messages import naming
from seps.cli.main import main
from seps.method.config import ConfigError, LossConfig
from seps.retrieval.config import DataConfig, ModelConfig, PartWeights, RunConfig
from seps.retrieval.data import NothingDescribed, load_jsonl
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.train.data import load_sets
from seps.retrieval.train.run import train_model
from seps.retrieval.train.task import RetrievalTask
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
    assert model.description_weight is not None and 0 < model.description_weight < 1
    assert from_pretrained(tmp_path / "run").config.vision == encoders["vision"]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "rSum" in card and "`none`" in card and "`image`" in card and "`published` |" not in card


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"head": "mean"}},
        {"model": {"head": "scan"}},
        {"model": {"head": "maxsim"}, "choose_trust": True},
        {"model": {"head": "maxsim", "slimming": {"dense": "none"}}, "parts": PartWeights(fused=1.0)},
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
    run = config(encoders, scenes, dev_scenes, **change)
    torch.manual_seed(run.train.seed)
    start = RetrievalModel(run.model).state_dict()
    result = train_model(run, tmp_path / "run")
    assert result.step == 3
    curve = losses(tmp_path / "run")
    assert all(math.isfinite(loss) for loss in curve)
    # What learns has moved, what is frozen has not.
    end = from_pretrained(tmp_path / "run", averaged=False).state_dict()
    moved = {name.split(".")[0] for name, value in end.items() if not torch.equal(value, start[name])}
    frozen = {name for name in ("vision", "text") if getattr(run, f"freeze_{name}") == -1}
    unused = {"vision", "project_patches", "head"} if run.model.head == "description" else set()
    unused |= {"head"} if not list(RetrievalModel(run.model).head.parameters()) else set()
    assert moved == {"vision", "text", "project_patches", "project_words", "head"} - frozen - unused


def test_half_precision_trains_like_float32(encoders, scenes, dev_scenes, tmp_path):
    curves = {}
    for precision in ("float32", "bf16"):
        run = config(encoders, scenes, dev_scenes, train={"epochs": 2, "eval_every": 0, "precision": precision})
        train_model(run, tmp_path / precision)
        curves[precision] = losses(tmp_path / precision)
    # 8 bits of mantissa: a loss is off by parts of a hundred. Selecting other patches, or a loss in bf16, is far off.
    assert curves["bf16"] == pytest.approx(curves["float32"], rel=0.02)
    assert curves["bf16"] != curves["float32"]


@pytest.mark.parametrize("family", ["swin", "clip"])
def test_other_encoders_train_from_their_folders(encoders, scenes, dev_scenes, tmp_path, family):
    folder = save_vision_encoder(tmp_path / family, family)
    change = {"model": {"vision": str(folder)}, "train": {"epochs": 1}}
    assert train_model(config(encoders, scenes, dev_scenes, **change), tmp_path / "run").step == 3


def test_cached_gradients_give_the_gradients_of_the_whole_batch(encoders, scenes, dev_scenes, tmp_path):
    for chunk in (0, 5):
        run = config(encoders, scenes, dev_scenes, train={"epochs": 1, "chunk_size": chunk, "eval_every": 0})
        train_model(run, tmp_path / str(chunk))
    assert losses(tmp_path / "0") == pytest.approx(losses(tmp_path / "5"), rel=1e-5)


def test_the_query_is_never_in_its_own_description(encoders, scenes, dev_scenes):
    run = config(encoders, scenes, dev_scenes, data={"texts": "mixed"})
    dataset = load_jsonl(scenes)
    task = RetrievalTask(RetrievalModel(run.model), run, dataset, [])
    tokenizer = task.model.model.text.tokenizer
    for step in range(3):
        batch = task.batch(0, step, 0, 1)
        for ids, mask, dense, shown in zip(
            batch.ids, batch.mask, batch.description_ids, batch.description_mask, strict=True
        ):
            query = tokenizer.decode(ids[mask][1:-1])
            assert query not in tokenizer.decode(dense[shown][1:-1])


def test_training_reads_the_files_of_seps_caption(encoders, scenes, dev_scenes, tmp_path):
    dev = load_jsonl(dev_scenes)
    path = tmp_path / "dense.jsonl"
    path.write_text(json.dumps({"image": dev.records[3].id, "dense": "made anew"}) + "\n")
    train_set, dev_set = load_sets(config(encoders, scenes, dev_scenes, data={"dense": str(path)}))
    assert dev_set.dense == [*dev.dense[:3], "made anew", *dev.dense[4:]]
    assert train_set.dense == load_jsonl(scenes).dense
    path.write_text(json.dumps({"image": "nobody", "dense": "x"}) + "\n")
    with pytest.raises(NothingDescribed, match="line"):
        load_sets(config(encoders, scenes, dev_scenes, data={"dense": (str(path),)}))


def arguments(encoders, scenes, dev_scenes, run: Path, epochs: int = 6) -> list[str]:
    words = ["train", "--out", str(run), "--device", "cpu", "--data.train", str(scenes)]
    words += ["--data.dev", str(dev_scenes), "--model.dropout", "0.0", "--model.embed_size", "16"]
    words += ["--model.vision", encoders["vision"], "--model.text", encoders["text"]]
    words += ["--train.epochs", str(epochs), "--train.batch_size", "16", "--train.checkpoint_every", "2"]
    return [*words, "--train.eval_every", "2", "--train.learning_rate", "0.003"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_processes_train_as_one_does(encoders, scenes, dev_scenes, tmp_path):
    assert main(arguments(encoders, scenes, dev_scenes, tmp_path / "one", epochs=2)) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "seps.cli.main", *arguments(encoders, scenes, dev_scenes, tmp_path / "two", epochs=2)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = (from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    # A shift before the softmax over patches changes nothing: its gradient is rounding alone, which Adam enlarges.
    shift = "head.net.aggr_net.weight.3.bias"
    assert shift in one
    for name in one.keys() - {shift}:
        torch.testing.assert_close(
            two[name], one[name], atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_mistakes_get_a_sentence(encoders, scenes, dev_scenes, tmp_path, capsys):
    words = arguments(encoders, scenes, dev_scenes, tmp_path / "run")
    missing = [word.replace(str(scenes), str(tmp_path / "nothing.jsonl")) for word in words]
    assert main(missing) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
    assert main([*words, "--train.batch_size", "500"]) == 2
    assert "batch_size" in capsys.readouterr().err
    for wrong, said in (
        ("--train.epochs=many", "train.epochs"),
        ("--no.such=1", "no setting no.such"),
        ("--config=no.yaml", "no.yaml"),
    ):
        assert main([*words, wrong]) == 2
        shown = capsys.readouterr().err
        assert said in shown and len(shown.splitlines()) == 1
    with pytest.raises(ConfigError, match="pairing='published'"):
        RunConfig(model=ModelConfig(head="mean"), pairing="published")
    with pytest.raises(ConfigError, match="train"):
        PartWeights(fused=0.0)


def test_every_line_of_the_log_names_the_protocol(encoders, scenes, dev_scenes, tmp_path, capsys):
    for name, extra, protocol in (("a", [], "image"), ("b", ["--model.head", "mean"], "none")):
        assert main([*arguments(encoders, scenes, dev_scenes, tmp_path / name, epochs=1), *extra]) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert {line["kind"] for line in lines} == {"train", "eval"}
        assert all(line["protocol"] == protocol for line in lines)
        assert f"{protocol}" in capsys.readouterr().out


def test_a_finished_run_is_extended_by_the_same_command(encoders, scenes, dev_scenes, tmp_path):
    steady = ["--train.schedule", "constant", "--train.warmup_steps", "1", "--train.eval_every", "1"]
    assert main([*arguments(encoders, scenes, dev_scenes, tmp_path / "whole", epochs=2), *steady]) == 0
    for epochs in (1, 2):
        assert main([*arguments(encoders, scenes, dev_scenes, tmp_path / "run", epochs=epochs), *steady]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    one, two = (from_pretrained(tmp_path / name / "model") for name in ("whole", "run"))
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["about"]["step"] == 6


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--model.slimming", '{"sparse_ratio": 0.8}'], "model.slimming"),
        (["--loss.temperature", "0.2"], "loss.temperature"),
        (["--text_lr_scale", "0.5"], "text_lr_scale"),
        (["--data.texts", "mixed"], "data.texts"),
        (["--freeze_text", "-1"], "freeze_text"),
    ],
)
def test_a_run_is_not_continued_with_other_settings(encoders, scenes, dev_scenes, started, capsys, changed, named):
    before = (started / "metrics.jsonl").read_bytes()
    assert main([*arguments(encoders, scenes, dev_scenes, started, epochs=1), *changed]) == 2
    shown = capsys.readouterr().err
    assert f"{named}" in shown and len(shown.splitlines()) == 1
    assert (started / "metrics.jsonl").read_bytes() == before


def test_a_moved_data_set_is_the_same_data_set(encoders, scenes, dev_scenes, started, tmp_path):
    moved = shutil.copytree(scenes.parent, tmp_path / "moved") / scenes.name
    assert main(arguments(encoders, moved, dev_scenes, started, epochs=1)) == 0


@pytest.fixture(scope="module")
def started(encoders, scenes, dev_scenes, tmp_path_factory):
    run = tmp_path_factory.mktemp("started") / "run"
    assert main(arguments(encoders, scenes, dev_scenes, run, epochs=1)) == 0
    return run


def test_what_lies_where_the_model_goes_is_told_before_training(encoders, scenes, dev_scenes, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.h5").write_text("precious")
    assert main(arguments(encoders, scenes, dev_scenes, tmp_path)) == 2
    assert str(tmp_path / "model") in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights.h5").read_text() == "precious"


@pytest.mark.parametrize("which", ["card", "tokenizer"])
def test_a_changed_file_of_the_earlier_model_is_told_before_training(
    encoders, scenes, dev_scenes, started, tmp_path, capsys, which
):
    run = shutil.copytree(started, tmp_path / "run")
    folders = json.loads((run / "model" / "config.json").read_text())["encoders"]
    name = "README.md" if which == "card" else f"{folders['text']}/tokenizer.json"
    (run / "model" / name).write_text("my notes")
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    assert main(arguments(encoders, scenes, dev_scenes, run, epochs=2)) == 2
    shown = capsys.readouterr().err
    assert f"{name}" in shown
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before
    (run / "model" / name).unlink()
    assert main(arguments(encoders, scenes, dev_scenes, run, epochs=1)) == 0


def test_every_photo_is_read_once_before_training(encoders, scenes, dev_scenes, tmp_path, monkeypatch):
    from seps.images import decoding as images
    from seps.retrieval.data import check

    read: list[str] = []
    plain = check.read_source

    def counting(source):
        read.append(str(source))
        return plain(source)

    monkeypatch.setattr(check, "read_source", counting)
    monkeypatch.setattr(images, "read_source", counting)
    train_model(config(encoders, scenes, dev_scenes, train={"epochs": 1}), tmp_path / "run")
    assert sorted(read) == sorted(str(s) for part in (scenes, dev_scenes) for s in load_jsonl(part).sources)


def test_the_processes_share_a_batch_evenly_or_not_at_all(encoders, scenes, dev_scenes):
    run = config(encoders, scenes, dev_scenes)
    task = RetrievalTask(RetrievalModel(run.model), run, load_jsonl(scenes), [])
    assert task.steps_per_epoch(4) == 3
    with pytest.raises(ValueError, match=naming("batch_size", "16", "3")):
        task.steps_per_epoch(3)
    whole = task.batch(0, 1, 0, 1)
    parts = [task.batch(0, 1, rank, 4) for rank in range(4)]
    for name in ("pixels", "ids", "mask", "description_ids", "description_mask", "images"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert [part.first for part in parts] == [0, 4, 8, 12]


def test_a_batch_comes_from_its_own_epoch_whatever_other_threads_do(encoders, scenes, dev_scenes, monkeypatch):
    """While epoch 0's order is looked up another worker asks for epoch 1's."""
    run = config(encoders, scenes, dev_scenes)
    task = RetrievalTask(RetrievalModel(run.model), run, load_jsonl(scenes), [])
    expected = [task._batches(0), task._batches(1)]

    class Slot:
        """`_order` as another thread sees to it: after each write it holds the next epoch."""

        value = (-1, [])

        def __get__(self, *_):
            return self.value

        def __set__(self, _, value):
            self.value = (1, expected[1])

    monkeypatch.setattr(RetrievalTask, "_order", Slot(), raising=False)
    got = task._batches(0)
    assert all(
        torch.equal(a, b) for one, two in zip(got, expected[0], strict=True) for a, b in zip(one, two, strict=True)
    )


def test_encoders_have_rates_of_their_own_and_blocks_fall_behind(encoders, scenes, dev_scenes):
    settings = config(encoders, scenes, dev_scenes, vision_lr=3e-5, text_lr=1e-4, layer_decay=0.5)
    model = RetrievalModel(settings.model)
    task = RetrievalTask(model, settings, load_jsonl(scenes), [])
    rate = {id(p): group["lr"] for group in task.parameter_groups(1e-3, 0.1) for p in group["params"]}
    assert len(rate) == len(list(task.model.parameters()))
    for encoder, peak in ((model.vision, 3e-5), (model.text, 1e-4)):
        blocks = next(part for part in encoder.modules() if isinstance(part, torch.nn.ModuleList))
        first, last = (next(iter(blocks[place].parameters())) for place in (0, -1))
        depth = len(blocks) - 1
        assert rate[id(last)] == pytest.approx(peak * 0.5)
        assert rate[id(first)] == pytest.approx(peak * 0.5 * 0.5**depth)
        assert rate[id(next(iter(encoder.parameters())))] == pytest.approx(peak * 0.5 * 0.5 ** (depth + 1))
    assert rate[id(model.project_words.weight)] == 1e-3


def test_distillation_teaches_the_pixels_and_not_the_description(encoders, scenes, dev_scenes):
    parts = PartWeights(fused=0.0, pixels=1e-9, description=1e-9, distill=1.0)
    settings = config(encoders, scenes, dev_scenes, parts=parts)
    torch.manual_seed(0)
    task = RetrievalTask(RetrievalModel(settings.model), settings, load_jsonl(scenes), [])
    task.model.train()
    loss, figures = task.loss(task.batch(0, 0, 0, 1), 0)
    assert float(figures["loss_distill"]) == pytest.approx(loss.item(), rel=1e-4)
    loss.backward()
    assert task.model.model.project_patches[1].weight.grad.abs().max() > 1e-6
    # The description's temperature belongs to the teacher.
    assert task.model.criteria["description"].contrastive_loss.log_scale.grad.abs() < 1e-7
    with pytest.raises(ConfigError, match="distill"):
        PartWeights(pixels=1.0, distill=1.0)
    with pytest.raises(ConfigError, match="infonce"):
        RunConfig(parts=PartWeights(pixels=1.0, description=1.0, distill=1.0), loss=LossConfig(kind="triplet"))
