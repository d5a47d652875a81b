"""Ideas of somebody's own in every command: each is really used, against a twin that needs no registry.

The twin of a decision is a subclass of the network with `decide` written out; that of guides is the network's own
`forward` with the vectors in its call.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn import functional as F

import seps
from seps import registry
from seps.cli.main import main
from seps.config import ConfigError
from seps.encoders import Preprocessing, TextEncoder, VisionEncoder, text_encoder
from seps.experiments.suites import suite_with_own_rows
from seps.hub.folder import ModelError
from seps.nn import PatchSlimming
from seps.plugins import PLUGIN_MODULE, PluginError, load_plugin
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.data import DataError, load_jsonl, save_jsonl
from seps.retrieval.data.guides import dataset_guides
from seps.retrieval.data.images import decode_image
from seps.retrieval.eval.evaluate import encode_images, evaluate, score_dataset
from seps.retrieval.eval.protocol import view
from seps.retrieval.explain.explanation import Explainer
from seps.retrieval.heads import Head, ImageFeatures, Scores, SlimmingHead
from seps.retrieval.index.build import IndexOptions, index_folder
from seps.retrieval.index.search import Searcher
from seps.retrieval.index.store import Store
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.train.run import train_model
from seps.retrieval.train.task import RetrievalTask
from seps.training import TrainConfig

PLUGIN = """
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import seps
from seps.encoders import Preprocessing, VisionEncoder
from seps.retrieval.heads import Head, Scores


@seps.register_decision("first", form="scores")
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


@pytest.fixture(autouse=True)
def _own_registry():
    with mock.patch.dict(registry._IDEAS, clear=True):
        yield
    forget_plugins()


def forget_plugins() -> None:
    """As in a new process."""
    registry._IDEAS.clear()
    for name in [name for name in sys.modules if name.startswith(PLUGIN_MODULE)]:
        del sys.modules[name]


@pytest.fixture
def plugin(tmp_path) -> Path:
    path = tmp_path / "my_ideas.py"
    path.write_text(PLUGIN)
    return path


class FirstTwin(PatchSlimming):
    """`keep_first`, without the registry: the readable form computes it."""

    def decide(self, side, branch, scores):
        count = -(-scores.shape[-1] // 2)
        return torch.cat([torch.ones(len(scores), count), torch.zeros(len(scores), scores.shape[-1] - count)], dim=1)


def model_config(encoders, **more) -> ModelConfig:
    return ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0, **more})


def run_config(encoders, train, dev, **model) -> RunConfig:
    loop = TrainConfig(epochs=1, batch_size=16, learning_rate=3e-3, eval_every=1, prefetch=0)
    return RunConfig(model=model_config(encoders, **model), data=DataConfig(str(train), (str(dev),)), train=loop)


def twins(encoders) -> tuple[RetrievalModel, RetrievalModel]:
    """A model with the registered decision, and one with the twin's network, of the same weights."""
    torch.manual_seed(3)
    model = RetrievalModel(model_config(encoders, slimming={"decision": "first"}))
    twin = RetrievalModel(model_config(encoders))
    twin.head = SlimmingHead(twin.head.net.config, FirstTwin(twin.head.net.config))
    twin.load_state_dict(model.state_dict())
    return model.eval(), twin.eval()


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


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
    source = data.records[0].source
    pixels = decode_image(source.path.read_bytes(), source, model.image_size)
    found = Explainer(model).picture(pixels, data.captions[0], data.dense[0])
    assert found.kept == [True] * 8 + [False] * 8
    assert found.score == pytest.approx(float(scores[0, 0]), abs=1e-4)


