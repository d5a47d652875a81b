"""How small a picture's state can be: rSum by pixels and with descriptions, bytes, and the time to decode it.

    python -m benchmarks.small_state --data DEV.jsonl --cache FOLDER --out small.jsonl [--only small tiny]

Every way goes through the store's own packing (`packed_states`, `restore`), but `codebook`: product quantisation with
48 bytes per token, the codebooks trained on the pictures' first half. Scores are exact: where a store keeps no more
patches than the network would select, no caption changes an image's tokens, so that all pairs are plain products; they
are compared with the store's scorer on the first captions. Bytes are those that scoring needs of a picture on average:
search vector, tokens, positions, mean and description. CACHE keeps the encoded data set, in float16. A line
also has the difference from the first way that was asked for, with the standard error of a paired bootstrap over the
pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lines import append_line
from benchmarks.token_curve import difference
from seps.method.encoded import Texts
from seps.metrics import recall
from seps.retrieval.config import STATE_SIZES
from seps.retrieval.data import load_data
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.engine.codec import Precision, StoredImages, StoredScorer, pack, restore, unpack
from seps.photos.indexing.embedding import packed_columns, packed_states
from seps.photos.store.rows import Columns, StoreSettings
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

CHECKED = 3
"""Captions whose scores are compared with those of the store's scorer."""
PARTS = ("vector", "tokens", "positions", "mean", "words")


@dataclass(frozen=True)
class Kept:
    """What is kept of a picture: `patches` of them, or a grid of `means` down and across, and words."""

    precision: Precision
    patches: int | None = None
    means: int | None = None
    words: int | None = None
    codebook: bool = False


WAYS = {
    "today": Kept("float16", patches=64),
    "small": Kept(STATE_SIZES["small"].precision, means=STATE_SIZES["small"].means, words=STATE_SIZES["small"].words),
    "tiny": Kept(STATE_SIZES["tiny"].precision, means=STATE_SIZES["tiny"].means, words=STATE_SIZES["tiny"].words),
    "means 4 x 4, float16": Kept("float16", means=4),
    "means 4 x 4, int2, 48 words": Kept("int2", means=4, words=48),
    "means 2 x 2, codebook, 16 words": Kept("float16", means=2, words=16, codebook=True),
    "means 8 x 8, codebook, 64 words": Kept("float16", means=8, words=64, codebook=True),
    "means 4 x 4, int8, 5 words": Kept("int8", means=4, words=5),
    "means 2 x 2, int4, 5 words": Kept("int4", means=2, words=5),
    "64 patches, int8": Kept("int8", patches=64),
}


@dataclass
class Encoded:
    """A data set as the model sees it."""

    images: ImageFeatures
    texts: TextFeatures
    owner: Tensor


def encoded(model: RetrievalModel, name: str, data: str, cache: Path) -> Encoded:
    """The data set, from CACHE/SET-MODEL-encoded.pt where it is there."""
    place = cache / f"{Path(data).stem}-{name}-encoded.pt"
    if not place.exists():
        records = load_data(data)
        with torch.no_grad():
            texts = model.encode_texts(records.captions)
            dense, mask = model.encode_descriptions(records.dense)
            tokens = encode_images(model, records)
        found = {"tokens": tokens.half(), "words": texts.words.half(), "mask": texts.mask}
        found |= {"dense": dense.half(), "dense_mask": mask, "owner": torch.as_tensor(records.image_of_caption)}
        torch.save(found, place)
    found = torch.load(place, weights_only=True)
    images = ImageFeatures(found["tokens"].float(), found["dense"].float(), found["dense_mask"])
    return Encoded(images, TextFeatures(found["words"].float(), found["mask"]), found["owner"])


def settings_of(model: RetrievalModel, kept: Kept) -> StoreSettings:
    grid = model.vision.grid if kept.means is None else (kept.means, kept.means)
    return StoreSettings(
        "/", "", "", model.config.embed_size, grid, model.vision.num_prefix_tokens, kept.precision, kept.patches,
        kept.words, means=kept.means is not None,
    )  # fmt: skip


