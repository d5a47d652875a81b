"""What packing the vectors of dual encoders costs: bytes per picture, and how far rankings change from float32's.

    python -m benchmarks.search.plain_vectors --gallery dev-base.pt train-base.pt --data dev.jsonl [--out FILE.jsonl]
    python -m benchmarks.search.plain_vectors ... --stores 50000 100000 --work DIR

No weights of a CLIP or SigLIP are at hand. The vectors are the mean patches of real photos by `base` (files of
features, `tokens` (B, P + N, C)), the queries the mean words of real captions, and both are mapped to the widths of
published models by one random orthogonal map, which changes no product. `outlier`: all pictures have one value of half
their length in common, as pictures of published CLIP models have, and queries a little of it.

Per width and packing: the part of the float32 ranking's first and ten best that are the first and among the ten best,
the part of queries whose own photo is first and among the ten (R@1, R@10), and the largest and usual error of a cosine.

`--stores` compares stores of so many pictures, packed and of float32: bytes per picture of the table's vectors and of
the vector index, and milliseconds of finding 200 candidates (`Store.nearest`, medians, both in turn). Pictures are
the gallery's again and again, each with noise; no picture has a description.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from seps.retrieval.data import load_data
from seps.retrieval.index.codec import pack, text_vectors, unpack
from seps.retrieval.index.rows import Row, StoreSettings, row_id
from seps.retrieval.index.store import Store
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.table.packed_vectors import pack_vectors, packed_products, vector_codes

Facts = dict[str, Any]
WIDTHS = (512, 768, 1024, 1152)
Array = np.ndarray[Any, np.dtype[Any]]


def widened(images: torch.Tensor, texts: torch.Tensor, width: int, outlier: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Both by one map to `width` values, of length one."""
    chance = torch.Generator().manual_seed(width)
    extra = int(outlier)
    rotation = torch.linalg.qr(torch.randn(width - extra, width - extra, generator=chance))[0][: images.shape[1]]
    images, texts = images @ rotation, texts @ rotation
    if outlier:
        images = torch.cat([images * 0.75**0.5, torch.full((len(images), 1), 0.5)], dim=1)
        texts = torch.cat([texts * 0.99**0.5, torch.full((len(texts), 1), -0.1)], dim=1)
    return F.normalize(images, dim=-1), F.normalize(texts, dim=-1)


def packings(images: torch.Tensor, texts: torch.Tensor) -> Iterator[tuple[str, int, Array]]:
    """Name, bytes per picture, and cosines (T, B)."""
    queries = texts.numpy()
    yield "float16", 2 * images.shape[1], queries @ images.half().float().numpy().T
    for codes in ("int8", "int7"):
        packed = pack_vectors(images.numpy(), codes)  # type: ignore[arg-type]
        name = f"{codes} (default)" if codes == vector_codes(images.shape[1]) else codes
        yield name, packed.shape[1], np.stack([packed_products(packed, query) for query in queries])
    four = [pack(row[None], "int4") for row in images]
    yield "int4", len(four[0]), queries @ np.concatenate([unpack(blob) for blob in four]).T


def rows_of(vectors: Array, settings: StoreSettings, first: int) -> list[Row]:
    """Rows of a store without descriptions."""
    stored: Array = np.zeros((len(vectors), settings.vector_width), np.float32)
    stored[:, : settings.width] = vectors
    if settings.vector_codes is not None:
        stored = pack_vectors(vectors, settings.vector_codes)
    names = [f"{number}.jpg" for number in range(first, first + len(vectors))]
    facts = (1, 1, "0" * 64, 9, 9, b"\xff\xd8")
    return [Row(row_id(n, None), n, None, *facts, v, b"", *[None] * 4) for n, v in zip(names, stored, strict=True)]