@pytest.mark.parametrize("keep", [None, 6])
def test_a_decision_is_used_by_index_and_search(encoders, dev_scenes, plugin, tmp_path, keep):
    load_plugin(plugin)
    model, twin = twins(encoders)
    save_pretrained(model, tmp_path / "model")
    options = IndexOptions(precision="float32", keep_patches=keep, workers=1, bank=False)
    index_folder(dev_scenes.parent, tmp_path / "store", model, str(tmp_path / "model"), options=options)
    forget_plugins()
    with pytest.raises(ModelError, match="uses the decision 'first', an idea of its author"):
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
        assert "'one'" in said and "--plugin FILE" in said and "register_decision('one')" in said, said
        assert "Traceback" not in said
        if command[0] == "export":
            continue  # it takes seconds; tests/nn/test_export_network.py exports ideas
        assert quietly(lambda command=command: main([*command, *own])) == 0, command
        out = capsys.readouterr().out
        if command[0] == "explain":
            assert sum(json.loads(out)["kept"]) == 1


def test_a_row_of_ones_own_is_trained_and_reported(encoders, scenes, dev_scenes, plugin, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{vision: {encoders['vision']}, text: {encoders['text']}, embed_size: 16}}\n"
        "train: {epochs: 1, batch_size: 16, prefetch: 0, eval_every: 0}\n"
    )
    words = ["compare", "--config", str(recipe), "--data", str(scenes), "--dev", str(dev_scenes), "--seeds", "0"]
    words += ["--device", "cpu", "--out", str(tmp_path / "out"), "--only", "keeps-one"]
    assert main(words) == 2
    assert "has no such entry" in capsys.readouterr().err
    assert main([*words, "--plugin", str(plugin)]) == 0
    (result,) = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert result["name"] == "keeps-one" and result["kept_at_test"] == pytest.approx(1 / 16)
    assert "**keeps-one**: keeps one patch" in (tmp_path / "out/table.md").read_text()
    seps.register_row("mean", "taken")(len)
    with pytest.raises(ConfigError, match="has a row 'mean' already"):
        suite_with_own_rows("baselines")
    forget_plugins()
    seps.register_row("mine", "no reference", suite="ablation", reference="nobody")(len)
    with pytest.raises(ConfigError, match="names the reference 'nobody'"):
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
        with pytest.raises(ModelError, match=r"uses the head 'cls'.*register_head\('cls'\).*--plugin FILE"):
            from_pretrained(tmp_path / place)
    assert from_pretrained(tmp_path / "run/model", plugins=[plugin]).config.vision == "squares"


class Steady(Head):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, images, texts, *, want_masks=False):
        words = (texts.words * texts.mask[..., None]).sum(dim=1) * self.weight
        similarity = F.normalize(images.tokens.mean(dim=1), dim=-1) @ F.normalize(words, dim=-1).T
        return Scores(similarity, pixels=similarity)


class Tiles(VisionEncoder):
    def __init__(self) -> None:
        plain = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        super().__init__(width=8, num_prefix_tokens=0, image_size=(32, 32), stride=(8, 8), preprocessing=plain)
        self.patches = nn.Conv2d(3, 8, kernel_size=8, stride=8)

    def encode(self, normalised):
        return self.patches(normalised).flatten(2).transpose(1, 2)


def own_network(encoders) -> FirstTwin:
    return FirstTwin(RetrievalModel(model_config(encoders)).head.net.config)