class Codebook:
    """Product quantisation of directions: PCA to 4 values per byte, 256 centroids each; the length as float16."""

    def __init__(self, rows: Tensor, size: int = 48, rounds: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        unit = F.normalize(rows[torch.randperm(len(rows), generator=generator)[:12_000]], dim=-1)
        values, basis = torch.linalg.eigh(unit.T.double() @ unit.double())
        order = values.argsort(descending=True)[: 4 * size]
        # Dealt out by turns, back and forth, so that every byte gets large and small directions.
        turns = order.reshape(4, size)
        turns[1::2] = turns[1::2].flip(1)
        self.basis = basis[:, turns.T.flatten()].float()
        parts = (unit @ self.basis).reshape(len(unit), size, 4).transpose(0, 1)
        centres = parts[:, torch.randperm(len(unit), generator=generator)[:256]].clone()
        for _ in range(rounds):
            for part, own in zip(parts, centres, strict=True):
                near = (part @ own.T - own.square().sum(dim=1) / 2).argmax(dim=1)
                count = torch.bincount(near, minlength=256)[:, None]
                own.copy_(torch.where(count > 0, torch.zeros_like(own).index_add_(0, near, part) / count, own))
        self.centres, self.bytes = centres, size + 2

    def coded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = (F.normalize(rows, dim=-1) @ self.basis).reshape(len(rows), len(self.centres), 4)
        found = [
            (parts[:, m] @ own.T - own.square().sum(dim=1) / 2).argmax(dim=1) for m, own in enumerate(self.centres)
        ]
        return torch.stack(found, dim=1), rows.norm(dim=-1).half()

    def decoded(self, codes: Tensor, lengths: Tensor) -> Tensor:
        parts = self.centres[torch.arange(len(self.centres)), codes]
        return (parts.flatten(1) @ self.basis.T) * lengths.float()[:, None]

    def there_and_back(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        return torch.cat([self.decoded(*self.coded(part)) for part in flat.split(8192)]).reshape(rows.shape)


def with_codebook(stored: StoredImages) -> tuple[StoredImages, float, Callable[[], object]]:
    """The state through codebooks of its own, bytes per picture without the vector, and what decodes all of it."""
    features = stored.features
    assert features.dense is not None and features.dense_mask is not None and stored.mean is not None
    half = len(features.tokens) // 2
    patches = Codebook(features.tokens[:half].flatten(0, 1))
    words = Codebook(features.dense[:half][features.dense_mask[:half]])
    count = features.tokens.shape[1] + features.dense_mask.sum(dim=1).float().mean()
    codes = [patches.coded(features.tokens.flatten(0, 1)), words.coded(features.dense[features.dense_mask])]
    made = ImageFeatures(patches.there_and_back(features.tokens), features.dense.clone(), features.dense_mask)
    assert made.dense is not None
    made.dense[features.dense_mask] = words.there_and_back(features.dense[features.dense_mask])
    means = torch.from_numpy(np.concatenate([unpack(pack(row[None], "int4")) for row in stored.mean]))
    size = float(count) * patches.bytes + len(pack(stored.mean[:1], "int4"))
    again = lambda: (patches.decoded(*codes[0]), words.decoded(*codes[1]))  # noqa: E731
    return StoredImages(made, None, means), size, again


@torch.no_grad()
def product_scores(tokens_BKC: Sequence[Tensor], texts: TextFeatures) -> Tensor:
    """(B, T) mean of the best token per word and of the best word per token, all of length one (Eq. 5)."""
    lengths = texts.lengths
    order = lengths.argsort(stable=True)
    counts = lengths[order].unique_consecutive(return_counts=True)
    flat = F.normalize(torch.cat([texts.words[i, : lengths[i]] for i in order.tolist()]), dim=-1)
    rows = []
    for tokens in tokens_BKC:
        # Many tokens are mixtures of few: products with an orthonormal basis of them first.
        basis = torch.linalg.svd(tokens, full_matrices=False)
        rank = int((1e-5 * basis.S[0] < basis.S).sum())
        cosines = (flat @ basis.Vh[:rank].T) @ (tokens @ basis.Vh[:rank].T).T
        per_word, start, found = cosines.amax(dim=1), 0, []
        for length, count in zip(*(part.tolist() for part in counts), strict=True):
            stop = start + length * count
            best = cosines[start:stop].reshape(count, length, -1).amax(dim=1).mean(dim=1)
            found.append(per_word[start:stop].reshape(count, length).mean(dim=1) + best)
            start = stop
        rows.append(torch.cat(found))
    return torch.stack(rows)[:, order.argsort()]


@torch.no_grad()
def both_scores(model: RetrievalModel, settings: StoreSettings, stored: StoredImages, texts: TextFeatures) -> Any:
    """(B, T) by pixels, and by descriptions alone."""
    scorer = StoredScorer(model, settings)
    net, side = scorer.net, scorer.side(stored)
    assert net is not None and side.dense_words is not None and side.dense_mask is not None
    caption = torch.stack([words[valid].mean(dim=0) for words, valid in zip(texts.words, texts.mask, strict=True)])
    kept = net.select(side, Texts.of(texts.words[:1], texts.mask[:1]))
    assert bool((kept[0].keep == 1).all()), "a caption selects patches here"
    tokens = net.tokens(side, kept)[0]
    pixels = product_scores(list(tokens), texts) + net.pooled_score(side.pooled, caption)
    words = [row[valid] for row, valid in zip(side.dense_words, side.dense_mask, strict=True)]
    means = torch.stack([row.mean(dim=0) for row in words])
    described = product_scores(words, texts) + net.pooled_score(means, caption)
    few = TextFeatures(texts.words[:CHECKED], texts.mask[:CHECKED])
    weight = net.description_weight
    mixed = pixels + weight * (described - pixels)
    for ours, wanted in ((pixels, stored.without_description()), (mixed, stored)):
        gap = float((ours[:, :CHECKED] - scorer.score(wanted, few)).abs().max())
        assert gap < 1e-4, f"the scores differ by {gap} from the store's"
    return pixels, mixed


def decoding(decode: dict[str, Callable[[], object]], pictures: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds per 1,000 pictures, the median of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in decode}
    for _ in range(rounds):
        for name, work in decode.items():
            start = time.thread_time()
            work()
            times[name].append(1e6 * (time.thread_time() - start) / pictures)
    return {name: statistics.median(found) for name, found in times.items()}


def vectors(data: Encoded, prefix: int, draws: int) -> list[dict[str, Any]]:
    """A stand-in for a dual encoder: mean patch and mean word. Its rSum by the precision of the pictures' vectors."""
    pictures = F.normalize(data.images.tokens[:, prefix:].mean(dim=1), dim=-1)
    words = [words[valid].mean(dim=0) for words, valid in zip(data.texts.words, data.texts.mask, strict=True)]
    texts = F.normalize(torch.stack(words), dim=-1)
    lines, reference = [], pictures @ texts.T
    for precision in ("float32", "float16", "int8", "int4", "int2"):
        scores = torch.from_numpy(unpack(pack(pictures, precision))) @ texts.T
        size = {width: len(pack(torch.zeros(1, width), precision)) for width in (384, 512, 768)}
        change = difference(scores, reference, data.owner, draws) if draws else None
        lines.append(
            {
                "way": f"one vector, {precision}",
                "rsum": recall(scores, data.owner).rsum,
                "change": change,
                "sizes": size,
            }
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="+", default=["vectors", *WAYS, "decoding"], choices=["vectors", *WAYS, "decoding"]
    )
    parser.add_argument("--draws", type=int, default=200, help="of the bootstrap; 0: no differences")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    assert isinstance(model.head, SlimmingHead)
    data = encoded(model, options.model, options.data, options.cache)
    facts = {"model": options.model, "data": Path(options.data).name, "photos": len(data.images.tokens)}

    def write(line: dict[str, Any]) -> None:
        append_line(options.out, {**facts, **line})
        print(json.dumps(line), flush=True)

    if "vectors" in options.only:
        for line in vectors(data, model.vision.num_prefix_tokens, options.draws):
            write(line)
    decode: dict[str, Callable[[], object]] = {}
    reference: tuple[Tensor, Tensor] | None = None
    asked = [name for name in options.only if name in WAYS]
    for name in dict.fromkeys([*asked, *(WAYS if "decoding" in options.only else [])]):
        kept = WAYS[name]
        settings = settings_of(model, kept)
        states = packed_states(model, data.images, settings)
        columns: Columns = packed_columns(states, settings)
        stored, size = restore(columns, settings), 0.0
        for part in PARTS:
            size += sum(0 if row[part] is None else memoryview(row[part]).nbytes for row in states) / len(states)
        decode[name] = lambda columns=columns, settings=settings: restore(columns, settings)  # type: ignore[misc]
        if kept.codebook:
            stored, coded, decode[name] = with_codebook(stored)
            size = 2 * settings.width + coded
        if name not in asked:
            continue
        chosen = stored
        if kept.patches is not None:  # without a description other patches are kept
            plain = packed_states(model, ImageFeatures(data.images.tokens), settings)
            chosen = replace(restore(packed_columns(plain, settings), settings))
            chosen.features.dense, chosen.features.dense_mask = stored.features.dense, stored.features.dense_mask
        pixels, mixed = both_scores(model, settings, chosen, data.texts)
        if kept.patches is not None:
            mixed = both_scores(model, settings, stored, data.texts)[1]
        reference = reference or (pixels, mixed)
        line = {"way": name, "bytes": round(size), "kept": vars(kept)}
        for part, ours, before in (("pixels", pixels, reference[0]), ("described", mixed, reference[1])):
            line[part] = recall(ours, data.owner).rsum
            if options.draws and ours is not before:
                line[f"{part}_change"] = difference(ours, before, data.owner, options.draws)
        write(line)
    if "decoding" in options.only:
        write({"ms_per_1000": decoding(decode, len(data.images.tokens)), "threads": torch.get_num_threads()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
