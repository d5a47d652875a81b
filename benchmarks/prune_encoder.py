"""What patches that skip the later blocks of a vision transformer save and cost, beside simply using a smaller input.

    python benchmarks/prune_encoder.py --model base --data DEV.jsonl --photos 200 --out prune.jsonl

The first PHOTOS of the data are the gallery, their captions the queries; pixels alone. Times are the best of several
rounds through all variants in one run, on one thread: compare them as ratios. No variant was trained for its pruning.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders import PruneConfig, ViT
from seps.metrics import recall
from seps.retrieval.data import decode_all, load_data
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained

BATCH = 8
Encode = Callable[[Tensor], Tensor]
"""Pixels (B, 3, H, W) in [0, 1] -> tokens."""


def pruned(vision: ViT, prune: PruneConfig | None, size: int | None = None) -> Encode:
    def encode(pixels: Tensor) -> Tensor:
        vision.prune = prune
        if size is not None:
            pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
        return vision(pixels)  # type: ignore[no-any-return]

    return encode


def variants(vision: ViT) -> dict[str, Encode]:
    """Every way to encode, by name."""
    half = copy.deepcopy(vision).bfloat16()
    made: dict[str, Encode] = {"all patches": pruned(vision, None), "all patches, bf16": lambda x: half(x).float()}
    for size in (196, 168, 154):
        made[f"input of {size} px"] = pruned(vision, None, size)
    for keep, blocks in ((0.7, (4, 7)), (0.5, (3, 4)), (0.5, (6, 7)), (0.35, (4, 5, 6, 7)), (0.35, (6, 7))):
        if keep ** (1 / len(blocks)) >= 0.5:
            made[f"merge to {keep} in {blocks}"] = pruned(vision, PruneConfig(keep, blocks, "merge"))
    for keep, blocks in ((0.7, (4, 7)), (0.5, (6,))):
        made[f"attention keeps {keep} after {blocks}"] = pruned(vision, PruneConfig(keep, blocks, "attention"))
    return made


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = from_pretrained(options.model)
    assert isinstance(model.vision, ViT)
    data = load_data(options.data)
    data = replace(data, records=data.records[: options.photos])
    pixels = decode_all(data, model.image_size).float() / 255
    owner, texts = torch.as_tensor(data.image_of_caption), model.encode_texts(data.captions)
    ways = variants(model.vision)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, encode in ways.items():
            start = time.perf_counter()
            encode(pixels[:BATCH])
            best[name] = min(best[name], time.perf_counter() - start)
    project: nn.Module = model.project_patches
    for name, encode in ways.items():
        tokens = torch.cat([project(encode(part)) for part in pixels.split(BATCH)])
        rsum = recall(model.score(ImageFeatures(tokens), texts), owner).rsum
        line = {
            "model": options.model,
            "photos": len(data.records),
            "variant": name,
            "ms_per_photo": 1000 * best[name] / BATCH,
            "speed": best["all patches"] / best[name],
            "rsum": rsum,
        }
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name:40s} x {line['speed']:.2f}  rSum {rsum:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
