"""Tiny models of every family, saved to folders as their publishers do, and a machine without network."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

WORDS = ["a", "dog", "run", "##s", "##ning", "in", "the", "park", ",", "t", "-", "shirt"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SMALL_IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
SMALL_TEXT = {**SMALL, "vocab_size": 40, "max_position_embeddings": 24}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach a host fails at once, as on a machine without network."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def make_model(family: str) -> Any:
    t = transformers
    towers = {"vision_config": SMALL_IMAGE, "text_config": {**SMALL_TEXT, "eos_token_id": 3}}
    made = {
        "vit": lambda: t.ViTModel(t.ViTConfig(**SMALL_IMAGE)),
        "swin": lambda: t.SwinModel(
            t.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
        ),
        "clip": lambda: t.CLIPModel(t.CLIPConfig(projection_dim=16, **towers)),
        "siglip": lambda: t.SiglipModel(t.SiglipConfig(**towers)),
        "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**SMALL_IMAGE)),
        "registers": lambda: t.Dinov2WithRegistersModel(
            t.Dinov2WithRegistersConfig(num_register_tokens=3, **SMALL_IMAGE)
        ),
        "ijepa": lambda: t.IJepaModel(t.IJepaConfig(**SMALL_IMAGE)),
        "convnext": lambda: t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
        "mae": lambda: t.ViTMAEModel(t.ViTMAEConfig(**SMALL_IMAGE)),
        "siglip2": lambda: t.Siglip2VisionModel(t.Siglip2VisionConfig(**SMALL, patch_size=8, num_patches=16)),
        "bert": lambda: t.BertModel(t.BertConfig(**SMALL_TEXT)),
        "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SMALL_TEXT, pad_token_id=0)),
    }
    torch.manual_seed(0)
    return made[family]()


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=24,
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer_saver() -> Any:
    """`tokenizer_saver(folder)` writes the tiny tokenizer there."""
    return save_tokenizer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`saved("vit")`: the folder of a tiny saved model of that family, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(family).save_pretrained(made[family])
            save_tokenizer(made[family])
        return made[family]

    return folder