@pytest.mark.parametrize("part", ["network", "head", "vision"])
def test_training_takes_objects_and_loading_asks_for_them(encoders, scenes, dev_scenes, tmp_path, part):
    make = {"network": lambda: own_network(encoders), "head": lambda: Steady(16), "vision": Tiles}[part]
    mine = make()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    config = run_config(encoders, scenes, dev_scenes)
    quietly(lambda: train_model(config, tmp_path / "run", device="cpu", **{part: mine}))
    assert any(not torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    saved = json.loads((tmp_path / "run/model/config.json").read_text())
    assert saved["objects"] == {part: f"{type(mine).__module__}.{type(mine).__qualname__}"}
    for place in ("run", "run/model"):
        with pytest.raises(
            ModelError, match=rf"object of its author as its {part} \(.*from_pretrained\(folder, {part}="
        ):
            from_pretrained(tmp_path / place)
        model = from_pretrained(tmp_path / place, **{part: make()})
        found = model.head.net if part == "network" else getattr(model, part)
        assert type(found) is type(mine)
        for name, value in found.state_dict().items():
            torch.testing.assert_close(value, mine.state_dict()[name])
    data = load_jsonl(dev_scenes)
    quietly(lambda: evaluate(model, data, "none"))


def test_objects_are_saved_as_a_difference_too(encoders, tmp_path):
    for part, make in (("head", lambda: Steady(16)), ("network", lambda: own_network(encoders))):
        model = RetrievalModel(model_config(encoders), **{part: make()})
        save_pretrained(model, tmp_path / part, form="delta")
        again = from_pretrained(tmp_path / part, **{part: make()}).state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(again[name], value, atol=2e-3, rtol=2e-3)


def test_a_text_encoder_of_ones_own(encoders, tmp_path):
    class Louder(TextEncoder):
        def forward(self, ids, mask):
            return 2 * super().forward(ids, mask)

    @seps.register_encoder("plain", kind="text")
    def plain():
        return text_encoder(encoders["text"])

    @seps.register_encoder("louder", kind="text")
    def louder():
        made = plain()
        return Louder(made.model, made.tokenizer)

    for name in ("plain", "louder"):
        model = RetrievalModel(ModelConfig(vision=encoders["vision"], text=name, embed_size=16))
        save_pretrained(model, tmp_path / name)
    features = [from_pretrained(tmp_path / name).text for name in ("plain", "louder")]
    ids = features[0].tokenize(["a red square"])
    torch.testing.assert_close(2 * features[0](ids.ids, ids.mask), features[1](ids.ids, ids.mask))
    registry._IDEAS.clear()
    assert from_pretrained(tmp_path / "plain").config.text == "plain"  # its files are in the folder
    with pytest.raises(ModelError, match=r"uses the text encoder 'louder'.*register_encoder\('louder'\)"):
        from_pretrained(tmp_path / "louder")


def test_objects_that_do_not_fit_are_sentences(encoders):
    network = own_network(encoders)
    with pytest.raises(ConfigError, match="Both a head and a network came"):
        RetrievalModel(model_config(encoders), head=Steady(16), network=network)
    with pytest.raises(ConfigError, match="embed_size=16, and the model 32"):
        RetrievalModel(model_config(encoders, embed_size=32), network=network)
    with pytest.raises(ConfigError, match="belongs to head='slimming'"):
        RetrievalModel(model_config(encoders, head="mean"), network=network)
    with pytest.raises(ConfigError, match="stands for a head that came as an object"):
        RetrievalModel(model_config(encoders, head="own"))
    seps.register_head("odd")(lambda config: nn.Identity())
    with pytest.raises(ConfigError, match="The head 'odd' is a Identity"):
        RetrievalModel(model_config(encoders, head="odd"))
    seps.register_encoder("vit-b-224")(Tiles)
    with pytest.raises(ValueError, match="has the name of a preset"):
        RetrievalModel(ModelConfig(vision="vit-b-224"))


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
    with pytest.raises(ModelError, match="which is not registered here"):
        from_pretrained(tmp_path / "model")
    assert not mark.exists()


def test_plugins_that_fail_say_where(tmp_path, capsys, encoders, dev_scenes):
    with pytest.raises(PluginError, match="There is no Python file"):
        load_plugin(tmp_path / "none.py")
    bad = tmp_path / "bad.py"
    for text, told in (
        (
            "import seps\n\nseps.register_decision('topk')\n",
            r"bad\.py, line 3 cannot be loaded: The decision 'topk' is",
        ),
        ("x = 1\ny = z\n", r"bad\.py, line 2 cannot be loaded: NameError"),
        ("def f(:\n", r"bad\.py, line 1 cannot be loaded: SyntaxError"),
    ):
        bad.write_text(text)
        with pytest.raises(PluginError, match=told):
            load_plugin(bad)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(PluginError, match=r"ends in \.py"):
        load_plugin(tmp_path / "notes.txt")
    bad.write_text(
        "import seps\n\n@seps.register_decision('odd')\ndef odd(scores, count, valid):\n    return missing\n"
    )
    load_plugin(bad)
    save_pretrained(RetrievalModel(model_config(encoders, slimming={"decision": "odd"})), tmp_path / "model")
    code = main(["eval", "--model", str(tmp_path / "model"), "--data", str(dev_scenes), "--plugin", str(bad)])
    said = capsys.readouterr().err
    assert code == 2 and "your plugin failed (" in said and "bad.py, line 5): NameError" in said
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


def guided_scenes(source: Path, folder: Path, width: int = 16) -> Path:
    """The scenes with a guide each: written into the line, in a .npy, in a .safetensors, and none."""
    generator = np.random.default_rng(0)
    (folder / "guides").mkdir(parents=True)
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    for number, line in enumerate(lines):
        os.link(source.parent / line["image"], folder / line["image"])
        vector = generator.standard_normal(width).astype(np.float32)
        if number % 4 == 0:
            line["guides"] = {"audio": [float(x) for x in vector]}
        elif number % 4 == 1:
            np.save(folder / f"guides/{number}.npy", vector)
            line["guides"] = {"audio": f"guides/{number}.npy"}
        elif number % 4 == 2:
            save_file({"audio": vector, "other": vector}, folder / f"guides/{number}.safetensors")
            line["guides"] = {"audio": f"guides/{number}.safetensors"}
    path = folder / source.name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def true_guides(path: Path, width: int = 16) -> torch.Tensor:
    """What `guided_scenes` wrote, without reading it."""
    generator = np.random.default_rng(0)
    count = len(path.read_text().splitlines())
    rows = np.stack([generator.standard_normal(width).astype(np.float32) for _ in range(count)])
    rows[3::4] = 0
    return torch.from_numpy(rows)


GUIDED = {"slimming": {"extra_guides": {"audio": 0.4}, "sparse_ratio": 0.3}}


def test_guides_are_read_and_written_back(dev_scenes, tmp_path):
    path = guided_scenes(dev_scenes, tmp_path / "data")
    data = load_jsonl(path)
    assert torch.equal(dataset_guides(data, ["audio"])["audio"], true_guides(path))
    assert dataset_guides(data, []) is None
    save_jsonl(data, tmp_path / "data/again.jsonl")
    again = load_jsonl(tmp_path / "data/again.jsonl", split=data.split)
    assert again == data and again.records[1].guides["audio"].path is not None
    assert len(set(data.records)) == len(data)
    (tmp_path / "x").mkdir()
    with pytest.raises(DataError, match="lies outside"):
        save_jsonl(data, tmp_path / "x/again.jsonl", images_root=tmp_path / "data")


@pytest.mark.parametrize(
    ("guides", "told"),
    [
        ([1, 2], '"guides" must be an object'),
        ({"audio": []}, "must be a list of numbers"),
        ({"audio": [1, "2"]}, "must be a list of numbers"),
        ({"audio": [True]}, "must be a list of numbers"),
        ({"audio": [float("inf")]}, "not a finite number"),
        ({"audio": [10**400]}, "not a finite number"),
        ({"audio": "vectors.pkl"}, r"name a \.npy or a \.safetensors file"),
        ({"audio": "../out.npy"}, "leads out of"),
        ({"audio": "/etc/x.npy"}, "is absolute"),
        ({"audio": "link.npy"}, "leads out of"),
    ],
)
def test_guides_that_cannot_be_read_are_sentences(dev_scenes, tmp_path, guides, told):
    (tmp_path / "link.npy").symlink_to("/etc/hostname")
    line = {"image": "x.png", "captions": ["a"], "guides": guides}
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=f"line 1: .*{told}"):
        load_jsonl(tmp_path / "data.jsonl")


