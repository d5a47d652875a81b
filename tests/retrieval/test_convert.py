"""Published checkpoints: files of the same shape and names are read safely and score as the published network does."""

from __future__ import annotations

import argparse
import os

import pytest
import torch
import transformers

import seps
from messages import naming
from seps.cli.main import main
from seps.hub.folder import ModelError
from seps.retrieval.convert import convert_published
from seps.retrieval.pretrained import from_pretrained
from tiny import SMALL, STILL


def published_file(encoders, path, **changes):
    """A checkpoint as the published trainer writes it: {'model': state, 'opt': Namespace, ...}."""
    torch.manual_seed(3)
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL, **STILL))
    bert = transformers.BertModel.from_pretrained(encoders["text"])
    net = seps.CrossSparseAggrNet(16, 16, 0.5, 0.4, has_cls=True)
    state = {f"img_enc.visual_encoder.{k}": v for k, v in vit.state_dict().items()}
    state |= {f"txt_enc.bert.{k}": v for k, v in bert.state_dict().items()}
    for name in ("img_enc.vision_proj", "txt_enc.fc"):
        state |= {f"{name}.weight": torch.randn(16, 32), f"{name}.bias": torch.randn(16)}
    state |= {f"cross_net.{k}": v for k, v in net.state_dict().items()}
    options = argparse.Namespace(embed_size=16, sparse_ratio=0.5, aggr_ratio=0.4, vit_type="vit", num_patches=16)
    torch.save({"epoch": 3, "model": state, "best_rsum": 1.0, "opt": options, "Eiters": 7, **changes}, path)
    return vit.eval(), bert.eval(), net.eval(), state


def test_converted_model_scores_as_the_published_one(encoders, tmp_path):
    path = tmp_path / "model_best.pth"
    vit, bert, net, state = published_file(encoders, path)
    words = ["convert", str(path), "-o", str(tmp_path / "out")]
    assert main([*words, "--vision", encoders["vision"], "--text", encoders["text"]]) == 0
    model = from_pretrained(tmp_path / "out")
    pixels = torch.rand(2, 3, 32, 32)
    texts = ["a red square .", "a blue circle on the left ."]
    tokenized = model.text.tokenize(texts)
    with torch.no_grad():
        normalised = (pixels - 0.5) / 0.5
        image = vit(normalised).last_hidden_state @ state["img_enc.vision_proj.weight"].T
        image = image + state["img_enc.vision_proj.bias"]
        word = bert(tokenized.ids, tokenized.mask.long()).last_hidden_state @ state["txt_enc.fc.weight"].T
        word = word + state["txt_enc.fc.bias"]
        expected = net(image, word, tokenized.mask.sum(1))
        features = model.encode_texts(texts)
        from seps.retrieval.heads import ImageFeatures

        ours = model.score(ImageFeatures(model.encode_pixels(pixels)), features)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


class Bomb:
    """Runs a command when unpickled without care."""

    def __reduce__(self):
        return os.system, ("echo unpickled > pwned",)


def test_hostile_and_broken_files_are_refused(encoders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    published_file(encoders, tmp_path / "bad.pth", extra=Bomb())
    with pytest.raises(ModelError, match="read"):
        convert_published(tmp_path / "bad.pth")
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "cut.pth").write_bytes((tmp_path / "bad.pth").read_bytes()[:500])
    for name, sentence in (("cut.pth", "read"), ("none.pth", "file")):
        assert main(["convert", name, "-o", "out"]) == 2
        assert sentence in capsys.readouterr().err
    torch.save({"weights": {}}, "other.pth")
    assert main(["convert", "other.pth", "-o", "out"]) == 2
    assert "checkpoint" in capsys.readouterr().err
    torch.save({"model": {"something.else": torch.ones(1)}}, "unknown.pth")
    with pytest.raises(ModelError, match=naming("something.else")):
        convert_published("unknown.pth")


def test_a_file_of_something_else_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "bad.pth"
    path.write_text("not a model")
    with pytest.raises(ModelError, match=naming("bad.pth")) as raised:
        convert_published(path)
    assert "\n" not in str(raised.value) and "weights_only" not in str(raised.value)
