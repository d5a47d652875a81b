"""What another combination of the score's parts would give, where photos have descriptions.

    python -m benchmarks.fusion --data dev.jsonl --choose train.jsonl [--model base] [--work DIR]

Parts of the score of a photo and a caption: patches word by word and by their mean; words of the caption found in the
description, words of the description found in the caption, and the cosine of their means. Beside them the best sentence
of the description by itself, and BM25. Weights are chosen by a listwise regression (cross-entropy of the right photo of
a caption and of the right caption of a photo, one weight per part) on `--count` photos of `--choose`, then on one half
of `--data` for the other half, and, as upper bounds, on `--data` itself. Rows "not honest" look at the answers, or at
other queries of the test. b is the level of a photo over the bank of background queries, c that of a caption.

The word-by-word parts are computed for the pairs that matter: of each caption the `NEAR_PHOTOS` photos, and of each
photo the `NEAR_CAPTIONS` captions, that are nearest by the means. For the others a least-squares fit on the means
stands in, so the row "as shipped" is to be compared with `seps eval`. `--features` and `--choose-features` are files of
`torch.save({"tokens": (B, P + N, C)})`, in the order of the data, instead of encoding the photos. `--work` keeps the
parts.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bank import NOTHING
from seps.metrics import recall
from seps.nn.guidance import masked_mean
from seps.retrieval.confidence import STRENGTH
from seps.retrieval.data import RetrievalDataset, load_jsonl
from seps.retrieval.eval.evaluate import encode_images
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.index.bank import BEST, CAPTION_STRENGTH, NEAR, bank_of, caption_levels
from seps.retrieval.index.codec import text_vectors
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

NEAR_PHOTOS, NEAR_CAPTIONS = 40, 60
PARTS = (
    "patches, word by word",
    "patches, mean",
    "words of the caption in the description",
    "words of the description in the caption",
    "description, mean",
    "best sentence of the description",
    "BM25",
)
MODEL_PARTS = 5


@dataclass(frozen=True)
class Parts:
    """Scores of all photos with all captions, by part."""

    scores: Tensor
    """(7, B, T)."""
    levels: Tensor
    """(B, `NEAR`, 5) of each photo with the nearest sentences of the bank."""
    owner: Tensor
    """(T,) photo of each caption."""
    captions: Tensor
    """(T, 2) level of each caption over the bank (`caption_levels`), and the logarithm of its number of words."""
    asked: Tensor
    """(5, B, `ASKED`) the model's parts of the sentences that calibrate confidences, written for other photos."""
    asked_captions: Tensor
    nothing: Tensor
    """(5, B, 60) those of `nothing_fits.txt`, which are about no photo."""
    nothing_captions: Tensor

    def mixed(self, weights: Tensor) -> Tensor:
        """(B, T) weighted sum of the first parts."""
        return torch.einsum("k,kbt->bt", weights, self.scores[: len(weights)])

    def level(self, weights: Tensor) -> Tensor:
        """(B, 1) level over the bank of the weighted sum of the model's parts."""
        return (self.levels @ weights).topk(BEST, dim=1).values.mean(dim=1, keepdim=True)

    def some(self, photos: Tensor) -> Parts:
        """Those of some photos and their captions."""
        place = torch.full((self.scores.shape[1],), -1)
        place[photos] = torch.arange(len(photos))
        captions = (place[self.owner] >= 0).nonzero()[:, 0]
        return replace(
            self,
            scores=self.scores[:, photos][:, :, captions],
            levels=self.levels[photos],
            owner=place[self.owner[captions]],
            captions=self.captions[captions],
            asked=self.asked[:, photos],
            nothing=self.nothing[:, photos],
        )


def shipped(model: RetrievalModel) -> Tensor:
    """(5,) the weights of the model's own score: S = (1 - g) S_patches + g S_words, each with its pooled part."""
    weight = float(cast(float, model.description_weight))
    pooled = float(model.head.score_range) - 2.0
    return torch.tensor([1 - weight, pooled * (1 - weight), weight, weight, pooled * weight])


