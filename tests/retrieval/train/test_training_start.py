"""A run that begins with the weights of another model: `start`; and what is said before a run that cannot work."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from messages import mentions, naming
from seps.cli.main import main
from seps.cli.models.compare import _recipe
from seps.encoders import ViT
from seps.method.config import ConfigError
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import begin, from_pretrained
from seps.retrieval.train.run import train_model
from seps.retrieval.train.start import load_run
from seps.training import TrainConfig


@pytest.fixture(scope="module")
def first(encoders, scenes, dev_scenes, tmp_path_factory):
    """A run of a few epochs, to begin another with: its configuration and its folder."""
    train = TrainConfig(epochs=6, batch_size=16, learning_rate=3e-3, backbone_lr_scale=1.0, eval_every=6, prefetch=0)
    data = DataConfig(str(scenes), (str(dev_scenes),), crop_scale=(0.9, 1.0), jitter=0.0)
    config = RunConfig(model=ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0}), data=data, train=train)
    folder = tmp_path_factory.mktemp("start") / "first"
    train_model(config, folder)
    return config, folder


def losses(run) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_run_goes_on_from_the_weights_it_starts_with(first, tmp_path) -> None:
    config, folder = first
    short = replace(config, start=str(folder / "model"), train=replace(config.train, epochs=1, eval_every=1))
    train_model(short, tmp_path / "run")
    assert losses(tmp_path / "run")[0] < 0.8 * losses(folder)[0]
    # The trained run is found again by what it began with.
    assert from_pretrained(tmp_path / "run").config.vision == config.model.vision


def test_a_run_that_makes_its_start_worse_keeps_it(first, tmp_path, capsys) -> None:
    """Dev is scored before the first step; no score of a later step is higher, so the model is its start."""
    config, folder = first
    wild = {"train.learning_rate": 3.0, "train.epochs": 2, "train.eval_every": 1, "train.clip_norm": 0.0}
    data = {"data.train": config.data.train, "data.dev": config.data.dev[0]}
    told = {"start": str(folder / "model"), **data, "train.batch_size": 16, "train.prefetch": 0, **wild}
    words = [part for name, value in told.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--out", str(tmp_path / "run"), "--device", "cpu", *words]) == 0
    assert "best" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [(line["step"], line["score"]) for line in lines if line["kind"] == "eval"]
    assert len(scores) == 3 and scores[0][0] == 0 and scores[0][1] > max(score for _, score in scores[1:])
    known, found = (from_pretrained(one / "model").state_dict() for one in (folder, tmp_path / "run"))
    assert all(torch.equal(found[name], known[name]) for name in known)


def test_a_run_that_ended_before_its_first_step_goes_on(first, tmp_path, monkeypatch) -> None:
    config, folder = first
    short = replace(config, start=str(folder / "model"), train=replace(config.train, epochs=1, eval_every=1))
    result = train_model(short, tmp_path / "whole")

    def lost(*_: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr("seps.retrieval.train.run.RetrievalTask.batch", lost)
        train_model(short, tmp_path / "run")
    again = train_model(short, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert (again.best_score, again.best_step) == (result.best_score, result.best_step)


def test_every_tensor_of_the_same_shape_is_taken_over(first) -> None:
    config, folder = first
    known = from_pretrained(folder / "model").state_dict()
    same = begin(config.model, str(folder / "model")).state_dict()
    assert all(torch.equal(same[name], known[name]) for name in known)
    changed = begin(replace(config.model, slimming={"sparse_ratio": 1.0}), str(folder / "model")).state_dict()
    fresh = [name for name in changed if name not in known or changed[name].shape != known[name].shape]
    assert fresh and all(name.startswith("head.") for name in fresh)
    assert all(torch.equal(changed[name], known[name]) for name in changed if name not in fresh)


def test_base_starts_at_another_size_without_the_package_of_its_first_weights() -> None:
    known = from_pretrained("base")
    model = begin(replace(known.config, image_size=(168, 168), prune={"keep": 0.5, "blocks": [4]}), "base")
    assert isinstance(model.vision, ViT) and model.vision.grid == (12, 12) and model.vision.prune is not None
    assert torch.equal(model.vision.blocks[3].fc1.weight, known.vision.blocks[3].fc1.weight)
    assert torch.equal(model.vision.mean, known.vision.mean)


def test_other_encoders_than_those_it_starts_with_are_refused() -> None:
    with pytest.raises(ConfigError, match=naming("vision", "mini")):
        begin(ModelConfig(), "base")


def test_a_run_that_only_says_where_it_starts_begins_with_that_model_as_it_is() -> None:
    known = from_pretrained("base")
    config = load_run(overrides={"start": "base", "train.epochs": 2})
    assert config.train.epochs == 2
    model, said = begin(config.model, config.start, log=pytest.fail), known.state_dict()
    assert model.image_size == known.image_size and model.head.options == known.head.options
    assert all(torch.equal(value, said[name]) for name, value in model.state_dict().items())
    pixels = torch.rand(1, 3, 280, 280, generator=torch.Generator().manual_seed(0))
    texts = ["a dog in the snow", "two cups"]
    scores = [
        one.eval().score(ImageFeatures(one.encode_pixels(pixels)), one.encode_texts(texts)) for one in (model, known)
    ]
    assert torch.equal(*scores)


def test_what_is_told_of_the_model_wins_over_what_it_starts_with(tmp_path) -> None:
    told = load_run(overrides={"start": "base", "model.dropout": "0.3", "model.slimming.own_guide": "2"}).model
    assert (told.dropout, told.slimming["own_guide"], told.slimming["aggr_ratio"]) == (0.3, 2, 0.256)
    assert told.vision == "dinov2-s-focus" and not told.special_tokens
    # A preset, or another head, brings its own options.
    assert load_run(overrides={"start": "base", "model.preset": "paper"}).model.slimming == {}
    assert load_run(overrides={"start": "base", "model.head": "maxsim"}).model.slimming == {}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("start: base\nmodel:\n  head: mean\n", encoding="utf-8")
    assert load_run(recipe).model.head == "mean"
    assert load_run(overrides={"train.epochs": 2}).model == ModelConfig()


def test_another_size_keeps_the_number_of_merged_patches() -> None:
    smaller = load_run(overrides={"start": "base", "model.image_size": [224, 224]})
    begin(smaller.model, "base", log=pytest.fail)
    news: list[str] = []
    begin(replace(smaller.model, slimming={"aggr_ratio": 0.2}), "base", log=news.append)
    assert len(news) == 1 and mentions(news[0], "start='base'", "head.net")


def test_train_and_compare_take_a_start_without_a_word_on_the_model(tmp_path, capsys) -> None:
    options = Namespace(
        config=[], set=[], settings={"start": "base"}, data="a.jsonl", dev=["b.jsonl"], suite="baselines"
    )
    assert _recipe(options, tmp_path).model.vision == "dinov2-s-focus"
    assert main(["train", "--start", "base", "--print_config"]) == 0
    assert "vision: dinov2-s-focus" in capsys.readouterr().out
    assert main(["train", "--start", "nothing", "--print_config"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_a_lack_of_memory_names_the_setting_that_helps(first, tmp_path, monkeypatch) -> None:
    config, _ = first

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr("seps.retrieval.train.run.train", full)
    with pytest.raises(ValueError, match=naming("2 GiB", "train.chunk_size", "8", "16")):
        train_model(config, tmp_path / "run")


def test_a_size_that_does_not_fit_is_refused_before_photos_are_decoded(first, tmp_path, monkeypatch, capsys) -> None:
    config, _ = first
    monkeypatch.setattr("seps.retrieval.train.data.check_dataset", lambda *_, **__: pytest.fail("a photo was decoded"))
    encoders = ["--model.vision", config.model.vision, "--model.text", config.model.text]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train:\n  epochs: 1\n", encoding="utf-8")
    words = ["compare", "--config", str(recipe), "--data", config.data.train, "--dev", *config.data.dev]
    words += ["--out", str(tmp_path / "out"), "--only", "mean", *encoders, "--model.image_size", "[33,33]"]
    assert main(words) == 2
    assert "33x33" in capsys.readouterr().err
    bad = replace(config, model=replace(config.model, image_size=(33, 33)))
    with pytest.raises(ValueError, match="33x33"):
        train_model(bad, tmp_path / "run")


@pytest.mark.parametrize("which", ["train", "dev"])
def test_a_set_without_descriptions_is_told_before_training_on_them_alone(
    encoders, scenes, dev_scenes, tmp_path, which
):
    """A dev set without any ended the run after its first epochs."""
    known = {"train": scenes, "dev": dev_scenes}
    plain = known[which].parent / f"plain-{which}.jsonl"
    lines = map(json.loads, known[which].read_text().splitlines())
    plain.write_text("".join(json.dumps({**line, "dense": None}) + "\n" for line in lines))
    sets = {**known, which: plain}
    model = ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0, "head": "description"})
    train = TrainConfig(epochs=1, batch_size=16, eval_every=1, prefetch=0)
    settings = RunConfig(model=model, data=DataConfig(str(sets["train"]), (str(sets["dev"]),)), train=train)
    with pytest.raises(ValueError, match=naming("head='description'", f"plain-{which}")):
        train_model(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
