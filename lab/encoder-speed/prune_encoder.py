"""What patches that skip the later blocks of a vision transformer save and cost, beside simply using a smaller input.

    python -m benchmarks.prune_encoder --model base --data DEV.jsonl --photos 200 --out prune.jsonl

The first PHOTOS of the data are the gallery, their captions the queries; pixels alone. Times are the best of several
rounds through all variants in one run, on `--threads` of the CPU: compare them as ratios. rSum is computed on
`--device`; its change is from the first variant, with the standard error over the photos. With `--pooled` it is that of
the mean patch and the mean word, which has nearly the rSum of the whole score and takes a hundredth of its time.
No variant was trained for its pruning.
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
from seps.metrics import metrics_from_ranks, ranks, rsum_by_image
from seps.nn.guidance import masked_mean
from seps.retrieval.data import decode_all, load_data
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

BATCH = 8
MERGES = (
    (0.7, (4, 7)),
    (0.6, (4, 7)),
    (0.6, (3, 6, 9)),
    (0.5, (3, 4)),
    (0.5, (6, 7)),
    (0.5, (4, 6, 8, 10)),
    (0.35, (4, 6, 8, 10)),
    (0.5, (3, 5, 7, 9)),
    (0.5, (2, 4, 6, 8)),
    (0.4, (2, 4, 6, 8)),
    (0.35, (4, 5, 6, 7)),
)
DROPS = ((0.7, (4, 7)), (0.5, (6,)))
SIZES = (336, 308, 252, 224, 196, 168, 154)
"""Of other inputs than the model's."""
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


def ways(size: int, only: str = "") -> list[Way]:
    """All of them for a model that takes `size` pixels, or those that have `only` in their names, and the first."""
    made = [Way("all patches"), Way("all patches, bf16", half=True), Way("all patches, int8", int8=True)]
    for other in (one for one in SIZES if one != size):
        made += [Way(f"input of {other} px{tail}", size=other, half=bool(tail)) for tail in ("", ", bf16")]
    for keep, blocks in MERGES:
        prune = PruneConfig(keep, blocks, "merge")
        made += [Way(f"merge to {keep} in {blocks}{tail}", prune, half=bool(tail)) for tail in ("", ", bf16")]
    made += [Way(f"attention keeps {keep} after {blocks}", PruneConfig(keep, blocks)) for keep, blocks in DROPS]
    made.append(Way("merge to 0.7 in (4, 7), int8", FREE_MERGE, int8=True))
    first = made[int("bf16" in only)]
    return [first, *(way for way in made if only in way.name and way != first)]


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
        tokens: Tensor = vision(pixels)
        return tokens.float()


def pooled(model: RetrievalModel, tokens: Tensor, texts: TextFeatures) -> Tensor:
    """(B, T) cosines of mean patches and mean words."""
    patches = tokens[:, model.vision.num_prefix_tokens :].mean(dim=1)
    return F.normalize(patches, dim=-1) @ F.normalize(masked_mean(texts.words, texts.mask), dim=-1).T


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
    parser.add_argument("--pooled", action="store_true", help="score by mean patch and mean word alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = from_pretrained(options.model)
    assert isinstance(model.vision, ViT)
    data = load_data(options.data)
    data = replace(data, records=data.records[: options.photos])
    own = model.image_size[0]
    encoders = Encoders(model.vision, "cpu")
    chosen = ways(own, options.only)
    sizes = {way.size or own for way in chosen}
    photos = {size: decode_all(data, (size, size)) for size in sizes}
    best = {way.name: float("inf") for way in chosen}
    for _ in range(options.rounds):
        for way in chosen:
            start = time.perf_counter()
            encoders.encode(way, photos[way.size or own][:BATCH].float() / 255)
            best[way.name] = min(best[way.name], time.perf_counter() - start)
    encoders, model = Encoders(model.vision, options.device), model.to(options.device)
    owner, texts = torch.as_tensor(data.image_of_caption), model.encode_texts(data.captions)
    first: Tensor | None = None
    for way in chosen:
        where = "cpu" if way.int8 else options.device
        parts = [
            encoders.encode(way, part.to(where).float() / 255).to(options.device)
            for part in photos[way.size or own].split(BATCH)
        ]
        tokens = torch.cat([model.project_patches(part) for part in parts])
        scores = pooled(model, tokens, texts) if options.pooled else model.score(ImageFeatures(tokens), texts)
        i2t, t2i = ranks(scores.cpu(), owner)
        rsum, each = metrics_from_ranks(i2t, t2i).rsum, rsum_by_image(i2t, t2i, owner)
        first = each if first is None else first
        gap = each - first
        line = {
            "model": options.model,
            "data": Path(options.data).name,
            "photos": len(data.records),
            "threads": options.threads,
            "scores": "pooled" if options.pooled else "whole",
            "variant": way.name,
            "ms_per_photo": 1000 * best[way.name] / BATCH,
            "speed": best[chosen[0].name] / best[way.name],
            "rsum": rsum,
            "change": [float(gap.mean()), float(gap.std() / len(gap) ** 0.5)],
        }
        append_line(options.out, line)
        print(f"{way.name:40s} x {line['speed']:.2f}  rSum {rsum:.1f} ({gap.mean():+.1f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
