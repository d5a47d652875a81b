"""Tiny encoders saved to folders, and a data set of synthetic scenes with captions, for tests of the retrieval."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("square", "circle")
PLACES = ("left", "right")
WORDS = ["a", "the", "on", "and", ".", "grey", "picture", "shows", "with", "side", *COLOURS, *SHAPES, *PLACES]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def save_text_encoder(folder: Path) -> Path:
    """A tiny BERT with a word tokenizer."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", model_max_length=32, **names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **SMALL, **STILL)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def save_vision_encoder(folder: Path, family: str = "vit") -> Path:
    """A tiny ViT (CLS and 16 patches), Swin or CLIP at 32 pixels."""
    torch.manual_seed(0)
    if family == "vit":
        config = transformers.ViTConfig(image_size=32, patch_size=8, **SMALL, **STILL)
        transformers.ViTModel(config).save_pretrained(folder)
    elif family == "swin":
        config = transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
        )
        transformers.SwinModel(config).save_pretrained(folder)
    else:
        vision = {"image_size": 32, "patch_size": 8, **SMALL}
        text = {"vocab_size": 40, "max_position_embeddings": 24, "eos_token_id": 3, **SMALL}
        config = transformers.CLIPConfig(projection_dim=16, vision_config=vision, text_config=text)
        transformers.CLIPModel(config).save_pretrained(folder)
    return folder


def make_scenes(folder: Path, count: int = 48, seed: int = 0, name: str = "scenes") -> Path:
    """Two coloured shapes on grey, two captions each, and a dense text that names them in another order."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    colours = list(COLOURS)
    lines = []
    for i in range(count):
        draw = [int(torch.randint(0, n, (1,), generator=generator)) for n in (4, 2, 4, 2)]
        left, right = (colours[draw[0]], SHAPES[draw[1]]), (colours[draw[2]], SHAPES[draw[3]])
        picture = Image.new("RGB", (32, 32), (100 + i, 120 + seed, 120))
        for x, (colour, shape) in ((2, left), (18, right)):
            pen = ImageDraw.Draw(picture)
            (pen.rectangle if shape == "square" else pen.ellipse)((x, 8, x + 12, 20), fill=COLOURS[colour])
        picture.save(folder / f"{name}{i:03d}.png")
        a, b = " ".join(left), " ".join(right)
        captions = [f"a {a} on the left and a {b} on the right .", f"a {b} and a {a} ."]
        dense = f"the picture shows a {b} on the right side and a {a} on the left side ."
        lines.append(json.dumps({"image": f"{name}{i:03d}.png", "captions": captions, "dense": dense}))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
