"""What patches that skip the later blocks of a vision transformer save and cost, beside simply using a smaller input.

    python benchmarks/prune_encoder.py --model base --data DEV.jsonl --photos 200 --out prune.jsonl

The first PHOTOS of the data are the gallery, their captions the queries; pixels alone. Times are the best of several
rounds through all variants in one run, on `--threads` of the CPU: compare them as ratios. rSum is computed on
`--device`. No variant was trained for its pruning.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.lines import append_line
from seps.encoders import PruneConfig, ViT
from seps.metrics import recall
from seps.retrieval.data import decode_all, load_data
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained

BATCH = 8
MERGES = (
    (0.7, (4, 7)),
    (0.6, (4, 7)),
    (0.6, (3, 6, 9)),
    (0.5, (3, 4)),
    (0.5, (6, 7)),
    (0.5, (4, 6, 8, 10)),
    (0.35, (4, 5, 6, 7)),
)
DROPS = ((0.7, (4, 7)), (0.5, (6,)))
FREE_MERGE = PruneConfig(0.7, (4, 7), "merge")


@dataclass(frozen=True)
class Way:
    """A way to encode."""

    name: str
    prune: PruneConfig | None = None
    size: int | None = None
    """Pixels of the input; None: the model's."""
    half: bool = False
    """bfloat16."""
    int8: bool = False
    """Linear layers in 8 bits, on the CPU alone."""


def ways(only: str = "") -> list[Way]:
    """All of them, or those that have `only` in their names."""
    made = [Way("all patches"), Way("all patches, bf16", half=True), Way("all patches, int8", int8=True)]
    made += [Way(f"input of {size} px", size=size) for size in (196, 168, 154)]
    made += [Way("input of 196 px, bf16", size=196, half=True), Way("input of 168 px, bf16", size=168, half=True)]
    made += [Way(f"merge to {keep} in {blocks}", PruneConfig(keep, blocks, "merge")) for keep, blocks in MERGES]
    made += [Way(f"attention keeps {keep} after {blocks}", PruneConfig(keep, blocks)) for keep, blocks in DROPS]
    made.append(Way("merge to 0.7 in (4, 7), bf16", FREE_MERGE, half=True))
    made.append(Way("merge to 0.7 in (4, 7), int8", FREE_MERGE, int8=True))
    return [way for way in made if only in way.name]


def quantised(vision: ViT) -> nn.Module:
    """Its linear layers in 8 bits, activations rounded as they come."""
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(vision), {nn.Linear}, dtype=torch.qint8)


class Encoders:
    """The encoder in each precision."""

    def __init__(self, vision: ViT, device: str) -> None:
        self.float32 = copy.deepcopy(vision).to(device)
        self.half = copy.deepcopy(vision).to(device).bfloat16()
        self.int8 = quantised(vision)

    def encode(self, way: Way, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in [0, 1] -> tokens float32."""
        vision = self.int8 if way.int8 else self.half if way.half else self.float32
        vision.prune = way.prune  # type: ignore[assignment]
        if way.size is not None:
            shape = (way.size, way.size)
            pixels = F.interpolate(pixels, size=shape, mode="bilinear", antialias=True, align_corners=False)
        tokens: Tensor = vision(pixels)
        return tokens.float()


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--only", default="", metavar="WORDS", help="measure the ways with these words in their names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = from_pretrained(options.model)
    assert isinstance(model.vision, ViT)
    data = load_data(options.data)
    data = replace(data, records=data.records[: options.photos])
    pixels = decode_all(data, model.image_size)
    encoders = Encoders(model.vision, "cpu")
    chosen = ways(options.only)
    best = {way.name: float("inf") for way in chosen}
    for _ in range(options.rounds):
        for way in chosen:
            start = time.perf_counter()
            encoders.encode(way, pixels[:BATCH].float() / 255)
            best[way.name] = min(best[way.name], time.perf_counter() - start)
    encoders, model = Encoders(model.vision, options.device), model.to(options.device)
    owner, texts = torch.as_tensor(data.image_of_caption), model.encode_texts(data.captions)
    for way in chosen:
        where = "cpu" if way.int8 else options.device
        parts = [encoders.encode(way, part.to(where).float() / 255).to(options.device) for part in pixels.split(BATCH)]
        tokens = torch.cat([model.project_patches(part) for part in parts])
        rsum = recall(model.score(ImageFeatures(tokens), texts).cpu(), owner).rsum
        line = {
            "model": options.model,
            "data": Path(options.data).name,
            "photos": len(data.records),
            "threads": options.threads,
            "variant": way.name,
            "ms_per_photo": 1000 * best[way.name] / BATCH,
            "speed": best[chosen[0].name] / best[way.name],
            "rsum": rsum,
        }
        append_line(options.out, line)
        print(f"{way.name:40s} x {line['speed']:.2f}  rSum {rsum:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