def model_parts(model: RetrievalModel, images: ImageFeatures, texts: TextFeatures) -> Tensor:
    """(5, T) of one image with some captions."""
    mask = texts.mask[:, : int(texts.mask.sum(dim=1).max())]
    words = texts.words[:, : mask.shape[1]].float()
    dense_mask = cast(Tensor, images.dense_mask)[0]
    dense = cast(Tensor, images.dense)[:, dense_mask].float()
    own = ImageFeatures(images.tokens.float(), dense, dense_mask[None, dense_mask])
    total = model.score(own, TextFeatures(words, mask))[0]
    described = F.normalize(dense[0], dim=-1)
    cosines = F.normalize(words, dim=-1) @ described.T
    forward = (cosines.amax(dim=2) * mask).sum(dim=1) / mask.sum(dim=1)
    backward = cosines.masked_fill(~mask[..., None], -1.0).amax(dim=1).mean(dim=1)
    caption = F.normalize(masked_mean(words, mask), dim=-1)
    said = caption @ F.normalize(described.mean(dim=0), dim=-1)
    seen = caption @ F.normalize(images.tokens[0, model.vision.num_prefix_tokens :].float().mean(dim=0), dim=-1)
    rest = torch.stack([seen, forward, backward, said])
    weights = shipped(model)
    return torch.cat([((total - weights[1:] @ rest) / weights[0])[None], rest])


def sentences_best(model: RetrievalModel, descriptions: list[str], captions: Tensor) -> Tensor:
    """(B, T) the largest cosine of a caption's mean word (T, C) with that of a sentence of the description."""
    found, owner = [], []
    for number, text in enumerate(descriptions):
        own = [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if len(part.split()) > 1] or [text]
        found += own
        owner += [number] * len(own)
    texts = model.encode_texts(found)
    cosines = F.normalize(masked_mean(texts.words, texts.mask), dim=-1) @ captions.T
    start = torch.full((len(descriptions), captions.shape[0]), -1.0)
    return start.scatter_reduce(0, torch.tensor(owner)[:, None].expand_as(cosines), cosines, "amax")


def bm25(descriptions: list[str], captions: list[str], k: float = 1.2, b: float = 0.75) -> Tensor:
    """(B, T) BM25 of each caption in the descriptions, per word of the caption."""

    def words(text: str) -> list[str]:
        found = re.findall(r"[a-z]+", text.lower())
        return [word[:-1] if word.endswith("s") and len(word) > 3 else word for word in found]

    texts, asked = [Counter(words(text)) for text in descriptions], [set(words(text)) for text in captions]
    number = {word: i for i, word in enumerate(sorted(set().union(*texts, *asked)))}
    having = Counter(word for text in texts for word in text)
    usual = sum(map(Counter.total, texts)) / len(texts)
    found, wanted = torch.zeros(len(texts), len(number)), torch.zeros(len(asked), len(number))
    for row, text in zip(found, texts, strict=True):
        for word, count in text.items():
            rare = math.log(1 + (len(texts) - having[word] + 0.5) / (having[word] + 0.5))
            row[number[word]] = rare * count * (k + 1) / (count + k * (1 - b + b * text.total() / usual))
    for row, own in zip(wanted, asked, strict=True):
        row[[number[word] for word in own]] = 1.0
    return found @ (wanted / wanted.sum(dim=1, keepdim=True).clamp_min(1)).T


def all_parts(
    model: RetrievalModel, images: ImageFeatures, texts: TextFeatures, photos: int, captions: int, owner: Tensor | None
) -> Tensor:
    """(5, B, T) the model's parts of all images with all texts, by way of those that are near by the means.

    `photos` and `captions`: how many are near to a text, and to a photo. `owner` (T,): a photo that counts as near.
    """
    means, seen, said = text_vectors(texts), *photo_means(model, images)
    weights = shipped(model)
    by_means = weights[1] * seen @ means.T + weights[4] * said @ means.T
    wanted = torch.zeros(by_means.shape, dtype=torch.bool)
    wanted.scatter_(0, by_means.topk(min(photos, len(seen)), dim=0).indices, True)
    wanted.scatter_(0, (seen @ means.T).topk(min(photos, len(seen)), dim=0).indices, True)
    if captions:
        wanted.scatter_(1, by_means.topk(min(captions, len(means)), dim=1).indices, True)
    if owner is not None:
        wanted[owner, torch.arange(len(owner))] = True
    scores = torch.full((MODEL_PARTS, *by_means.shape), float("nan"))
    for i in range(len(seen)):
        columns = wanted[i].nonzero()[:, 0]
        if len(columns):
            some = TextFeatures(texts.words[columns], texts.mask[columns])
            scores[:, i, columns] = model_parts(model, images.rows(i, i + 1), some)
        if i % 200 == 0:
            print(f"# {i} of {len(seen)} photos, {len(means)} texts", flush=True)
    scores[1], scores[4] = seen @ means.T, said @ means.T
    known = torch.stack([torch.ones_like(scores[1]), scores[1], scores[4]], dim=2)
    for part in (0, 2, 3):
        fit = torch.linalg.lstsq(known[wanted], scores[part][wanted][:, None]).solution[:, 0]
        scores[part] = torch.where(wanted, scores[part], known @ fit)
    return scores


