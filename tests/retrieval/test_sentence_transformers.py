"""`seps export --sentence-transformers`: the library's own classes load the folder and give the model's scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from seps.cli.main import main
from seps.images.decoding import read_image
from seps.images.sources import ImageSource
from seps.retrieval.config import ModelConfig
from seps.retrieval.engine.patches import PatchEngine
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from tiny import make_scenes, save_text_encoder, save_vision_encoder

library = pytest.importorskip("sentence_transformers")
TEXTS = ["a red square on the left .", "circle", "the picture shows a blue circle and a green square"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with a projection for short queries that differs from that of sentences."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("library")
    vision, text = (str(save(folder / kind)) for kind, save in (("v", save_vision_encoder), ("t", save_text_encoder)))
    model = RetrievalModel(ModelConfig(vision=vision, text=text, embed_size=16, short_queries=True))
    torch.nn.init.normal_(model.project_short.weight)
    save_pretrained(model, folder / "model")
    make_scenes(folder / "scenes", 4)
    return folder / "model"


@pytest.fixture(scope="module")
def files(saved):
    return sorted((saved.parent / "scenes").glob("*.png"))


@pytest.fixture(scope="module")
def folders(saved, tmp_path_factory):
    """By kind, what the command wrote."""
    out = tmp_path_factory.mktemp("exported")
    for kind in ("vector", "words", "pairs"):
        assert main(["export", str(saved), "--sentence-transformers", kind, "-o", str(out / kind)]) == 0
    return out


def encoded(model, files, descriptions=None):
    engine = PatchEngine(model)
    pixels = [read_image(ImageSource(file), model.image_size) for file in files]
    return engine, engine.pictures(engine.encode_pixels(pixels), descriptions)


def test_one_vector_of_texts_and_pictures(saved, folders, files):
    loaded = library.SentenceTransformer(str(folders / "vector"), device="cpu", trust_remote_code=True)
    model = from_pretrained(saved)
    engine, pictures = encoded(model, files)
    texts = loaded.encode_query(TEXTS, batch_size=2)
    np.testing.assert_allclose(texts, engine.encode_texts(TEXTS).text_features.mean_word.numpy(), atol=1e-5)
    images = [Image.open(file) for file in files]
    vectors = loaded.encode_document(images, batch_size=3)
    np.testing.assert_allclose(vectors, engine.vectors(pictures).numpy(), atol=1e-5)
    np.testing.assert_allclose(loaded.encode([str(file) for file in files]), vectors, atol=1e-5)
    np.testing.assert_allclose(loaded.similarity(texts, vectors), texts @ vectors.T, atol=1e-5)
    short = loaded.encode_document(TEXTS)
    assert np.allclose(short[0], texts[0], atol=1e-5) and not np.allclose(short[1], texts[1], atol=1e-2)


def test_vectors_are_cut_and_texts_are_cut(folders):
    loaded = library.SentenceTransformer(str(folders / "vector"), device="cpu", trust_remote_code=True, truncate_dim=4)
    cut = loaded.encode(TEXTS)
    assert cut.shape == (3, 4) and loaded.get_embedding_dimension() == 4
    loaded.max_seq_length = 4
    assert np.allclose(loaded.encode("a red square on the left"), loaded.encode("a red square picture"), atol=1e-5)


def test_the_library_saves_what_it_loaded(saved, folders, tmp_path):
    loaded = library.SentenceTransformer(str(folders / "vector"), device="cpu", trust_remote_code=True)
    loaded.save_pretrained(str(tmp_path / "again"))
    again = library.SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    assert np.array_equal(again.encode(TEXTS), loaded.encode(TEXTS))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    ours = from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(ours[name], value) for name, value in from_pretrained(saved).state_dict().items())
    with pytest.raises(ValueError, match="safetensors"):
        loaded.save_pretrained(str(tmp_path / "pickled"), safe_serialization=False)


def test_a_vector_per_word_and_patch(saved, folders, files):
    loaded = library.MultiVectorEncoder(str(folders / "words"), device="cpu", trust_remote_code=True)
    engine, pictures = encoded(from_pretrained(saved), files)
    words = loaded.encode_query(TEXTS, batch_size=2)
    features = engine.encode_texts(TEXTS).text_features
    for i, vectors in enumerate(words):
        expected = torch.nn.functional.normalize(features.words[i][features.mask[i]], dim=-1)
        assert torch.allclose(vectors, expected, atol=1e-5)
    patches = loaded.encode_document([Image.open(file) for file in files])
    assert [tuple(one.shape) for one in patches] == [(16, 16)] * 4
    tokens = torch.nn.functional.normalize(pictures.features.tokens[:, pictures.num_prefix_tokens :], dim=-1)
    best = torch.einsum("mc,bnc->bmn", words[0], tokens).amax(dim=2).sum(dim=1)
    assert torch.allclose(loaded.similarity(words, patches)[0], best, atol=1e-4)


def test_pairs_have_the_scores_of_the_whole_model(saved, folders, files):
    loaded = library.CrossEncoder(str(folders / "pairs"), device="cpu", trust_remote_code=True)
    described = [None, "a green circle on the right .", None, "the picture shows a red square"]
    engine, pictures = encoded(from_pretrained(saved), files, described)
    expected = engine.score(pictures, engine.encode_texts(TEXTS))
    documents = [
        Image.open(file) if text is None else {"image": Image.open(file), "text": text}
        for file, text in zip(files, described, strict=True)
    ]
    pairs = [(text, document) for text in TEXTS for document in documents]
    found = loaded.predict(pairs, batch_size=5)
    np.testing.assert_allclose(found.reshape(3, 4), expected.T.numpy(), atol=1e-4)
    order = [hit["corpus_id"] for hit in loaded.rank(TEXTS[0], documents)]
    assert order == expected[:, 0].argsort(descending=True).tolist()
    with pytest.raises(ValueError, match="picture"):
        loaded.predict([("a dog", "no picture")])


def test_the_folder_is_ours_as_well_and_nothing_of_it_is_run(saved, folders):
    assert from_pretrained(folders / "vector").config == from_pretrained(saved).config
    types = [module["type"] for module in json.loads((folders / "vector" / "modules.json").read_text())]
    assert types[0].startswith("seps.") and not list(folders.rglob("*.py"))


def test_a_folder_in_the_way_is_left_alone(saved, tmp_path, capsys):
    (tmp_path / "modules.json").write_text("[]")
    assert main(["export", str(saved), "--sentence-transformers", "-o", str(tmp_path)]) == 2
    assert "modules.json" in capsys.readouterr().err and (tmp_path / "modules.json").read_text() == "[]"


def test_vector_and_sentence_transformers_exclude_each_other(saved, tmp_path, capsys):
    assert main(["export", str(saved), "--vector", "--sentence-transformers", "-o", str(tmp_path)]) == 2
    assert "--vector" in capsys.readouterr().err
