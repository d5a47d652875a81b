"""Tiny dual encoders of every supported family, made from configurations and saved as their publishers save them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

FAMILIES = ("clip", "siglip", "siglip2", "siglip2-free", "chinese_clip", "altclip")
"""`siglip2` is a SigLIP with SigLIP 2's tokenizer, as its models of one size are published; `siglip2-free` takes any
shape."""
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
WORDS = ["a", "the", "red", "green", "blue", "dog", "cat", "square", "noise", "on", "photo", "of", "dots", "run", "##s"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def _model(family: str) -> Any:
    t = transformers
    text = {**SMALL, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 3, "pad_token_id": 0}
    if family.startswith("siglip2"):
        text["max_position_embeddings"] = 48
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "clip":
        return t.CLIPModel(t.CLIPConfig(projection_dim=16, vision_config=IMAGE, text_config=text))
    if family in ("siglip", "siglip2"):
        return t.SiglipModel(t.SiglipConfig(vision_config=IMAGE, text_config={**text, "projection_size": 32}))
    if family == "siglip2-free":
        vision = {**SMALL, "patch_size": 8, "num_patches": 16}
        return t.Siglip2Model(t.Siglip2Config(vision_config=vision, text_config={**text, "projection_size": 32}))
    if family == "chinese_clip":
        config = t.ChineseCLIPConfig(projection_dim=16, vision_config=IMAGE, text_config={**text, **still})
        return t.ChineseCLIPModel(config)
    more = {"project_dim": 24, "max_position_embeddings": 17}
    config = t.AltCLIPConfig(projection_dim=16, vision_config=IMAGE, text_config={**text, **still, **more})
    return t.AltCLIPModel(config)


def _processor(family: str) -> Any:
    if family == "siglip2-free":
        return Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    if family.startswith("siglip"):
        return SiglipImageProcessorPil(size={"height": 32, "width": 32})
    return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _save_tokenizer(family: str, folder: Path) -> None:
    if family.startswith("siglip2"):
        letters = "▁abcdefghijklmnopqrstuvwxyz"
        vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4}
        vocabulary |= {letter: 5 + i for i, letter in enumerate(letters)}
        tokenizer = transformers.Siglip2Tokenizer(
            vocab=vocabulary, merges=[], model_max_length=48, padding_side="right"
        )
        tokenizer.save_pretrained(folder)
        return
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **names)
    fast.save_pretrained(folder)


@functools.cache
def dual_folder(family: str) -> Path:
    """The folder of a tiny model of that family, made once."""
    folder = Path(tempfile.mkdtemp(prefix=f"seps-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(7)
    model = _model(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the published start is so small that all vectors are alike
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.logit_scale.fill_(4.6)
    model.save_pretrained(folder)
    _processor(family).save_pretrained(folder)
    _save_tokenizer(family, folder)
    return folder
