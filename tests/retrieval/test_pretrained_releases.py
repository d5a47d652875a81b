"""Models and runs saved under another release of transformers load here, score the same and go on training."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import seps
from seps.files import read_json, sha256, write_json
from seps.hub.folder import ModelError, describe_weights
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.convert import convert_published
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.train.run import train_model
from seps.training import TrainConfig
from tiny import SMALL, STILL

TEXTS = ["a red square on the left .", "a blue circle ."]
DINO = "vision.model.encoder.layer"
OLD_DINO = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}


def old_dino(name: str) -> str:
    """The name that a tensor of Dinov2 has in transformers 5.17 (see encoders/old_releases)."""
    for new, old in OLD_DINO.items():
        if DINO in name:
            name = name.replace(new, old)
    return name


def old_vit(name: str) -> str:
    """The name that a tensor of ViT has in transformers 4."""
    table = {"layers.": "encoder.layer.", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense", **OLD_DINO}
    for new, old in table.items():
        name = name.replace(new, old)
    return name


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    config = transformers.Dinov2Config(image_size=32, patch_size=8, **{**SMALL, **STILL})
    transformers.Dinov2Model(config).save_pretrained(folder)
    return str(folder)


def make(encoders: dict[str, str], dino: str) -> RetrievalModel:
    torch.manual_seed(0)
    return RetrievalModel(ModelConfig(dino, encoders["text"], embed_size=16)).eval()


def scores(model: RetrievalModel) -> torch.Tensor:
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        images = ImageFeatures(model.encode_pixels(pixels), *model.encode_descriptions([TEXTS[0], None, TEXTS[1]]))
        return model.score(images, model.encode_texts(TEXTS))


def rewrite(folder: Path, name: Callable[[str], str], version: str | None = "5.17.0") -> None:
    """Give the tensors of a saved model other names, as if another release had saved it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = {name(key): value for key, value in tensors.items()}
    assert set(changed) != set(tensors)
    save_file(changed, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"weights": describe_weights(path), "transformers": version}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["full", "delta"])
def test_a_folder_with_the_names_of_an_older_release_scores_the_same(
    encoders: dict[str, str], dino: str, tmp_path: Path, form: Any
) -> None:
    model = make(encoders, dino)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_pretrained(model, tmp_path / "saved", form=form)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["transformers"] == transformers.__version__
    expected = scores(from_pretrained(tmp_path / "saved"))
    rewrite(tmp_path / "saved", old_dino)
    torch.testing.assert_close(scores(from_pretrained(tmp_path / "saved")), expected, atol=1e-6, rtol=0)
    if form == "full":
        assert torch.equal(expected, scores(model))


@pytest.mark.parametrize("form", ["full", "delta"])
@pytest.mark.parametrize("version", ["9.9.9", None])
def test_unknown_names_are_a_sentence_with_the_releases(
    encoders: dict[str, str], dino: str, tmp_path: Path, form: Any, version: str | None
) -> None:
    model = make(encoders, dino)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    save_pretrained(model, tmp_path / "saved", form=form)
    rewrite(tmp_path / "saved", lambda name: name.replace("q_proj", "question"), version)
    with pytest.raises(ModelError) as caught:
        from_pretrained(tmp_path / "saved")
    told = str(caught.value)
    assert "attention.question" in told and f"{transformers.__version__}" in told and "\n" not in told
    assert ("transformers 9.9.9" if version else "does not name") in told


@pytest.mark.parametrize("form", ["full", "delta"])
def test_a_folder_that_lacks_a_tensor_of_the_head_is_refused(
    encoders: dict[str, str], dino: str, tmp_path: Path, form: Any
) -> None:
    save_pretrained(make(encoders, dino), tmp_path / "saved", form=form)
    path = tmp_path / "saved" / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name != "project_words.weight"}, path)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**config, "weights": describe_weights(path)}))
    with pytest.raises(ModelError, match=r"lacks 1 tensors \(first: project_words\.weight\)"):
        from_pretrained(tmp_path / "saved")


def run_config(encoders: dict[str, str], dino: str, scenes: Path, dev_scenes: Path, epochs: int = 2) -> RunConfig:
    train = TrainConfig(
        epochs=epochs, schedule="constant", batch_size=16, learning_rate=3e-3, ema_decay=0.5, prefetch=0, keep_last=9
    )
    data = DataConfig(str(scenes), (str(dev_scenes),), jitter=0.0)
    return RunConfig(ModelConfig(dino, encoders["text"], embed_size=16, dropout=0.0), data, train=train)


def test_a_run_begun_under_an_older_release_goes_on_bit_for_bit(
    encoders: dict[str, str], dino: str, scenes: Path, dev_scenes: Path, tmp_path: Path
) -> None:
    config = run_config(encoders, dino, scenes, dev_scenes)
    train_model(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "old")
    checkpoints = tmp_path / "old" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    (tmp_path / "old" / "last.json").unlink()
    folder = checkpoints / "step-00000003"
    for name in ("model", "ema", "optimizer"):
        path = folder / f"{name}.safetensors"
        save_file({old_dino(key): value for key, value in load_file(path).items()}, path)
    state = read_json(folder / "state.json")
    assert state["transformers"] == transformers.__version__
    state["groups"] = [{**g, "names": [old_dino(name) for name in g["names"]]} for g in state["groups"]]
    write_json(folder / "state.json", state)
    files = [path for path in sorted(folder.iterdir()) if path.name != "manifest.json"]
    sizes = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}
    write_json(folder / "manifest.json", {"format": 1, "files": sizes})
    assert train_model(config, tmp_path / "old").resumed_from == 3
    for name in ("model", "ema", "optimizer"):
        one, two = (
            load_file(tmp_path / run / "checkpoints" / "step-00000006" / f"{name}.safetensors")
            for run in ("whole", "old")
        )
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_published_checkpoint_has_the_names_of_transformers_4(encoders: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(3)
    vit = transformers.ViTModel.from_pretrained(encoders["vision"])
    bert = transformers.BertModel.from_pretrained(encoders["text"])
    net = seps.CrossSparseAggrNet(16, 16, 0.5, 0.4, has_cls=True)
    state = {f"img_enc.visual_encoder.{old_vit(name)}": value for name, value in vit.state_dict().items()}
    assert "img_enc.visual_encoder.encoder.layer.0.attention.attention.query.weight" in state
    state |= {f"txt_enc.bert.{name}": value for name, value in bert.state_dict().items()}
    state["txt_enc.bert.embeddings.position_ids"] = torch.arange(32)
    for name in ("img_enc.vision_proj", "txt_enc.fc"):
        state |= {f"{name}.weight": torch.randn(16, 32), f"{name}.bias": torch.randn(16)}
    state |= {f"cross_net.{name}": value for name, value in net.state_dict().items()}
    options = argparse.Namespace(sparse_ratio=0.5, aggr_ratio=0.4, vit_type="vit")
    torch.save({"model": state, "opt": options}, tmp_path / "model_best.pth")
    model = convert_published(tmp_path / "model_best.pth", vision=encoders["vision"], text=encoders["text"])
    for name, value in vit.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(model.state_dict()[f"vision.model.{name}"], value), name
