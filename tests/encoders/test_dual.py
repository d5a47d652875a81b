"""Dual encoders: the vectors are those of transformers' own features, for every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn import functional as F

from duals import FAMILIES, dual_folder
from messages import naming
from seps.encoders.dual import DUAL_PRESETS, dual_encoder, is_dual, presets_sentence
from seps.encoders.weights import EncoderUnavailable

TEXTS = ["A red dog", "the cat runs on a blue square and dots", "stripes"]


def pictures() -> list[Any]:
    rng = np.random.default_rng(3)
    sizes = [(50, 70), (90, 40), (33, 32)]
    return [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_the_models_own(family: str) -> None:
    folder = dual_folder(family)
    embedder = dual_encoder(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    whole = family.startswith("siglip")
    with torch.no_grad():
        images = model.get_image_features(**processor(images=pictures(), return_tensors="pt")).pooler_output
        length = model.config.text_config.max_position_embeddings
        options = {"padding": "max_length", "max_length": length} if whole else {"padding": True}
        tokens = tokenizer(TEXTS, return_tensors="pt", **options)
        if whole:
            tokens = {"input_ids": tokens["input_ids"]}
        texts = model.get_text_features(**tokens).pooler_output
    own = embedder.image_vectors([embedder.prepare(picture) for picture in pictures()])
    sentences = embedder.text_vectors(TEXTS)
    assert own.shape[1] == sentences.shape[1] == embedder.width
    assert torch.allclose(own, F.normalize(images, dim=-1), atol=1e-6)
    assert torch.allclose(sentences, F.normalize(texts, dim=-1), atol=1e-6)
    assert (own @ sentences.T).std() > 1e-3, "all scores are alike: the comparison would not notice a mistake"
    # One by one as together: padding and the rest of a batch change nothing.
    alone = torch.cat([embedder.text_vectors([text]) for text in TEXTS])
    assert torch.allclose(alone, sentences, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_are_cut(family: str) -> None:
    embedder = dual_encoder(dual_folder(family))
    assert embedder.cut("dog") is None
    count, read = embedder.cut("a dog " * 20) or (0, 0)
    assert count > read > 0
    assert torch.isfinite(embedder.text_vectors(["a dog " * 20])).all()


def test_siglip_reads_its_padding() -> None:
    """Texts padded to their longest, as CLIP's are, have other vectors: the rule matters."""
    embedder = dual_encoder(dual_folder("siglip"))
    ids = embedder.tokenizer(["a dog"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        short = F.normalize(embedder._model.get_text_features(input_ids=ids).pooler_output, dim=-1)
    assert not torch.allclose(short, embedder.text_vectors(["a dog"]), atol=1e-3)


def test_siglip2_does_not_see_capitals() -> None:
    embedder = dual_encoder(dual_folder("siglip2"))
    assert torch.equal(embedder.text_vectors(["A RED DOG"]), embedder.text_vectors(["a red dog"]))


def test_other_weights_have_another_digest() -> None:
    first, second = dual_encoder(dual_folder("clip")), dual_encoder(dual_folder("clip"))
    assert first.digest() == second.digest()
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.mul_(1.0001)
    assert first.digest() != second.digest()


def copied(tmp_path: Path, family: str = "clip") -> Path:
    folder = tmp_path / "model"
    shutil.copytree(dual_folder(family), folder)
    return folder


def test_half_downloaded_weights_are_a_sentence(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(EncoderUnavailable, match=naming("clip", "Download")):
        dual_encoder(folder)
    weights.unlink()
    with pytest.raises(EncoderUnavailable, match=naming("model.safetensors")):
        dual_encoder(folder)


def test_missing_files_are_sentences(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(EncoderUnavailable, match=naming("preprocessor_config.json")):
        dual_encoder(folder)
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(EncoderUnavailable, match="processor"):
        dual_encoder(folder)


def test_a_model_of_another_kind_is_named(tmp_path: Path) -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config.save_pretrained(tmp_path)
    assert is_dual(tmp_path)
    with pytest.raises(EncoderUnavailable, match=naming("bert", "clip", "siglip")):
        dual_encoder(tmp_path)


def test_folders_are_told_apart(tmp_path: Path) -> None:
    assert is_dual(dual_folder("clip"))
    (tmp_path / "config.json").write_text(json.dumps({"format": 1, "model": {}}))
    assert not is_dual(tmp_path)
    assert not is_dual(tmp_path / "absent")


def test_presets_say_their_languages() -> None:
    assert "siglip2-b-16" in presets_sentence()
    assert set(DUAL_PRESETS) == {"clip-b-32", "clip-b-16", "siglip-b-16", "siglip2-b-16", "siglip2-so400m"}


@pytest.mark.parametrize("family", ["clip", "siglip", "siglip2", "chinese_clip", "altclip"])
def test_training_starts_from_the_towers(family: str) -> None:
    """`model.vision` and `model.text` take a dual encoder's towers, and both learn."""
    from seps.retrieval.config import ModelConfig
    from seps.retrieval.heads import ImageFeatures, TextFeatures
    from seps.retrieval.model import RetrievalModel

    folder = str(dual_folder(family))
    model = RetrievalModel(ModelConfig(vision=folder, text=folder, embed_size=16)).train()
    batch = model.text.tokenize(TEXTS)
    words, mask = model.encode_words(batch.ids, batch.mask)
    tokens = model.encode_pixels(torch.rand(3, 3, 32, 32))
    model.head(ImageFeatures(tokens), TextFeatures(words, mask)).similarity.diagonal().sum().backward()
    for tower in (model.vision, model.text):
        assert all(parameter.grad is not None for parameter in tower.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_of_a_character_is_refused_with_a_sentence(family: str) -> None:
    embedder = dual_encoder(dual_folder(family))
    for call in (lambda text: embedder.text_vectors(["a dog", text]), embedder.cut):
        with pytest.raises(ValueError, match=naming("a \\udcff dog")):
            call("a \udcff dog")


def test_one_text_is_not_taken_for_a_list_of_its_letters() -> None:
    with pytest.raises(ValueError, match=naming("['a dog']")):
        dual_encoder(dual_folder(FAMILIES[0])).text_vectors("a dog")