def photo_means(model: RetrievalModel, images: ImageFeatures) -> tuple[Tensor, Tensor]:
    """(B, C) mean patch and mean word of the description, at length one."""
    mask = cast(Tensor, images.dense_mask)
    patches = F.normalize(images.tokens[:, model.vision.num_prefix_tokens :].float().mean(dim=1), dim=-1)
    return patches, F.normalize(masked_mean(F.normalize(cast(Tensor, images.dense).float(), dim=-1), mask), dim=-1)


@torch.no_grad()
def make_parts(model: RetrievalModel, data: RetrievalDataset, tokens: Tensor) -> Parts:
    """All parts of a data set whose photos have descriptions."""
    texts, bank = model.encode_texts(data.captions), bank_of(model)
    images = ImageFeatures(tokens, *model.encode_descriptions(data.dense))
    every, owner = cast(TextFeatures, bank.texts), torch.as_tensor(data.image_of_caption)
    own = all_parts(model, images, texts, NEAR_PHOTOS, NEAR_CAPTIONS, owner)
    seen, said = photo_means(model, images)
    weights = shipped(model)
    near = (bank.vectors @ (weights[1] * seen + weights[4] * said).T).topk(NEAR, dim=0).indices.T
    levels = torch.zeros(len(tokens), NEAR, MODEL_PARTS)
    for i in range(len(tokens)):
        some = TextFeatures(every.words[near[i]], every.mask[near[i]])
        levels[i] = model_parts(model, images.rows(i, i + 1), some).T
    described = [text or "" for text in data.dense]
    more = [sentences_best(model, described, text_vectors(texts)), bm25(described, data.captions)]
    asked = cast(TextFeatures, bank.asked)
    nothing = model.encode_texts(NOTHING.read_text(encoding="utf-8").splitlines())

    def facts(some: TextFeatures) -> Tensor:
        return torch.stack([caption_levels(some, bank), some.lengths.float().log()], dim=1)

    return Parts(
        torch.cat([own, torch.stack(more)]),
        levels,
        owner,
        facts(texts),
        all_parts(model, images, asked, NEAR_PHOTOS, 0, None),
        facts(asked),
        all_parts(model, images, nothing, NEAR_PHOTOS, 0, None),
        facts(nothing),
    )


def chosen(parts: Parts, start: Tensor, steps: int = 20) -> Tensor:
    """Weights of the first parts by listwise regression from `start`; their scale stays that of `start`."""
    weights = start.clone().requires_grad_(True)
    sharpness = torch.tensor(2.5, requires_grad=True)  # log of 1 / temperature
    scores, owner = parts.scores[: len(start)], parts.owner
    mine = F.one_hot(owner, scores.shape[1]).T.bool()
    optimiser = torch.optim.LBFGS([weights, sharpness], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = sharpness.exp() * torch.einsum("k,kbt->bt", weights, scores)
        photo = F.cross_entropy(logits.T, owner)
        # A photo has several right captions: each against the captions of other photos.
        others = logits.masked_fill(mine, float("-inf")).logsumexp(dim=1)[owner]
        right = logits[owner, torch.arange(len(owner))]
        value = photo + (torch.logaddexp(others, right) - right).mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call, arg-type]
    return weights.detach() * (start.abs().sum() / weights.detach().abs().sum())


def best_by_search(parts: Parts, start: Tensor) -> Tensor:
    """Weights that give the largest rSum on this very set, by changing one at a time."""
    weights, best = start.clone(), rsum(parts, start)
    for factor in (1.5, 1.15):
        moved = True
        while moved:
            moved = False
            for i in range(len(weights)):
                for step in (factor, 1 / factor):
                    other = weights.clone()
                    other[i] *= step
                    found = rsum(parts, other)
                    if found > best:
                        weights, best, moved = other, found, True
    return weights


def rsum(parts: Parts, weights: Tensor) -> float:
    """rSum of the weighted sum."""
    return recall(parts.mixed(weights), parts.owner.tolist()).rsum


