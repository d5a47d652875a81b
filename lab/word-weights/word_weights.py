"""Do words that carry nothing cost anything? Weights of words in Eq. 5 and in the mean word, at test time alone.

    python -m benchmarks.word_weights --model base --data DEV.jsonl --train TRAIN.jsonl [--features FILE.pt] [--grid 64]

Weights: by how rare a word is in the captions of TRAIN ("idf": ln(images / images with the word), "root": its square
root), or 0 for function words ("stop") and for the tokenizer's marks ("special"). Places: the mean over words in Eq. 5
and its maximum over words ("align"), the mean word of the pooled cosine ("mean"), both, and both for the words of
descriptions as well ("all"). The selection of patches is that of the plain mean word in every row. Each line: rSum by
pixels and with descriptions, the paired difference from plain words with its standard error over photos (the gallery
stays, the asking photos are drawn again), the share of stop words in the score of matching pairs, and how
often the word that adds most is none. `--features` holds the tokens {"tokens": (B, P + N, C)} of the photos, encoded
before; `--grid K` merges the patches into a grid of K means first, for speed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lines import append_line
from seps.metrics import recall
from seps.nn.selection import rank_patches
from seps.retrieval.data import RetrievalDataset, load_data
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.engine.codec import fewer_patches
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.stopwords import is_stop_word


@dataclass
class Words:
    """T texts: features (T, M, C), mask (T, M), token ids (T, M), and by token whether it is a stop word or a mark."""

    words: Tensor
    mask: Tensor
    ids: Tensor
    stop: Tensor
    special: Tensor


def encode(model: RetrievalModel, texts: list[str], limit: int) -> Words:
    features = model.encode_texts(texts, max_words=limit)
    batch = model.text.tokenize(texts)
    ids, mask = batch.ids[:, :limit], batch.mask[:, :limit]
    keep = model.is_word(ids, mask)
    found = torch.zeros(features.mask.shape, dtype=torch.long)
    stop, special = torch.zeros_like(features.mask), torch.zeros_like(features.mask)
    for row in range(len(texts)):
        places = keep[row].nonzero()[:, 0].tolist()
        for column, place in enumerate(places):
            owner = batch.word_of_token[row][place]
            found[row, column] = ids[row, place]
            special[row, column] = owner is None
            stop[row, column] = owner is None or is_stop_word(batch.words[row][owner])
    return Words(features.words, features.mask, found, stop, special)


def token_idf(model: RetrievalModel, train: RetrievalDataset) -> Tensor:
    """(V,) ln(images / images whose captions have the token); a token that none has counts as of half an image."""
    tokenizer = model.text.tokenizer
    counts: Counter[int] = Counter()
    pieces: dict[str, list[int]] = {}
    for record in train.records:
        words = {word for caption in record.captions for word in re.findall(r"\w+|[^\w\s]", caption.lower())}
        for word in words - pieces.keys():
            pieces[word] = tokenizer([word], add_special_tokens=False)["input_ids"][0]
        counts.update({token for word in words for token in pieces[word]})
    idf = torch.full((len(tokenizer),), math.log(2 * len(train.records)))
    for token, count in counts.items():
        idf[token] = math.log(len(train.records) / count)
    return idf.clamp_min(1e-3)


def weights_of(kind: str, texts: Words, idf: Tensor) -> Tensor:
    """(T, M) weights, zero at padding; a text without any weight keeps all its words."""
    valid = texts.mask.float()
    if kind == "plain":
        return valid
    if kind in ("idf", "root"):
        rare = idf[texts.ids] * ~texts.special
        found = valid * (rare if kind == "idf" else rare.sqrt())
    else:
        found = valid * ~(texts.stop if kind == "stop" else texts.special)
    return torch.where(found.sum(dim=1, keepdim=True) > 0, found, valid)


def weighted_mean(words: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("tmc,tm->tc", words, weights) / weights.sum(dim=1, keepdim=True)


def token_cosines(net: object, side: object, texts: Words, unit: Tensor) -> Tensor:
    """A (T, M, K) of one image with all captions: the factored form of Eq. 1-4, selection by the plain mean word."""
    patches, logits = side.patches[0].float(), side.sets[0].logits[0].float()  # type: ignore[attr-defined]
    branch = net.config.branches[0]  # type: ignore[attr-defined]
    caption = F.normalize(weighted_mean(texts.words, texts.mask.float()), dim=-1)
    attention = caption @ F.normalize(patches, dim=-1).T  # (T, N)
    low, high = attention.amin(dim=1, keepdim=True), attention.amax(dim=1, keepdim=True)
    scores = side.sets[0].fixed + branch.guides["caption"] * (attention - low) / (high - low + 1e-8)  # type: ignore[attr-defined]
    count = math.ceil(net.config.sparse_ratio * len(patches))  # type: ignore[attr-defined]
    keep = torch.zeros_like(scores).scatter_(1, rank_patches(scores)[:, :count], 1.0)
    shares = (logits - logits.amax(dim=0)).exp()  # (N, Q); the norm below takes the common factor off again
    dropped = (1 - keep) * (scores - scores.amax(dim=1, keepdim=True)).exp()  # (T, N) of the extra token
    products, gram = unit @ patches.T, patches @ patches.T  # (W, N), (N, N)
    owner = texts.mask.nonzero()[:, 0]
    parts = [(products * keep[owner]) @ shares, (products * dropped[owner]).sum(dim=1, keepdim=True)]
    if count == len(patches):  # the caption changes nothing
        lengths = list(((gram @ shares) * shares).sum(dim=0)[:, None].expand(-1, len(keep)))
    else:
        lengths = [((weighted @ gram) * weighted).sum(dim=1) for weighted in (keep * share for share in shares.T)]
    lengths.append(((dropped @ gram) * dropped).sum(dim=1))
    cosines = torch.cat(parts, dim=1) / torch.stack(lengths, dim=1).clamp_min(1e-24).sqrt()[owner]
    prefix = F.normalize(side.prefix[0].float(), dim=-1)  # type: ignore[attr-defined]
    return torch.cat([unit @ prefix.T, cosines], dim=1)  # (W, K) of valid words


@dataclass
class Parts:
    """What the rows are made of: word -> token maxima (B, W), token -> word means (B, T) by mask of words."""

    rows: Tensor
    columns: dict[tuple[str, str], Tensor]
    credit: dict[tuple[str, str], Tensor]
    """(W,) what each word of a caption adds to the second direction for its own image."""


def empty(images: int, texts: Words, masks: dict[str, Tensor], others: tuple[str, ...]) -> Parts:
    count = int(texts.mask.sum())
    keys = [(mask, other) for mask in masks for other in others]
    return Parts(
        torch.zeros(images, count),
        {key: torch.zeros(images, len(texts.words)) for key in keys},
        {key: torch.zeros(count) for key in keys},
    )


def add(
    parts: Parts,
    image: int,
    cosines: Tensor,
    texts: Words,
    masks: dict[str, Tensor],
    others: dict[str, Tensor],
    own: Tensor,
) -> None:
    """Fill in one image; `masks` (T, M) are words that may win, `others` weights of the K tokens."""
    parts.rows[image] = cosines.amax(dim=1)
    padded = torch.full((*texts.mask.shape, cosines.shape[1]), -2.0)
    padded[texts.mask] = cosines
    for name, mask in masks.items():
        best = padded.masked_fill(~mask[:, :, None], -2.0).max(dim=1)  # (T, K)
        for other, weights in others.items():
            share = weights / weights.sum()
            parts.columns[name, other][image] = best.values @ share
            gained = torch.zeros(len(own), texts.mask.shape[1])
            gained.scatter_add_(1, best.indices[own], best.values[own] * share)
            whole = torch.zeros(texts.mask.shape)
            whole[own] = gained
            parts.credit[name, other] += whole[texts.mask] * texts_of(texts, own)


def texts_of(texts: Words, own: Tensor) -> Tensor:
    chosen = torch.zeros(len(texts.mask), dtype=torch.bool)
    chosen[own] = True
    return chosen[texts.mask.nonzero()[:, 0]].float()


def photo_sums(scores: Tensor, owner: Tensor) -> Tensor:
    """(B,) what each photo adds to rSum, in percent of one photo: their mean is rSum."""
    images = len(scores)
    truth = scores[owner, torch.arange(len(owner))]
    rank = (scores > truth).sum(dim=0)  # of the photo, asked by each caption
    hits = torch.stack([(rank < k).float() for k in (1, 5, 10)]).sum(dim=0)
    counts = torch.bincount(owner, minlength=images).float()
    # The mean over captions weighs photos by their captions: as many each, or nearly, in these sets.
    by_caption = torch.zeros(images).index_add_(0, owner, hits) * images / len(owner)
    own = owner[None, :] == torch.arange(images)[:, None]
    best = scores.masked_fill(~own, float("-inf")).amax(dim=1, keepdim=True)
    place = (scores > best).sum(dim=1)
    by_image = torch.stack([(place < k).float() for k in (1, 5, 10)]).sum(dim=0)
    return 100 * (by_caption + torch.where(counts > 0, by_image, 0.0))


def paired(ours: Tensor, reference: Tensor) -> tuple[float, float]:
    """The mean difference over photos, and its standard error: the limit of a paired bootstrap over them."""
    gap = ours - reference
    return float(gap.mean()), float(gap.std() / len(gap) ** 0.5)


ROWS = {
    "plain": ("plain", "plain", "plain"),
    "special, both": ("special", "special", "plain"),
    "stop, align": ("stop", "plain", "plain"),
    "stop, mean": ("plain", "stop", "plain"),
    "stop, both": ("stop", "stop", "plain"),
    "stop, all": ("stop", "stop", "stop"),
    "root, both": ("root", "root", "plain"),
    "idf, align": ("idf", "plain", "plain"),
    "idf, mean": ("plain", "idf", "plain"),
    "idf, both": ("idf", "idf", "plain"),
    "idf, all": ("idf", "idf", "idf"),
}
"""By name the weights in Eq. 5, in the mean word, and of the words of descriptions."""


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--photos", type=int)
    parser.add_argument("--grid", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    assert isinstance(model.head, SlimmingHead)
    data = load_data(options.data)
    records = data.records[: options.photos]
    tokens = torch.load(options.features)["tokens"].float() if options.features else encode_images(model, data)
    tokens = tokens[: len(records)]
    captions = [caption for record in records for caption in record.captions]
    owner = torch.tensor([row for row, record in enumerate(records) for _ in record.captions])
    texts = encode(model, captions, model.config.max_words)
    described = encode(model, [str(record.dense) for record in records], model.config.max_dense_words)
    idf = token_idf(model, load_data(options.train))
    net, prefix = model.head.net, model.vision.num_prefix_tokens
    mean = F.normalize(tokens[:, prefix:].mean(dim=1), dim=-1)
    if options.grid:
        rows, columns = model.vision.grid
        side = int(options.grid**0.5)
        shaped = tokens[:, prefix:].transpose(1, 2).reshape(len(tokens), -1, rows, columns)
        merged = F.adaptive_avg_pool2d(shaped, (side, side)).flatten(2).transpose(1, 2)
        tokens, net = torch.cat([tokens[:, :prefix], merged], dim=1), fewer_patches(net, options.grid)
    unit = F.normalize(texts.words, dim=-1)[texts.mask]  # (W, C)
    masks = {
        "plain": texts.mask,
        "stop": weights_of("stop", texts, idf) > 0,
        "special": weights_of("special", texts, idf) > 0,
    }
    dense_kinds = ("plain", "stop", "idf")
    dense_weights = {kind: weights_of(kind, described, idf) for kind in dense_kinds}
    pixels, words = empty(len(tokens), texts, masks, ("plain",)), empty(len(tokens), texts, masks, dense_kinds)
    for image in range(len(tokens)):
        own = (owner == image).nonzero()[:, 0]
        state = net.encode_images(tokens[image : image + 1])
        cosines = token_cosines(net, state, texts, unit)
        add(pixels, image, cosines, texts, masks, {"plain": torch.ones(cosines.shape[1])}, own)
        valid = described.mask[image]
        dense = F.normalize(described.words[image, valid], dim=-1)
        others = {kind: dense_weights[kind][image, valid] for kind in dense_kinds}
        add(words, image, unit @ dense.T, texts, masks, others, own)
    g, pooled = float(net.description_weight), net.config.pooled
    text_of_word = texts.mask.nonzero()[:, 0]
    reference: dict[str, Tensor] = {}
    for row, (align, average, other) in ROWS.items():
        weights = weights_of(align, texts, idf)
        share = (weights / weights.sum(dim=1, keepdim=True))[texts.mask]  # (W,)
        mask = {"idf": "special", "root": "special"}.get(align, align)
        caption_weights = weights_of(average, texts, idf)
        summed = torch.einsum("tmc,tm->tc", texts.words, caption_weights)
        caption = F.normalize(summed, dim=-1)
        length = summed.norm(dim=-1)
        dense_means = weighted_mean(F.normalize(described.words, dim=-1), dense_weights[other])
        scores, credits = [], []
        for part, vectors, key in ((pixels, mean, "plain"), (words, F.normalize(dense_means, dim=-1), other)):
            aligned = torch.zeros(len(tokens), len(captions)).index_add_(1, text_of_word, part.rows * share)
            scores.append(aligned + part.columns[mask, key] + pooled * vectors @ caption.T)
            own_word = (texts.words * vectors[owner][:, None]).sum(dim=-1) * caption_weights / length[:, None]
            rows_of = part.rows[owner[text_of_word], torch.arange(len(share))] * share
            credits.append(rows_of + part.credit[mask, key] + pooled * own_word[texts.mask])
        found = {"pixels": scores[0], "described": (1 - g) * scores[0] + g * scores[1]}
        credit = {"pixels": credits[0], "described": (1 - g) * credits[0] + g * credits[1]}
        line: dict[str, object] = {
            "model": options.model,
            "data": Path(options.data).stem,
            "photos": len(records),
            "patches": tokens.shape[1] - prefix,
            "row": row,
        }
        for name, values in found.items():
            sums = photo_sums(values, owner)
            reference.setdefault(name, sums)
            adds = torch.zeros(texts.mask.shape)
            adds[texts.mask] = credit[name]
            leads = adds.masked_fill(~texts.mask, -9.0).argmax(dim=1, keepdim=True)
            total = values[owner, torch.arange(len(owner))]
            assert float((adds.sum(dim=1) - total).abs().max()) < 1e-3, "the words' parts do not sum to the score"
            line[name] = {
                "rsum": recall(values, owner).rsum,
                "change": paired(sums, reference[name]),
                "stop_share": float((adds * texts.stop).sum() / adds.sum()),
                "content_leads": float((~texts.stop.gather(1, leads)).float().mean()),
            }
        append_line(options.out, line)
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
