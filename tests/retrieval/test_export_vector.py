"""`seps export --vector`: the graphs give the model's vectors, the examples pass their check, a wrong part fails it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from seps.cli.main import main
from seps.export import export_onnx, open_session
from seps.retrieval.config import ModelConfig
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.vector_export import _round_tables
from tiny import save_text_encoder, save_vision_encoder

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
TEXTS = ["a red square on the left .", "a circle", "the picture shows a blue circle and a green square"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vectors")
    vision, text = (str(save(folder / kind)) for kind, save in (("v", save_vision_encoder), ("t", save_text_encoder)))
    save_pretrained(RetrievalModel(ModelConfig(vision=vision, text=text, embed_size=16)), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    assert main(["export", str(saved), "--vector", "--bits", "32", "-o", str(out)]) == 0
    return out


def expected(model, texts, pixels):
    features = model.encode_texts(texts)
    words = (features.words * features.mask[..., None]).sum(dim=1) / features.mask.sum(dim=1, keepdim=True)
    patches = model.encode_pixels(pixels)[:, model.vision.num_prefix_tokens :].mean(dim=1)
    return [torch.nn.functional.normalize(one, dim=-1).detach().numpy() for one in (words, patches)]


def test_graphs_give_the_normalised_means(saved, exported):
    from tokenizers import Tokenizer

    model = from_pretrained(saved)
    pixels = torch.rand(3, 3, *model.image_size)
    words, patches = expected(model, TEXTS, pixels)
    np.testing.assert_allclose(
        open_session(exported / "image.onnx").run(None, {"pixels": pixels.numpy()})[0], patches, atol=1e-5
    )
    tokenizer, graph = Tokenizer.from_file(str(exported / "tokenizer.json")), open_session(exported / "text.onnx")
    for text, vector in zip(TEXTS, words, strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        made = graph.run(None, {"ids": ids, "mask": np.ones_like(ids, dtype=bool)})[0][0]
        np.testing.assert_allclose(made, vector, atol=1e-5)


@pytest.fixture(scope="module")
def short(saved, tmp_path_factory):
    """The same model with a projection of short queries that is another one."""
    model = from_pretrained(saved)
    model.set_short_queries(True)
    with torch.no_grad():
        model.project_short.weight.mul_(-1)
    save_pretrained(model, folder := tmp_path_factory.mktemp("short") / "model")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 8])
def test_short_queries_are_read_by_their_own_projection(short, tmp_path, bits):
    from tokenizers import Tokenizer

    assert main(["export", str(short), "--vector", "--bits", str(bits), "-o", str(tmp_path)]) == 0
    texts = [*TEXTS, "the square", "a red circle", "red circle on a square"]
    words, _ = expected(from_pretrained(short), texts, torch.rand(1, 3, *from_pretrained(short).image_size))
    tokenizer, graph = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), open_session(tmp_path / "text.onnx")
    for text, vector in zip(texts, words, strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        made = graph.run(None, {"ids": ids, "mask": np.ones_like(ids, dtype=bool)})[0][0]
        assert made @ vector > (0.999999 if bits == 32 else 0.98)


def test_the_graph_counts_words_as_the_model_does():
    """On the shipped vocabulary, for captions and their beginnings, and for odd ones."""
    from seps.retrieval.export import ShortQueries
    from seps.retrieval.languages import is_short
    from seps.retrieval.ranking.bank import nouns, sentences

    model = from_pretrained("mini")
    odd = ["", "the", "...", "Café", "t-shirt", "a man's hat", "don't", "beach", "unbelievableness of umbrellas"]
    odd += [
        "3.5 km",
        "a dog, a cat",
        "a dog, a cat & 3 birds",
        "skateboarder",
        "in front of the skateboarder on a ramp",
    ]
    begun = [" ".join(text.split()[:count]) for text in sentences()[:300] for count in (1, 2, 3, 4, 5)]
    texts = [*filter(None, odd), *nouns(), *begun, *sentences()]
    tokenized = model.text.tokenize(texts)
    found = ShortQueries(model)(tokenized.ids, tokenized.mask).tolist()
    assert [text for text, short in zip(texts, found, strict=True) if short != is_short(text)] == []


@pytest.mark.slow
def test_eight_bits_are_near_and_smaller(saved, exported, tmp_path):
    assert main(["export", str(saved), "--vector", "--batch", "1", "-o", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "conformance.json").read_text())
    graph = open_session(tmp_path / "image.onnx")
    assert graph.get_inputs()[0].shape[0] == 1
    assert (tmp_path / "text.onnx").stat().st_size < (exported / "text.onnx").stat().st_size
    assert {len(one["vector"]) for kind in ("texts", "pictures") for one in facts[kind]} == {16}


def test_a_large_table_is_kept_in_half_precision(tmp_path):
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(1, 300, 256, generator=generator) * torch.logspace(-2, 2, 300)[:, None]
            self.table, self.small = (torch.nn.Parameter(part.clone()) for part in (rows, rows[:, :20]))

        def forward(self, pixels):
            return torch.cat([pixels + self.table, pixels[:, :20] - self.small], dim=1)

    module, path = Positions(), tmp_path / "graph.onnx"
    pixels = torch.zeros(2, 300, 256)
    export_onnx(module.eval(), path, {"pixels": pixels}, {"pixels": {0: "picture"}}, ["out"])
    before = path.stat().st_size
    _round_tables(path)
    made = torch.from_numpy(open_session(path).run(None, {"pixels": pixels.numpy()})[0])
    wanted = module(pixels)
    torch.testing.assert_close(made, wanted, rtol=2**-11, atol=1e-7)
    assert (made != wanted)[:, :300].any() and torch.equal(made[:, 300:], wanted[:, 300:])
    assert path.stat().st_size < before - 1.9 * module.table.numel()


@pytest.mark.slow
def test_immich_layout_has_its_names_and_inputs(saved, tmp_path):
    from tokenizers import Tokenizer

    assert main(["export", str(saved), "--vector", "--bits", "32", "--layout", "immich", "-o", str(tmp_path)]) == 0
    model = from_pretrained(saved)
    length = json.loads((tmp_path / "config.json").read_text())["text_cfg"]["context_length"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "textual" / "tokenizer.json"))
    padding = json.loads((tmp_path / "textual" / "tokenizer_config.json").read_text())["pad_token"]
    tokenizer.enable_padding(length=length, pad_token=padding, pad_id=tokenizer.token_to_id(padding))
    tokenizer.enable_truncation(max_length=length)
    graph = open_session(tmp_path / "textual" / "model.onnx")
    words, _ = expected(model, TEXTS[:2], torch.rand(1, 3, *model.image_size))
    for text, vector in zip(TEXTS, words, strict=False):
        made = graph.run(None, {"text": np.array([tokenizer.encode(text).ids], dtype=np.int32)})[0][0]
        np.testing.assert_allclose(made, vector, atol=1e-5)
    facts = json.loads((tmp_path / "visual" / "preprocess_cfg.json").read_text())
    assert facts["resize_mode"] == "squash" and facts["size"] == list(model.image_size)
    assert [one.name for one in open_session(tmp_path / "visual" / "model.onnx").get_inputs()] == ["image"]


def run_example(folder: Path, *words: str, python: str = sys.executable):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [python, "search.py", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_example_passes_its_check_and_finds_pictures(exported, tmp_path):
    from PIL import Image

    assert run_example(exported).returncode == 0
    for name, color in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        Image.new("RGB", (30, 20), color).save(tmp_path / f"{name}.png")
    made = run_example(exported, "a circle", str(tmp_path))
    assert {line.split("/")[-1] for line in made.stdout.splitlines()} == {"red.png", "blue.png"}


def test_another_tokenizer_fails_the_check(exported, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = [name for name in vocabulary if not name.startswith("[")]
    tokenizer["model"]["vocab"] |= dict(zip(names, reversed([vocabulary[name] for name in names]), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    made = run_example(folder)
    assert made.returncode == 1 and "FAILED" in made.stdout


@pytest.mark.slow
def test_options_of_vectors_alone_and_files_of_others_are_refused(saved, tmp_path, capsys):
    assert main(["export", str(saved), "--bits", "32", "-o", str(tmp_path)]) == 2
    assert "--vector" in capsys.readouterr().err
    (tmp_path / "search.py").write_text("mine")
    assert main(["export", str(saved), "--vector", "-o", str(tmp_path)]) == 2
    assert "search.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["search.py"]


@pytest.mark.slow
def test_the_examples_run_in_empty_environments(exported, tmp_path):
    folder = tmp_path / "js"
    shutil.copytree(exported, folder)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    packages = ["numpy", "onnxruntime", "pillow", "tokenizers"]
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, capture_output=True)
    made = run_example(folder, python=python)
    assert made.returncode == 0, made.stdout + made.stderr
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, capture_output=True)
    made = subprocess.run(["node", "search.mjs"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