def test_files_of_guides_are_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    pickled = np.empty(1, object)
    pickled[0] = Trap()
    np.save(tmp_path / "a.npy", pickled, allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "c.safetensors").write_bytes(pickle.dumps(Trap()))
    np.save(tmp_path / "d.npy", np.zeros((3, 4), np.float32))
    np.save(tmp_path / "e.npy", np.array([1.0, np.nan]))
    np.save(tmp_path / "f.npy", np.array(["x"]))
    save_file({"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}, tmp_path / "g.safetensors")
    whole = tmp_path / "h.npy"
    np.save(whole, np.zeros(4, np.float32))
    whole.write_bytes(whole.read_bytes()[:-4])
    for name, told in (
        ("a.npy", "cannot be read"),
        ("b.npy", "cannot be read"),
        ("c.safetensors", "cannot be read"),
        ("d.npy", r"has the shape \(3, 4\)"),
        ("e.npy", "not finite"),
        ("f.npy", "has the shape"),
        ("g.safetensors", r"holds the tensors \['x', 'y'\]"),
        ("h.npy", "cannot be read"),
        ("none.npy", "There is no file"),
    ):
        line = {"image": "x.png", "captions": ["a"], "guides": {"audio": name}}
        (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(DataError, match=told):
            dataset_guides(load_jsonl(tmp_path / "data.jsonl"), ["audio"])
    assert not (tmp_path / "ran").exists()


def guided_twin(model, data, guides, captions):
    """Scores by the network's own forward, with the vectors in its call."""
    texts = model.encode_texts(captions)
    dense, mask = model.encode_descriptions(data.dense)
    with torch.no_grad():
        return model.head.net(
            encode_images(model, data),
            texts.words,
            texts.lengths,
            dense=dense,
            dense_lengths=mask.sum(1),
            guides=guides,
        )


def test_guides_reach_training_and_evaluation(encoders, scenes, dev_scenes, tmp_path):
    train, dev = guided_scenes(scenes, tmp_path / "train"), guided_scenes(dev_scenes, tmp_path / "dev")
    config = run_config(encoders, train, dev, **GUIDED)
    torch.manual_seed(0)
    model = RetrievalModel(config.model)
    task = RetrievalTask(model, config, load_jsonl(train), [])
    batch = task.batch(0, 1, 0, 1)
    assert torch.equal(batch.guides["audio"], true_guides(train)[batch.images])
    halves = [task.batch(0, 1, rank, 2) for rank in (0, 1)]
    assert torch.equal(torch.cat([half.guides["audio"] for half in halves]), batch.guides["audio"])
    task.model.train()
    loss, _ = task.loss(batch, 0)
    features = task.encode(batch)
    net = model.head.net
    lengths = {"dense": features[3], "dense_lengths": features[4].sum(dim=1)}
    similarity, _ = net(features[0], features[1], features[2].sum(dim=1), guides=batch.guides, **lengths)
    expected = task.model.criteria["fused"](similarity, (), batch.images)[0]
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    nothing = {"audio": torch.zeros_like(batch.guides["audio"])}
    without, _ = net(features[0], features[1], features[2].sum(dim=1), guides=nothing, **lengths)
    assert (without - similarity).abs().max() > 1e-3
    train_model(config, tmp_path / "run", device="cpu")
    model, data = from_pretrained(tmp_path / "run/model"), load_jsonl(dev)
    scores = score_dataset(model, data, view(data, "image"))
    expected = guided_twin(model, data, {"audio": true_guides(dev)}, data.captions)
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=0)
    with pytest.raises(DataError, match=r"reads the guide 'audio', and no image of .* has it"):
        evaluate(model, load_jsonl(dev_scenes))


def test_guides_reach_index_search_and_explanation(encoders, dev_scenes, tmp_path, capsys):
    path = guided_scenes(dev_scenes, tmp_path / "dev")
    torch.manual_seed(0)
    model = RetrievalModel(model_config(encoders, **GUIDED)).eval()
    save_pretrained(model, tmp_path / "model")
    store, options = tmp_path / "store", IndexOptions(precision="float32", workers=1, bank=False)

    def index():
        return index_folder(path.parent, store, model, str(tmp_path / "model"), options=options)

    assert index().new == 24
    settings = Store.open(store).settings
    assert settings.guides == {"audio": 16} and settings.format == 2
    data, guides = load_jsonl(path), true_guides(path)
    caption = "a red square on the left"
    names = [record.source.path.name for record in data.records]

    def found() -> torch.Tensor:
        hits = Searcher(store).search(caption, k=24, exact=True)
        return torch.tensor([hit.score for hit in sorted(hits, key=lambda hit: names.index(hit.path))])

    expected = guided_twin(model, data, {"audio": guides}, [caption])[:, 0]
    torch.testing.assert_close(found(), expected, atol=1e-4, rtol=0)
    assert main(["explain", names[0], caption, "--store", str(store), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["score"] == pytest.approx(float(expected[0]), abs=1e-4)
    np.save(tmp_path / "own.npy", guides[0].numpy())
    words = ["explain", str(path.parent / names[0]), caption, "--model", str(tmp_path / "model"), "--json"]
    words += ["--dense", data.dense[0], "--guide", f"audio={tmp_path / 'own.npy'}"]
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["kept"] == stored["kept"] and alone["score"] == pytest.approx(stored["score"], abs=1e-4)
    # Again: nothing to do. One guide changed: one image anew. The lines lost: the store keeps what it has.
    assert index().unchanged == 24
    np.save(path.parent / "guides/1.npy", np.ones(16, np.float32))
    report = index()
    assert (report.changed, report.unchanged) == (1, 23)
    guides[1] = 1.0
    expected = guided_twin(model, data, {"audio": guides}, [caption])[:, 0]
    torch.testing.assert_close(found(), expected, atol=1e-4, rtol=0)
    (path.parent / "guides/5.npy").write_bytes(b"damaged")
    report = index()
    assert report.unchanged == 24 and len(report.description_problems) == 1
    assert "cannot be read" in report.description_problems[0].why
    with pytest.raises(DataError, match="1 lines of descriptions cannot be used"):
        index_folder(path.parent, store, model, "model", options=IndexOptions(strict=True, workers=1, bank=False))
    path.rename(tmp_path / "away.jsonl")
    assert index().unchanged == 24
    (path.parent / names[1]).rename(path.parent / "moved.png")
    report = index()
    assert (report.moved, report.deleted) == (1, 1)
    names[1] = "moved.png"
    torch.testing.assert_close(found(), expected, atol=1e-4, rtol=0)
    assert main(["index", "--store", str(store), "--verify"]) == 0


def test_an_index_without_guides_is_that_of_former_releases(encoders, dev_scenes, tmp_path):
    model = RetrievalModel(model_config(encoders)).eval()
    save_pretrained(model, tmp_path / "model")
    index_folder(
        dev_scenes.parent,
        tmp_path / "store",
        model,
        str(tmp_path / "model"),
        options=IndexOptions(workers=1, bank=False),
    )
    store = Store.open(tmp_path / "store")
    assert store.settings.format == 1 and "guides" not in store._table.schema.names
    guided = RetrievalModel(model_config(encoders, **GUIDED)).eval()
    with pytest.raises(DataError, match="reads the guide 'audio', and no image of"):
        index_folder(
            dev_scenes.parent, tmp_path / "other", guided, "guided", options=IndexOptions(workers=1, bank=False)
        )


def test_a_guide_from_patches_needs_no_data(encoders, scenes, dev_scenes, tmp_path):
    @seps.register_guide("bright", form="patches")
    def bright(patches):
        return patches[torch.arange(len(patches)), patches.norm(dim=-1).argmax(dim=1)]

    more = {"slimming": {"extra_guides": {"bright": 0.4}}}
    train_model(run_config(encoders, scenes, dev_scenes, **more), tmp_path / "run", device="cpu")
    model, data = from_pretrained(tmp_path / "run/model"), load_jsonl(dev_scenes)
    scores = score_dataset(model, data, view(data, "image"))
    patches = encode_images(model, data)[:, 1:]
    made = torch.stack([image[image.norm(dim=-1).argmax()] for image in patches])
    registry._IDEAS.clear()
    with pytest.raises(ModelError, match=r"uses the guide 'bright'.*register_guide\('bright'\)"):
        from_pretrained(tmp_path / "run/model")
    twin = RetrievalModel(model.config)
    twin.load_state_dict(model.state_dict())
    expected = guided_twin(twin.eval(), data, {"bright": made}, data.captions)
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=0)


def test_import_seps_stays_light_with_the_registry():
    program = "import sys, seps; seps.register_decision('x')(len); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
