"""Why slim? rSum against the tokens that are kept of a picture, by the way they are chosen or merged.

    python benchmarks/token_curve.py --model base --data DEV.jsonl --photos 400 --out curve.jsonl

The first PHOTOS of the data are the gallery, their captions the queries. Ways to keep K of N patches at indexing time:
the model's own score of a patch without a caption (guided), with the picture's description (described), as a store does
without a description (stored: half of them guided, half spread over the rest), at random, a grid of means, k-means,
and merging the most similar patches step by step (ToMe). Scoring is that of a store: text-guided selection among what
was kept, and the mean of all patches. Each line: way, K, rSum by pixels and with descriptions, its difference from all
patches with the standard error of a paired bootstrap over the pictures, bytes, and time of a query.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lines import append_line
from seps.method.encoded import Texts
from seps.encoders.vit.pruning import Merging
from seps.metrics import recall
from seps.nn.selection import rank_patches
from seps.retrieval.data import load_data
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures, SlimmingHead
from seps.retrieval.engine.codec import fewer_patches, fixed_patch_scores, pack, patches_to_keep
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.scoring import score_matrix

Way = Callable[[RetrievalModel, ImageFeatures, int], Tensor]
"""Patches (B, K, C) out of the images' (B, N, C)."""


def patches_of(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    return images.tokens[:, model.vision.num_prefix_tokens :]


def chosen(patches: Tensor, places: Tensor) -> Tensor:
    return patches.gather(1, places[:, :, None].expand(-1, -1, patches.shape[2]))


def guided(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    best = rank_patches(fixed_patch_scores(model, ImageFeatures(images.tokens)))[:, :count].sort(dim=1).values
    return chosen(patches_of(model, images), best)


def described(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    best = rank_patches(fixed_patch_scores(model, images))[:, :count].sort(dim=1).values
    return chosen(patches_of(model, images), best)


def stored(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    places = patches_to_keep(model, ImageFeatures(images.tokens), count)
    return chosen(patches_of(model, images), places)


def at_random(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    patches = patches_of(model, images)
    draws = torch.rand(patches.shape[:2], generator=torch.Generator().manual_seed(0))
    return chosen(patches, draws.to(patches.device).argsort(dim=1)[:, :count].sort(dim=1).values)


def grid(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    patches, (rows, columns) = patches_of(model, images), model.vision.grid
    height = 2 ** (count.bit_length() // 2 - (count.bit_length() % 2 == 0))
    shaped = patches.transpose(1, 2).reshape(len(patches), -1, rows, columns)
    return F.adaptive_avg_pool2d(shaped, (height, count // height)).flatten(2).transpose(1, 2)


def k_means(model: RetrievalModel, images: ImageFeatures, count: int, rounds: int = 10) -> Tensor:
    patches = patches_of(model, images)
    unit = F.normalize(patches, dim=-1)
    centres = unit[:, torch.linspace(0, patches.shape[1] - 1, count).long()]
    for _ in range(rounds):
        owner = F.one_hot((unit @ centres.transpose(1, 2)).argmax(dim=2), count).to(unit.dtype)
        centres = F.normalize(owner.transpose(1, 2) @ unit + 1e-6 * centres, dim=-1)
    sizes = owner.sum(dim=1).clamp_min(1)
    means = owner.transpose(1, 2) @ patches / sizes[:, :, None]
    return torch.where((owner.sum(dim=1) > 0)[:, :, None], means, centres)


def merged(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    tokens = patches_of(model, images)
    merging = Merging(tokens, 0)
    while tokens.shape[1] > count:
        tokens = merging.merge(tokens, tokens[:, None], count)
    return tokens


WAYS: dict[str, Way] = {
    "guided": guided,
    "described": described,
    "stored": stored,
    "random": at_random,
    "grid": grid,
    "k-means": k_means,
    "merged": merged,
}


@torch.no_grad()
def scores(model: RetrievalModel, kept: Tensor, images: ImageFeatures, texts: object) -> tuple[Tensor, float]:
    """Similarities by pixels, and the milliseconds one query takes per 1,000 pictures."""
    assert isinstance(model.head, SlimmingHead)
    net = model.head.net
    if kept.shape[1] < model.vision.num_patches:
        net = fewer_patches(net, kept.shape[1])
    tokens = torch.cat([images.tokens[:, : model.vision.num_prefix_tokens], kept], dim=1)
    mean = patches_of(model, images).mean(dim=1)
    side = replace(net.encode_images(tokens), pooled=F.normalize(mean, dim=-1))
    words, lengths = texts.words, texts.lengths  # type: ignore[attr-defined]
    times = []
    for row in range(3):
        start = time.perf_counter()
        net.score(side, Texts.of(words[row : row + 1, : int(lengths[row])]))
        times.append(time.perf_counter() - start)
    similarity = score_matrix(net, side, words, lengths)
    assert isinstance(similarity, Tensor)
    return similarity, 1e6 * min(times) / len(kept)


def difference(ours: Tensor, reference: Tensor, owner: Tensor, draws: int = 200) -> tuple[float, float]:
    """rSum of `ours` less that of `reference`, and its standard error over pictures drawn again with replacement."""
    generator = torch.Generator().manual_seed(0)
    found = []
    places = [(owner == image).nonzero().flatten() for image in range(len(ours))]
    counts = torch.tensor([len(place) for place in places], device=ours.device)
    for _ in range(draws):
        # A picture counts once: two copies of it would be each other's wrong answers.
        drawn = torch.randint(len(ours), (len(ours),), generator=generator).unique().to(ours.device)
        columns = torch.cat([places[image] for image in drawn.tolist()])
        numbers = torch.arange(len(drawn), device=ours.device).repeat_interleave(counts[drawn])
        pair = [recall(part[drawn][:, columns], numbers).rsum for part in (ours, reference)]
        found.append(pair[0] - pair[1])
    return recall(ours, owner).rsum - recall(reference, owner).rsum, float(torch.tensor(found).std())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--photos", type=int, default=400)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 64, 32, 16, 8, 4])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = from_pretrained(options.model, device=options.device)
    data = load_data(options.data)
    data = replace(data, records=data.records[: options.photos])
    owner = torch.as_tensor(data.image_of_caption, device=options.device)
    texts = model.encode_texts(data.captions)
    with torch.no_grad():
        images = ImageFeatures(encode_images(model, data), *model.encode_descriptions(data.dense))
        weight, net = model.description_weight or 0.0, model.head.net  # type: ignore[union-attr]
        everything, per_query = scores(model, patches_of(model, images), images, texts)
        # The description's part, from a score whose weight is all its own.
        trust = net.trust.data.clone()  # type: ignore[union-attr]
        net.trust.data.fill_(30.0)  # type: ignore[union-attr]
        few = replace(images, tokens=images.tokens[:, : model.vision.num_prefix_tokens + 60])
        words = model.score(few, texts)
        net.trust.data.copy_(trust)  # type: ignore[union-attr]
    mean = F.normalize(patches_of(model, images).mean(dim=1), dim=-1)
    caption = (texts.words * texts.mask[:, :, None]).sum(dim=1) / texts.mask.sum(dim=1, keepdim=True)
    # On the scale of the whole score, so that it mixes with the description's part alike.
    pooled = model.head.score_range * (mean @ F.normalize(caption, dim=-1).T)
    prefix = model.vision.num_prefix_tokens

    def write(way: str, count: int, similarity: Tensor, reference: Tensor, milliseconds: float) -> None:
        fused, whole = (1 - weight) * similarity + weight * words, (1 - weight) * reference + weight * words
        change, error = difference(similarity, reference, owner)
        fused_change, fused_error = difference(fused, whole, owner)
        size = len(pack(images.tokens[0, : prefix + count], "int8")) if count else 2 * images.tokens.shape[2]
        line = {
            "model": options.model,
            "data": Path(options.data).name,
            "photos": len(data.records),
            "way": way,
            "tokens": count,
            "rsum": recall(similarity, owner).rsum,
            "change": [change, error],
            "rsum_described": recall(fused, owner).rsum,
            "change_described": [fused_change, fused_error],
            "bytes": size,
            "ms_per_1000": milliseconds,
        }
        append_line(options.out, line)
        print(
            f"{way:10s} {count:4d}  {line['rsum']:.1f} ({change:+.1f} +- {error:.1f})  {fused_change:+.1f}", flush=True
        )

    write("all", model.vision.num_patches, everything, everything, per_query)
    write("one vector", 0, pooled, everything, 0.0)
    for count in sorted(options.tokens, reverse=True):
        for way in options.ways:
            similarity, per_query = scores(model, WAYS[way](model, images, count), images, texts)
            write(way, count, similarity, everything, per_query)
    return 0


if __name__ == "__main__":
    sys.exit(main())
