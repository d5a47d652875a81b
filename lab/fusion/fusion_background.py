"""Two further corrections of a score with descriptions: the published text encoder, and levels over background photos.

    python -m benchmarks.fusion --data dev.jsonl --work DIR
    python -m benchmarks.fusion_background --data dev.jsonl --background train.jsonl --work DIR

P is the cosine of caption and description by MiniLM-L6 as published, before it was trained with photos. l is the level
of a caption over photos of `--background`, which have descriptions: the mean of its 30 highest scores with them, by the
means of patches and words. b and c are the levels over the bank (`benchmarks.fusion`), those of P included where P is
in the score. `--background-features`: a file of `torch.save({"tokens": (B, P + N, C)})` in the order of that file.
Columns: rSum, and the sum of the recalls of searching photos by captions alone, which a caption's level cannot change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.fusion import parts_of, photo_means, shipped
from seps.encoders.registry import text_encoder
from seps.encoders.text import TextEncoder
from seps.metrics import recall
from seps.nn.guidance import masked_mean
from seps.retrieval.data import load_jsonl
from seps.retrieval.eval.evaluate import encode_images
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.index.bank import ASKED, level, sentences
from seps.retrieval.index.codec import text_vectors
from seps.retrieval.pretrained import from_pretrained

BEST = 30
"""Scores with background photos whose mean is a caption's level."""


def published_vectors(encoder: TextEncoder, texts: list[str]) -> Tensor:
    """(T, C) mean token of each text at length one, as MiniLM-L6 is meant to be used."""
    found = []
    for start in range(0, len(texts), 64):
        batch = encoder.tokenize(texts[start : start + 64])
        found.append(F.normalize(masked_mean(encoder(batch.ids, batch.mask), batch.mask), dim=-1))
    return torch.cat(found)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion_background", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--background", type=Path, required=True)
    parser.add_argument("--background-features", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    own = shipped(model)
    parts = parts_of(options.model, model, options.data, options.features, None, options.work)
    owner, data = parts.owner.tolist(), load_jsonl(options.data)

    published = text_encoder("mini").eval()
    asked = published_vectors(published, data.captions)
    described = published_vectors(published, [text or "" for text in data.dense])
    bank = published_vectors(published, list(sentences()[:-ASKED]))
    also, also_b, also_c = described @ asked.T, level(described @ bank.T)[:, None], level(asked @ bank.T)

    other = load_jsonl(options.background)
    if options.background_features:
        tokens = torch.load(options.background_features, weights_only=True)["tokens"]
    else:
        tokens = encode_images(model, other)
    captions = text_vectors(model.encode_texts(data.captions))
    rows = []
    for start in range(0, len(other), 64):
        texts = other.dense[start : start + 64]
        images = ImageFeatures(tokens[start : start + 64], *model.encode_descriptions(texts))
        seen, said = photo_means(model, images)
        rows.append(own[:2].sum() * seen @ captions.T + own[2:].sum() * said @ captions.T)
    high = torch.cat(rows).topk(BEST, dim=0).values.mean(dim=0)

    total, b, c = parts.mixed(own), parts.level(own), parts.captions[:, 0]
    print(f"{options.model} on {options.data.name}, background {options.background.name} ({len(other)} photos)\n")
    print("| score | rSum | captions find photos |\n|---|---|---|")
    for weight in (0.0, 0.3, 0.6):
        name = f"with {weight:g} P" if weight else "as shipped"
        score, levels, levels_c = total + weight * also, b + weight * also_b, c + weight * also_c
        for text, found in (
            (name, score),
            (f"{name}, - 0.5 b - c", score - 0.5 * levels - levels_c),
            (f"{name}, - 0.5 b - 0.5 l", score - 0.5 * levels - 0.5 * high),
            (f"{name}, - 0.5 b - 0.5 c - 0.5 l", score - 0.5 * levels - 0.5 * levels_c - 0.5 * high),
        ):
            metrics = recall(found, owner)
            print(f"| {text} | {metrics.rsum:.1f} | {sum(metrics.t2i.recalls.values()):.1f} |", flush=True)


if __name__ == "__main__":
    main()
