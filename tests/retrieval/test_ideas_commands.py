"""Ideas of somebody's own in every command: each is really used, against a twin that needs no registry.

The twin of a decision is a subclass of the network with `select` written out.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import seps
from ideas import FirstTwin, forget_plugins, median, model_config, quietly, run_config
from messages import mentions, naming
from seps import registry
from seps.cli.main import main
from seps.hub.folder import ModelError
from seps.method.checks import InputError
from seps.method.config import ConfigError
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.search.searcher import Searcher
from seps.plugins import PluginError, load_plugin
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.protocol import view
from seps.retrieval.evaluate.run import encode_images, evaluate, score_dataset
from seps.retrieval.experiments.suites import suite_with_own_rows
from seps.retrieval.heads import ImageFeatures, SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.train.run import train_model
from seps.retrieval.train.task import RetrievalTask
from stores import custom_size, explain_file

pytestmark = pytest.mark.usefixtures("own_registry")
PLUGIN = """
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import seps
from seps.encoders import Preprocessing, VisionEncoder
from seps.retrieval.heads import Head, Scores


@seps.register_decision("first")
def keep_first(scores, count, valid):
    return (torch.arange(scores.shape[-1]) < count).float().expand_as(scores)


@seps.register_decision("one")
def keep_one(scores, count, valid):
    return F.one_hot(scores.argmax(dim=-1), scores.shape[-1]).float()


@seps.register_head("cls")
class ClsHead(Head):
    def __init__(self, config):
        super().__init__()
        self.turn = nn.Linear(config.embed_size, config.embed_size)

    def forward(self, images, texts, *, want_masks=False):
        words = (texts.words * texts.mask[..., None]).sum(dim=1)
        similarity = F.normalize(self.turn(images.tokens[:, 0]), dim=-1) @ F.normalize(words, dim=-1).T
        return Scores(similarity, pixels=similarity)


@seps.register_encoder("squares")
class Squares(VisionEncoder):
    def __init__(self, image_size=(32, 32)):
        plain = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        super().__init__(width=8, num_prefix_tokens=1, image_size=image_size, stride=(8, 8), preprocessing=plain)
        self.patches = nn.Conv2d(3, 8, kernel_size=8, stride=8)

    def encode(self, normalised):
        found = self.patches(normalised).flatten(2).transpose(1, 2)
        return torch.cat([found.mean(dim=1, keepdim=True), found], dim=1)


@seps.register_row("keeps-one", "keeps one patch", reference="mean")
def keeps_one(recipe):
    return replace(recipe, model=replace(recipe.model, slimming={"decision": "one"}))
"""


@pytest.fixture
def plugin(tmp_path) -> Path:
    path = tmp_path / "my_ideas.py"
    path.write_text(PLUGIN)
    return path


def twins(encoders) -> tuple[RetrievalModel, RetrievalModel]:
    """A model with the registered decision, and one with the twin's network, of the same weights."""
    torch.manual_seed(3)
    model = RetrievalModel(model_config(encoders, slimming={"decision": "first"}))
    twin = RetrievalModel(model_config(encoders))
    twin.head = SlimmingHead(twin.head.net.config, FirstTwin(twin.head.net.config))
    twin.load_state_dict(model.state_dict())
    return model.eval(), twin.eval()


