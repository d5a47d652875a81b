"""Guides from the data in every command, against the network's own `forward` with the vectors in its call."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import seps
from messages import mentions, naming
from seps import registry
from seps.cli.main import main
from seps.hub.folder import ModelError
from seps.images.sources import DataError
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.store.rows import StoreError
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.data import load_jsonl, save_jsonl
from seps.retrieval.data.guides import dataset_guides
from seps.retrieval.evaluate.protocol import view
from seps.retrieval.evaluate.run import encode_images, evaluate, score_dataset
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.train.run import train_model
from seps.retrieval.train.task import RetrievalTask
from seps.training import TrainConfig


@pytest.fixture(autouse=True)
def _own_registry():
    with mock.patch.dict(registry._IDEAS, clear=True):
        yield


def model_config(encoders, **more) -> ModelConfig:
    return ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0, **more})


def run_config(encoders, train, dev, **model) -> RunConfig:
    loop = TrainConfig(epochs=1, batch_size=16, learning_rate=3e-3, eval_every=1, prefetch=0)
    return RunConfig(model=model_config(encoders, **model), data=DataConfig(str(train), (str(dev),)), train=loop)


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
    with pytest.raises(DataError, match="outside"):
        save_jsonl(data, tmp_path / "x/again.jsonl", images_root=tmp_path / "data")


@pytest.mark.parametrize(
    ("guides", "told"),
    [
        ([1, 2], "guides"),
        ({"audio": []}, "numbers"),
        ({"audio": [1, "2"]}, "numbers"),
        ({"audio": [True]}, "numbers"),
        ({"audio": [float("inf")]}, "finite"),
        ({"audio": [10**400]}, "finite"),
        ({"audio": "vectors.pkl"}, r"\.npy.*\.safetensors"),
        ({"audio": "../out.npy"}, "leads"),
        ({"audio": "/etc/x.npy"}, "absolute"),
        ({"audio": "link.npy"}, "leads"),
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
        ("a.npy", "read"),
        ("b.npy", "read"),
        ("c.safetensors", "read"),
        ("d.npy", naming("(3, 4)")),
        ("e.npy", "finite"),
        ("f.npy", "shape"),
        ("g.safetensors", naming("['x', 'y']")),
        ("h.npy", "read"),
        ("none.npy", "file"),
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
    with pytest.raises(DataError, match="audio"):
        evaluate(model, load_jsonl(dev_scenes))


def test_guides_reach_an_explanation_and_no_store(encoders, dev_scenes, tmp_path, capsys):
    path = guided_scenes(dev_scenes, tmp_path / "dev")
    torch.manual_seed(0)
    model = RetrievalModel(model_config(encoders, **GUIDED)).eval()
    save_pretrained(model, tmp_path / "model")
    with pytest.raises(StoreError, match="audio"):
        index_folder(path.parent, tmp_path / "store", model, "model", options=IndexOptions(workers=1, bank=False))
    assert not (tmp_path / "store").exists()
    data, guides = load_jsonl(path), true_guides(path)
    caption = "a red square on the left"
    expected = guided_twin(model, data, {"audio": guides}, [caption])[:, 0]
    name = data.records[0].source.path.name
    np.save(tmp_path / "own.npy", guides[0].numpy())
    words = ["explain", str(path.parent / name), caption, "--model", str(tmp_path / "model"), "--json"]
    assert main(words) == 2
    assert mentions(capsys.readouterr().err, "--guide", "audio=FILE")
    assert main([*words, "--guide", f"audio={tmp_path / 'own.npy'}", "--guide", f"sound={tmp_path / 'own.npy'}"]) == 2
    assert mentions(capsys.readouterr().err, "sound", "audio", "--guide")
    words += ["--dense", data.dense[0], "--guide", f"audio={tmp_path / 'own.npy'}"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(float(expected[0]), abs=1e-4)


def test_stores_refuse_models_that_read_guides(encoders, dev_scenes, tmp_path):
    """A store keeps no vectors of guides: train, evaluate and explain read them from the data."""
    guided = RetrievalModel(model_config(encoders, **GUIDED)).eval()
    with pytest.raises(StoreError, match="audio"):
        index_folder(
            dev_scenes.parent, tmp_path / "other", guided, "guided", options=IndexOptions(workers=1, bank=False)
        )


def test_a_guide_from_patches_needs_no_data(encoders, scenes, dev_scenes, tmp_path):
    @seps.register_guide("bright", from_patches=True)
    def bright(patches):
        return patches[torch.arange(len(patches)), patches.norm(dim=-1).argmax(dim=1)]

    more = {"slimming": {"extra_guides": {"bright": 0.4}}}
    train_model(run_config(encoders, scenes, dev_scenes, **more), tmp_path / "run", device="cpu")
    model, data = from_pretrained(tmp_path / "run/model"), load_jsonl(dev_scenes)
    scores = score_dataset(model, data, view(data, "image"))
    patches = encode_images(model, data)[:, 1:]
    made = torch.stack([image[image.norm(dim=-1).argmax()] for image in patches])
    registry._IDEAS.clear()
    with pytest.raises(ModelError, match=naming("bright", "register_guide")):
        from_pretrained(tmp_path / "run/model")
    twin = RetrievalModel(model.config)
    twin.load_state_dict(model.state_dict())
    expected = guided_twin(twin.eval(), data, {"bright": made}, data.captions)
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=0)