def report(parts: Parts, own: Tensor, other: Parts | None) -> None:
    """Print the table."""
    owner = parts.owner.tolist()

    def row(name: str, scores: Tensor | float) -> None:
        value = scores if isinstance(scores, float) else recall(scores, owner).rsum
        print(f"| {name} | {value:.1f} |", flush=True)

    print("| score | rSum |\n|---|---|")
    for name, scores in zip(PARTS, parts.scores, strict=True):
        row(f"alone: {name}", scores)
    total = parts.mixed(own)
    row("**as shipped**", total)
    more = torch.cat([own, 0.2 * own[4:5], torch.tensor([0.02])])
    row("+ best sentence of the description", parts.mixed(more[:6]))
    row("+ BM25", total + 0.02 * parts.scores[6])
    for name, start in (("5 parts", own), ("7 parts", more)):
        if other is not None:
            row(f"{name}, weights chosen on training photos", parts.mixed(chosen(other, start)))
        halves, plain = [], []
        order = torch.randperm(parts.scores.shape[1], generator=torch.Generator().manual_seed(0))
        for here, there in ((order[::2], order[1::2]), (order[1::2], order[::2])):
            half = parts.some(there)
            halves.append(rsum(half, chosen(parts.some(here), start)))
            plain.append(rsum(half, own))
        row(f"{name}, chosen on one half, measured on the other: gain over shipped", sum(halves) / 2 - sum(plain) / 2)
        row(f"{name}, regression on this set (not honest)", parts.mixed(chosen(parts, start)))
        row(f"{name}, search for the best rSum on this set (not honest)", rsum(parts, best_by_search(parts, start)))
    pixels, said = own * torch.tensor([1, 1, 0, 0, 0]), own * torch.tensor([0, 0, 1, 1, 1])
    each = [parts.mixed(part) for part in (pixels, said)]
    standard = [(some - some.mean(dim=0)) / some.std(dim=0) for some in each]
    for share in (0.5, 0.6):
        row(f"standardised per query, {share:g} of the description", (1 - share) * standard[0] + share * standard[1])
    for strength in (0.25, 0.5, 0.75):
        row(f"- {strength:g} b", total - strength * parts.level(own))
    for strength in (0.5, 1.0):
        row(f"- {strength:g} b of the pixels alone", total - strength * parts.level(pixels))
        row(f"- {strength:g} b of the description alone", total - strength * parts.level(said))
    for strength in (0.5, 1.0, 1.5):
        row(f"- {strength:g} c", total - strength * parts.captions[:, 0])
    for strength in (0.25, STRENGTH, 0.75):
        corrected = total - strength * parts.level(own) - CAPTION_STRENGTH * parts.captions[:, 0]
        row(f"- {strength:g} b - {CAPTION_STRENGTH:g} c", corrected)
    bounds = []
    for temperature in (0.08, 0.16, 0.3):
        logits = total / temperature
        bounds.append(recall(logits.log_softmax(dim=0) + logits.log_softmax(dim=1), owner).rsum)
    row("dual softmax over the test's own photos and captions (not honest)", max(bounds))


def parts_of(
    name: str, model: RetrievalModel, path: Path, features: Path | None, count: int | None, work: Path | None
) -> Parts:
    """The parts of a data set, or of `count` of its photos; kept in `work`."""
    kept = work / f"fusion-{path.stem}-{Path(name).name}-{count or 'all'}.pt" if work else None
    if kept is not None and kept.is_file():
        return Parts(**torch.load(kept, weights_only=True))
    data = load_jsonl(path)
    rows = range(len(data)) if count is None else sorted(random.Random(0).sample(range(len(data)), count))
    tokens = torch.load(features, weights_only=True)["tokens"] if features else None
    data = data.subset(rows)
    if tokens is None:
        tokens = encode_images(model, data)
    elif len(tokens) != len(rows):
        tokens = tokens[list(rows)]
    parts = make_parts(model, data, tokens)
    if kept is not None:
        torch.save(vars(parts), kept)
    return parts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with captions and a description per photo")
    parser.add_argument("--features", type=Path, help="tokens of its photos, if they are encoded already")
    parser.add_argument("--choose", type=Path, help="JSONL of the photos that weights are chosen on")
    parser.add_argument("--choose-features", type=Path, help="tokens of those")
    parser.add_argument("--count", type=int, default=300, help="how many of those, at random")
    parser.add_argument("--model", default="base", help="'mini', 'base', or a model folder")
    parser.add_argument("--work", type=Path, help="folder to keep the parts in")
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    parts = parts_of(options.model, model, options.data, options.features, None, options.work)
    other = None
    if options.choose is not None:
        other = parts_of(options.model, model, options.choose, options.choose_features, options.count, options.work)
    photos, captions = parts.scores.shape[1:]
    print(f"{options.model} on {options.data.name}: {photos} photos, {captions} captions\n")
    report(parts, shipped(model), other)


if __name__ == "__main__":
    main()