def compare_stores(work: Path, images: torch.Tensor, texts: torch.Tensor, count: int) -> Facts:
    """Bytes and times of a packed store and one of floats, of `count` pictures each."""
    width, chance = images.shape[1], np.random.default_rng(0)
    plain = StoreSettings("/x", "clip-b-32", "0" * 32, width, (1, 1), 0, kind="vectors", words_width=384)
    kinds = {"packed": replace(plain, vector_codes=vector_codes(width)), "float32": plain}
    places = {name: work / f"plain-{name}" for name in kinds}
    facts: Facts = {"width": width, "pictures": count}
    stores = {}
    for name, settings in kinds.items():
        shutil.rmtree(places[name], ignore_errors=True)
        stores[name] = Store.create(places[name], settings)
    for first in range(0, count, 10_000):
        some = images[torch.arange(first, min(first + 10_000, count)) % len(images)].numpy()
        some = some + chance.normal(scale=0.3 * width**-0.5, size=some.shape).astype(np.float32)
        some /= np.linalg.norm(some, axis=1, keepdims=True)
        for name, store in stores.items():
            store.put(rows_of(some, kinds[name], first))
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for store in stores.values():
        store.tidy(always=True)
    for query in texts[:40].numpy():
        whole = np.concatenate([query, np.zeros(plain.vector_width - width, np.float32)])
        for name, store in stores.items():
            start = time.perf_counter()
            store.nearest(whole, 200, ["id"])
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, store in stores.items():
        indexes = sum(path.stat().st_size for path in places[name].rglob("_indices/**/*") if path.is_file())
        facts[name] = {
            "vector_bytes": kinds[name].vector_type.list_size * kinds[name].vector_type.value_type.bit_width // 8,
            "all_bytes_per_picture": round(store.disk_bytes() / count),
            "of_it_indexes": round(indexes / count),
            "nearest_ms": round(median(times[name][1:]), 1),
        }
        shutil.rmtree(places[name])
    return facts


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.plain_vectors", description=__doc__)
    parser.add_argument("--gallery", type=Path, nargs="+", required=True, help="features, first of --data's photos")
    parser.add_argument("--data", type=Path, required=True, help="captions as queries")
    parser.add_argument("--model", default="base")
    parser.add_argument("--stores", type=int, nargs="*", default=[], help="pictures of stores to compare")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = from_pretrained(options.model).eval()
    prefix = model.vision.num_prefix_tokens
    parts = []
    for place in options.gallery:
        tokens = torch.load(place, weights_only=True, mmap=True)["tokens"]
        parts += [F.normalize(some[:, prefix:].float().mean(dim=1), dim=-1) for some in tokens.split(256)]
    images = torch.cat(parts)
    captions = [record.captions[0] for record in load_data(str(options.data)).records]
    with torch.no_grad():
        texts = torch.cat([text_vectors(model.encode_texts(captions[i : i + 64])) for i in range(0, len(captions), 64)])
    own = np.arange(len(captions))[:, None]
    lines: list[Facts] = []
    for width in WIDTHS:
        for outlier in (False, True):
            wide, queries = widened(images, texts, width, outlier)
            exact = queries.numpy() @ wide.numpy().T
            best = np.argsort(-exact, axis=1, kind="stable")[:, :10]
            spread = float(exact.std(axis=1).mean())
            for name, size, cosines in [("float32", 4 * width, exact), *packings(wide, queries)]:
                order = np.argsort(-cosines, axis=1, kind="stable")[:, :10]
                same = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(order, best, strict=True)])
                error = np.abs(cosines - exact)
                facts = {
                    "width": width,
                    "outlier": outlier,
                    "packing": name,
                    "bytes": size,
                    "same_first": round(float((order[:, 0] == best[:, 0]).mean()), 4),
                    "same_of_ten": round(float(same), 4),
                    "R@1": round(100 * float((order[:, :1] == own).mean()), 2),
                    "R@10": round(100 * float((order == own).any(axis=1).mean()), 2),
                    "error_rms": float(f"{np.sqrt((error**2).mean()):.2g}"),
                    "error_largest": float(f"{error.max():.2g}"),
                    "spread_of_cosines": round(spread, 4),
                }
                lines.append(facts)
                print(json.dumps(facts), flush=True)
    for width in (WIDTHS[0], WIDTHS[-1]):
        for count in options.stores:
            lines.append(compare_stores(options.work, *widened(images, texts, width, False), count))
            print(json.dumps(lines[-1]), flush=True)
    if options.out:
        facts = {"command": " ".join(sys.argv[1:]), "pictures": len(images), "queries": len(captions)}
        options.out.write_text("\n".join(json.dumps(line) for line in [facts, *lines]) + "\n")


if __name__ == "__main__":
    main()
