"""`seps export` end to end on tiny models: the files in onnxruntime are the model in torch."""

from __future__ import annotations

import json

import pytest
import torch

from seps.cli.main import main
from seps.retrieval import export
from seps.retrieval.config import ModelConfig
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from tiny import save_text_encoder, save_vision_encoder

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
TEXTS = ["a red square on the left .", "a circle", "the picture shows a blue circle and a green square on the right"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    return {"vision": str(save_vision_encoder(folder / "vision")), "text": str(save_text_encoder(folder / "text"))}


@pytest.fixture(scope="module", params=[pytest.param("as published", marks=pytest.mark.slow), "ours"])
def saved(encoders, tmp_path_factory, request):
    """A model of transformers' encoders, and one with our own ViT, patches that leave it, and words alone."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    slimming = {"sparse_ratio": 0.5, "aggr_ratio": 0.5}
    ours = {"special_tokens": False, "prune": {"keep": 0.5, "blocks": [1]}} if request.param == "ours" else {}
    save_pretrained(RetrievalModel(ModelConfig(**encoders, embed_size=16, slimming=slimming, **ours)), folder)
    return folder


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    made = [torch.from_numpy(one) for one in session.run(None, {name: value.numpy() for name, value in inputs.items()})]
    return made[0] if len(made) == 1 else tuple(made)


@pytest.mark.slow
def test_short_queries_and_descriptions_have_their_projections(saved, tmp_path):
    model = from_pretrained(saved)
    model.set_short_queries(True)
    with torch.no_grad():
        model.project_short.weight.mul_(-1)
    export.export_model(model, tmp_path)
    assert json.loads((tmp_path / "export.json").read_text())["short_queries"]
    tokenized = model.text.tokenize(TEXTS)
    for sentences in (False, True):
        features = model.encode_texts(TEXTS, as_sentences=sentences)
        as_sentences = torch.full((len(TEXTS),), sentences)
        words, _ = run(tmp_path / "text.onnx", ids=tokenized.ids, mask=tokenized.mask, sentences=as_sentences)
        valid, longest = features.mask[..., None], features.words.shape[1]
        torch.testing.assert_close(words[:, :longest] * valid, features.words * valid, atol=1e-5, rtol=0)


def test_command_writes_what_torch_computes(saved, tmp_path, capsys):
    import transformers

    out = tmp_path / "onnx"
    assert main(["export", str(saved), "-o", str(out)]) == 0
    assert capsys.readouterr().out.count("largest difference from torch") == 3
    facts = json.loads((out / "export.json").read_text())
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "export.json",
        *facts["files"],
    }
    model = from_pretrained(saved)
    pixels = torch.rand(5, 3, *facts["image_size"])
    patches = run(out / "image.onnx", pixels=pixels)
    torch.testing.assert_close(patches, model.encode_pixels(pixels).detach(), atol=1e-5, rtol=0)

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out / "tokenizer"))
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    words, lengths = run(out / "text.onnx", ids=encoded["input_ids"], mask=encoded["attention_mask"].bool())
    features = model.encode_texts(TEXTS)
    valid, longest = features.mask[..., None], features.words.shape[1]
    assert lengths.tolist() == features.lengths.tolist()
    torch.testing.assert_close(words[:, :longest] * valid, features.words * valid, atol=1e-5, rtol=0)

    dense, mask = model.encode_descriptions([TEXTS[0], None, TEXTS[2], None, TEXTS[1]])
    scores = run(
        out / "score.onnx",
        images=patches,
        words=words,
        lengths=lengths,
        dense=dense,
        dense_lengths=mask.sum(dim=1),
    )
    expected = model.score(export.ImageFeatures(model.encode_pixels(pixels), dense, mask), features)
    torch.testing.assert_close(scores, expected.detach(), atol=1e-5, rtol=0)

    (out / "notes.txt").write_text("mine")
    (out / "text.onnx").write_bytes(b"changed by hand")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["export", str(saved), "-o", str(out)]) == 2
    assert "text.onnx" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("head", ["mean", "maxsim", "scan", "description"])
def test_other_heads(encoders, tmp_path, head):
    torch.manual_seed(0)
    model = RetrievalModel(ModelConfig(**encoders, embed_size=16, head=head)).eval()
    module, reads = export.HeadScore(model.head), model.head.uses_description
    traced = export.score_inputs(17, 16, descriptions=reads)
    export.export_onnx(module, tmp_path / "score.onnx", traced, export.SCORE_AXES, ["similarity"])
    inputs = {
        "images": torch.randn(4, 17, 16),
        "words": torch.randn(1, 3, 16),
        "lengths": torch.tensor([2]),
        **({"dense": torch.randn(4, 5, 16), "dense_lengths": torch.tensor([0, 5, 1, 3])} if reads else {}),
    }
    expected = module(*inputs.values())
    torch.testing.assert_close(run(tmp_path / "score.onnx", **inputs), expected, atol=1e-5, rtol=0)


def test_an_interrupted_export_can_be_repeated(saved, tmp_path, monkeypatch):
    model, replace, versions = from_pretrained(saved), export.os.replace, iter(("one", "two", "three"))

    def write_graphs(model, folder):
        version = next(versions)
        for name in ("image.onnx", "text.onnx", "score.onnx"):
            (folder / name).write_text(version + name)
        return {}

    def stop(source, target):
        if str(target).endswith("score.onnx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(export, "_write_graphs", write_graphs)
    export.export_model(model, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export.os, "replace", stop)
        export.export_model(model, tmp_path)
    assert [(tmp_path / name).read_text()[:3] for name in ("image.onnx", "score.onnx")] == ["two", "one"]
    export.export_model(model, tmp_path)
    facts = json.loads((tmp_path / "export.json").read_text())
    assert "coming" not in facts and facts["files"]["score.onnx"] == export.sha256(tmp_path / "score.onnx")
    assert (tmp_path / "image.onnx").read_text() == "threeimage.onnx"


def test_foreign_files_and_missing_packages_are_told_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "export.json").write_text("{}")
    assert main(["export", "no-such-model", "-o", str(tmp_path)]) == 2
    assert "export.json" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert main(["export", "no-such-model", "-o", str(tmp_path / "new")]) == 2
    assert "seps[export]" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
