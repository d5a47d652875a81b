"""A partly described data set: images without description are judged by their pixels alone, also where it is chosen
how much the description counts, and teach its part of the loss nothing. And settings of the head that cannot work."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from messages import mentions, naming
from seps.cli.main import main
from seps.method.config import ConfigError
from seps.retrieval.config import ModelConfig, PartWeights, RunConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures, Scores
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import save_pretrained
from seps.retrieval.train import run as training
from seps.retrieval.train.task import RetrievalTask


@pytest.fixture
def model(encoders):
    torch.manual_seed(0)
    return RetrievalModel(ModelConfig(**encoders, embed_size=16, image_size=(32, 32), dropout=0.0)).eval()


def test_trust_is_chosen_by_the_scores_that_it_gives(model, dev_scenes, monkeypatch):
    """The grid mixed padding into the scores of images without description."""
    data = load_jsonl(dev_scenes)
    half = dataclasses.replace(
        data, records=[dataclasses.replace(r, dense=None) if i % 2 else r for i, r in enumerate(data.records)]
    )
    seen, honest = [], training.recall
    monkeypatch.setattr(training, "recall", lambda scores, owner: seen.append(scores) or honest(scores, owner))
    training.choose_description_weight(model, [half])
    assert len(seen) == len(training.WEIGHTS_TRIED)
    texts = model.encode_texts(half.captions)
    images = ImageFeatures(encode_images(model, half), *model.encode_descriptions(half.dense))
    for weight, mixed in zip(training.WEIGHTS_TRIED, seen, strict=True):
        model.set_description_weight(weight)
        torch.testing.assert_close(mixed, model.score(images, texts), atol=1e-5, rtol=0)


def test_the_descriptions_part_learns_from_described_images_alone(model, scenes):
    config = RunConfig(model=model.config, parts=PartWeights(fused=0.0, pixels=0.0, description=1.0))
    task = RetrievalTask(model, config, load_jsonl(scenes), [], pixels=torch.zeros(0))
    torch.manual_seed(1)
    rows, ids = torch.randn(6, 6), torch.arange(6)
    described = torch.tensor([True, False, True, True, False, True])

    def losses(scores, owners=ids):
        counts = torch.ones(len(ids)) if scores.described is None else scores.described
        return task._part_losses(scores, owners, counts.long().numpy())

    found, _ = losses(Scores(rows, rows, rows, described))
    nonsense = rows.clone()
    nonsense[~described] = 100.0
    again, _ = losses(Scores(rows, rows, nonsense, described))
    some = described.nonzero().squeeze(-1)
    alone, _ = losses(Scores(rows, rows, rows[some][:, some]), ids[some])
    assert torch.equal(found, again) and torch.equal(found, alone)
    everyone, _ = losses(Scores(rows, rows, rows, torch.ones(6, dtype=torch.bool)))
    assert torch.equal(everyone, losses(Scores(rows, rows, rows))[0]) and everyone != found
    few = rows.clone().requires_grad_()
    losses(Scores(rows, rows, few, torch.tensor([True] + [False] * 5)))[0].backward()
    assert few.grad is not None and not few.grad.any()


@pytest.mark.parametrize(
    ("slimming", "message"),
    [
        ({"sparse_ratoi": 0.8}, naming("sparse_ratoi", "sparse_ratio")),
        ({"zzz": 1}, naming("'zzz'", "embed_size")),
    ],
)
def test_settings_of_the_head_that_cannot_work(slimming, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(slimming=slimming)


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(ConfigError, match="wrong"):
        ModelConfig(slimming={"sparse_ratio": "much"}).slimming_config(16, 0)


def test_a_typo_on_the_command_line_is_a_sentence(tmp_path, capsys):
    code = main(["train", "--out", str(tmp_path / "run"), "--model.slimming", '{"sparse_ratoi": 0.8}'])
    said = capsys.readouterr().err
    assert code != 0 and "Traceback" not in said
    assert "sparse_ratoi" in said and "sparse_ratio" in said


def test_the_table_says_that_nothing_was_described(model, dev_scenes, tmp_path, capsys):
    save_pretrained(model, tmp_path / "model")
    lines = [json.loads(line) for line in dev_scenes.read_text().splitlines()]
    bare = [{"image": line["image"], "captions": line["captions"]} for line in lines]
    (tmp_path / "bare.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in bare))
    command = ["eval", "--model", str(tmp_path / "model"), "--images", str(dev_scenes.parent), "--data"]
    assert main([*command, str(tmp_path / "bare.jsonl")]) == 0
    assert mentions(capsys.readouterr().out, "24", "description")
    assert main([*command, str(dev_scenes)]) == 0
    assert mentions(capsys.readouterr().out, "24", "description")
    assert main([*command, str(dev_scenes), "--protocol", "none"]) == 0
    assert "description" not in capsys.readouterr().out