def test_a_decision_is_used_by_a_training_step(encoders, scenes, dev_scenes, plugin):
    load_plugin(plugin)
    model, twin = twins(encoders)
    config = run_config(encoders, scenes, dev_scenes)
    losses = []
    for one in (model, twin):
        task = RetrievalTask(one, config, load_jsonl(scenes), [])
        task.model.train()
        loss, _ = quietly(lambda task=task: task.loss(task.batch(0, 0, 0, 1), 0))
        gradient = torch.autograd.grad(loss, one.project_patches[1].weight)[0]
        losses.append((loss, gradient))
    torch.testing.assert_close(losses[0][0], losses[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(losses[0][1], losses[1][1], atol=1e-5, rtol=1e-3)
    plain = RetrievalModel(model_config(encoders))
    plain.load_state_dict(model.state_dict())
    task = RetrievalTask(plain, config, load_jsonl(scenes), [])
    task.model.train()
    assert abs(task.loss(task.batch(0, 0, 0, 1), 0)[0] - losses[0][0]) > 1e-4


def test_a_decision_is_used_by_evaluation_and_explanation(encoders, dev_scenes, plugin):
    load_plugin(plugin)
    model, twin = twins(encoders)
    data = load_jsonl(dev_scenes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it promises its form: nothing is said
        scores = score_dataset(model, data, view(data, "image"))
    expected = quietly(lambda: score_dataset(twin, data, view(data, "image")))
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=0)
    assert evaluate(model, data).metrics.rsum == pytest.approx(quietly(lambda: evaluate(twin, data)).metrics.rsum)
    found = explain_file(model, data.records[0].source.path, data.captions[0], data.dense[0])
    assert found.kept == [True] * 8 + [False] * 8
    assert found.score == pytest.approx(float(scores[0, 0]), abs=1e-4)


@pytest.mark.parametrize("keep", [None, 6])
def test_a_decision_is_used_by_index_and_search(encoders, dev_scenes, plugin, tmp_path, keep):
    load_plugin(plugin)
    model, twin = twins(encoders)
    save_pretrained(model, tmp_path / "model")
    options = IndexOptions(size=custom_size("float32", patches=keep), workers=1, bank=False)
    index_folder(dev_scenes.parent, tmp_path / "store", model, str(tmp_path / "model"), options=options)
    forget_plugins()
    with pytest.raises(ModelError, match="first"):
        Searcher(tmp_path / "store")
    load_plugin(plugin)
    hits = Searcher(tmp_path / "store").search("a red square on the left", k=24, exact=True)
    data = load_jsonl(dev_scenes)
    words = twin.encode_texts(["a red square on the left"])
    features = ImageFeatures(encode_images(twin, data), *twin.encode_descriptions(data.dense))
    expected = quietly(lambda: twin.score(features, words))[:, 0]
    names = [record.source.path.name for record in data.records]
    found = torch.tensor([hit.score for hit in sorted(hits, key=lambda hit: names.index(hit.path))])
    if keep is None:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    else:  # of six stored patches the first six are kept: the number that it would keep of all is larger
        assert len(hits) == 24 and not torch.allclose(found, expected, atol=1e-3)


def words_of_train(encoders, train, dev, out, *more: str) -> list[str]:
    words = ["train", "--out", str(out), "--device", "cpu", "--data.train", str(train), "--data.dev", str(dev)]
    words += ["--model.vision", encoders["vision"], "--model.text", encoders["text"], "--model.embed_size", "16"]
    return [*words, "--train.epochs", "1", "--train.batch_size", "16", "--train.prefetch", "0", *more]


def test_the_commands_take_a_plugin_and_say_so_without_it(encoders, scenes, dev_scenes, plugin, tmp_path, capsys):
    run = tmp_path / "run"
    train = words_of_train(encoders, scenes, dev_scenes, run, "--model.slimming.decision", "one")
    own = ["--plugin", str(plugin)]
    photo = str(dev_scenes.parent / "dev000.png")
    store = str(tmp_path / "store")
    model = ["--model", str(run / "model")]
    commands = [
        train,
        ["eval", *model, "--data", str(dev_scenes), "--device", "cpu", "--json", "-"],
        ["index", str(dev_scenes.parent), "--store", store, *model, "--device", "cpu", "--workers", "1"],
        ["search", "a red square", "--store", store, "--json"],
        ["explain", photo, "a red square", *model, "--json"],
        ["explain", "dev000.png", "a red square", "--store", store, "--json"],
        ["export", str(run / "model"), "-o", str(tmp_path / "onnx")],
    ]
    for command in commands:
        forget_plugins()
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert "'one'" in said and mentions(said, "--plugin", "FILE") and "register_decision('one')" in said, said
        assert "Traceback" not in said
        if command[0] == "export":
            continue  # it takes seconds; tests/method/test_export_network.py exports ideas
        assert quietly(lambda command=command: main([*command, *own])) == 0, command
        out = capsys.readouterr().out
        if command[0] == "explain":
            assert sum(json.loads(out)["kept"]) == 1


def test_what_belongs_to_no_word_is_not_called_an_mlp(encoders, dev_scenes, tmp_path, capsys):
    """An alignment of one's own adds to the means what is no MLP."""
    seps.register_alignment("median")(median)
    save_pretrained(RetrievalModel(model_config(encoders, slimming={"alignment": "median"})), tmp_path / "model")
    words = ["explain", str(dev_scenes.parent / "dev000.png"), "a red square", "--model", str(tmp_path / "model")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "(rest) " in said and "MLP" not in said


def test_a_head_that_returns_no_scores_is_a_sentence(encoders, scenes, dev_scenes, tmp_path, capsys):
    path = tmp_path / "heads.py"
    path.write_text(
        "import seps\nfrom seps.retrieval.heads import Head, Scores\n"
        "class Plain(Head):\n    def __init__(self, config):\n        super().__init__()\n"
        "@seps.register_head('tensor')\nclass T(Plain):\n    def forward(self, images, texts, *, want_masks=False):\n"
        "        return images.tokens.mean(1) @ texts.words.mean(1).T\n"
        "@seps.register_head('turned')\nclass U(Plain):\n    def forward(self, images, texts, *, want_masks=False):\n"
        "        return Scores((images.tokens.mean(1) @ texts.words.mean(1).T)[:3])\n"
    )
    for name, came in (("tensor", ("Tensor",)), ("turned", ("(3, ",))):
        words = words_of_train(encoders, scenes, dev_scenes, tmp_path / name, "--model.head", name)
        assert main([*words, "--plugin", str(path)]) == 2
        said = capsys.readouterr().err
        assert mentions(said, "Scores", *came)
        model = RetrievalModel(model_config(encoders, head=name))
        with pytest.raises(InputError, match="seps"):
            evaluate(model, load_jsonl(dev_scenes), "none")


def test_an_idea_that_has_changed_is_named_where_its_weights_do_not_fit(encoders, plugin, tmp_path):
    """The message sent people to another release of transformers."""
    load_plugin(plugin)
    save_pretrained(RetrievalModel(model_config(encoders, head="cls", embed_size=16)), tmp_path / "model")
    one_file = from_pretrained(tmp_path / "model", plugins=str(plugin))  # a file is not a list of its letters
    assert one_file.config.head == "cls"
    for change in (("self.turn", "self.other"), ("config.embed_size, config.embed_size", "config.embed_size, 3")):
        forget_plugins()
        plugin.write_text(PLUGIN.replace(*change))
        with pytest.raises(ModelError, match="'cls'") as told:
            from_pretrained(tmp_path / "model", plugins=[plugin])
        assert "transformers" not in str(told.value)


@pytest.mark.slow
def test_a_row_of_ones_own_is_trained_and_reported(encoders, scenes, dev_scenes, plugin, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{vision: {encoders['vision']}, text: {encoders['text']}, embed_size: 16}}\n"
        "train: {epochs: 1, batch_size: 16, prefetch: 0, eval_every: 0}\n"
    )
    words = ["compare", "--config", str(recipe), "--data", str(scenes), "--dev", str(dev_scenes), "--seeds", "0"]
    words += ["--device", "cpu", "--out", str(tmp_path / "out"), "--only", "keeps-one"]
    assert main(words) == 2
    assert "entry" in capsys.readouterr().err
    assert main([*words, "--plugin", str(plugin)]) == 0
    (result,) = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert result["name"] == "keeps-one" and result["kept_at_test"] == pytest.approx(1 / 16)
    assert "**keeps-one**: keeps one patch" in (tmp_path / "out/table.md").read_text()
    seps.register_row("mean", "taken")(len)
    with pytest.raises(ConfigError, match="mean"):
        suite_with_own_rows("baselines")
    forget_plugins()
    seps.register_row("mine", "no reference", suite="ablation", reference="nobody")(len)
    with pytest.raises(ConfigError, match="nobody"):
        suite_with_own_rows("ablation")
    forget_plugins()
    seps.register_row("mine", "one more", suite="ablation", reference="base")(len)
    assert suite_with_own_rows("ablation")["mine"].group == "differences"


def test_a_head_and_an_encoder_of_ones_own_train_save_and_load(encoders, scenes, dev_scenes, plugin, tmp_path):
    load_plugin(plugin)
    config = run_config(encoders, scenes, dev_scenes, head="cls", vision="squares")
    train_model(config, tmp_path / "run", device="cpu")
    saved = json.loads((tmp_path / "run/model/config.json").read_text())
    assert saved["ideas"] == {"head": ["cls"], "vision encoder": ["squares"]}
    model = from_pretrained(tmp_path / "run/model")
    assert type(model.head).__name__ == "ClsHead" and type(model.vision).__name__ == "Squares"
    data = load_jsonl(dev_scenes)
    scores = score_dataset(model, data, view(data, "none"))
    texts = model.encode_texts(data.captions[:2])
    with torch.no_grad():
        image = F.normalize(model.head.turn(encode_images(model, data)[:, 0]), dim=-1)
    words = F.normalize((texts.words * texts.mask[..., None]).sum(dim=1), dim=-1)
    torch.testing.assert_close(scores[:, :2], image @ words.T, atol=1e-5, rtol=0)
    index_folder(
        dev_scenes.parent,
        tmp_path / "store",
        model,
        str(tmp_path / "run/model"),
        options=IndexOptions(workers=1, bank=False),
    )
    assert len(Searcher(tmp_path / "store").search("a red square", k=3)) == 3
    forget_plugins()
    for place in ("run", "run/model"):
        with pytest.raises(ModelError, match=naming("'cls'", "register_head", "--plugin", "FILE")):
            from_pretrained(tmp_path / place)
    assert from_pretrained(tmp_path / "run/model", plugins=[plugin]).config.vision == "squares"


def test_a_folder_never_runs_code(encoders, plugin, tmp_path):
    """Neither a Python file in a model folder nor any name in its configuration is executed."""
    load_plugin(plugin)
    model = RetrievalModel(model_config(encoders, slimming={"decision": "first"}))
    save_pretrained(model, tmp_path / "model")
    assert not list((tmp_path / "model").rglob("*.py"))
    trap, mark = tmp_path / "model/my_ideas.py", tmp_path / "ran"
    trap.write_text(f"open({str(mark)!r}, 'w').close()\n" + PLUGIN)
    config = json.loads((tmp_path / "model/config.json").read_text())
    config |= {"plugins": ["my_ideas.py"], "plugin": str(trap)}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    forget_plugins()
    with pytest.raises(ModelError, match="registered"):
        from_pretrained(tmp_path / "model")
    assert not mark.exists()


def test_plugins_that_fail_say_where(tmp_path, capsys, encoders, dev_scenes):
    with pytest.raises(PluginError, match="Python"):
        load_plugin(tmp_path / "none.py")
    bad = tmp_path / "bad.py"
    for text, told in (
        (
            "import seps\n\nseps.register_decision('topk')\n",
            naming("bad.py", "3", "topk"),
        ),
        ("x = 1\ny = z\n", naming("bad.py", "2", "NameError")),
        ("def f(:\n", naming("bad.py", "SyntaxError")),
        # A script: the command ended with its status, 0, having said and done nothing.
        ("import sys\n\nsys.exit(0)\n", naming("bad.py", "3")),
    ):
        bad.write_text(text)
        with pytest.raises(PluginError, match=told):
            load_plugin(bad)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(PluginError, match="ends"):
        load_plugin(tmp_path / "notes.txt")
    bad.write_text(
        "import seps\n\n@seps.register_decision('odd')\ndef odd(scores, count, valid):\n    return missing\n"
    )
    load_plugin(bad)
    save_pretrained(RetrievalModel(model_config(encoders, slimming={"decision": "odd"})), tmp_path / "model")
    code = main(["eval", "--model", str(tmp_path / "model"), "--data", str(dev_scenes), "--plugin", str(bad)])
    said = capsys.readouterr().err
    assert code == 2 and "plugin" in said and "bad.py, line 5): NameError" in said
    assert "defect of seps" not in said


def test_two_files_of_one_name_are_two_plugins(tmp_path):
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        text = (
            f"import seps\n\n@seps.register_decision({name!r})\ndef keep(scores, count, valid):\n    return {number}\n"
        )
        (tmp_path / name / "ideas.py").write_text(text)
    first, second = load_plugin(tmp_path / "a/ideas.py"), load_plugin(tmp_path / "b/ideas.py")
    assert first is not second and load_plugin(tmp_path / "a/ideas.py") is first
    assert sorted(registry.registered("decision")) == ["a", "b"]
