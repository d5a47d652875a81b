"""What each size of a store (`seps index --size`) loses, by a paired bootstrap over the photos.

    python -m benchmarks.quality.sizes --data dev.jsonl --json docs/results/sizes-dev.json

Photos are encoded once, as `seps index` encodes them; each size packs them, and scores what it unpacks. rSum of a
search: with half of the level over the background queries taken off, by pixels and with descriptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import describe
from seps.metrics import ranks, rsum_by_image
from seps.photos.indexing.embedding import packed_columns, stored_levels
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.faster import faster
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.queries import Queries
from seps.retrieval.evaluate.encoding import encode_images
from seps.retrieval.experiments.paired import difference
from seps.retrieval.ranking.bank import background

AT_ONCE = 64


def main() -> None:
    """Print a row per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--features", type=Path, help="file that keeps what the photos are encoded to")
    parser.add_argument("--sizes", nargs="+", help="default: all; the first one is what the others are compared with")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    engine, data = load_engine(options.model), load_jsonl(options.data)
    if options.features and options.features.exists():
        encoded = torch.load(options.features, weights_only=True)
    else:
        encoded = encode_images(faster(engine), data)
        if options.features:
            torch.save(encoded.half(), options.features)
    queries = engine.encode_texts([caption for record in data.records for caption in record.captions])
    texts = [record.dense for record in data.records]
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    sizes = options.sizes or ["patches", *(size for size in engine.traits.sizes if size not in ("patches", "full"))]
    for size in sizes:
        row: dict[str, Any] = {"size": size}
        for name, given in (("pixels", None), ("described", texts)):
            scores, row[f"bytes {name}"] = searched(engine, encoded, given, queries, size)
            i2t, t2i = ranks(scores, data.image_of_caption)
            images = rsum_by_image(i2t, t2i, data.image_of_caption)
            results.append({"name": size, "seed": 0, "by_image": {f"{name}/none": images.tolist()}})
            row[name] = float(images.mean())
            mine = [result for result in results if f"{name}/none" in result["by_image"]]
            if size != sizes[0] and (found := difference(mine, size, sizes[0], f"{name}/none")):
                row |= {f"{name} gain": found.mean, f"{name} error": found.error, f"{name} p": found.p}
        rows.append(row)
        print(*(f"{key} {value:.2f}" if isinstance(value, float) else value for key, value in row.items()), flush=True)
    if options.json:
        facts = {"model": options.model, "photos": len(data.records), "machine": describe(torch.device("cpu"))}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def searched(
    engine: Engine, encoded: Tensor, texts: Sequence[str | None] | None, queries: Queries, size: str
) -> tuple[Tensor, int]:
    """(B, T) scores of a search in a store of this size, and the mean bytes of what it keeps of a picture."""
    layout, scores, kept = engine.layout(size), [], 0
    for start in range(0, len(encoded), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        pictures = engine.pictures(encoded[some].float(), None if texts is None else texts[some], batch_size=8)
        states = engine.keep(pictures, layout).packed(layout.precision)
        kept += sum(len(bytes(value)) for state in states for value in state.values() if value is not None)
        images = packed_columns(states, layout)
        levels = stored_levels(engine, images, layout)
        added = torch.tensor(background(levels, engine.traits.background_weight or 0.0))
        scores.append(engine.score(layout.unpack(images), queries) + added[:, None])
    return torch.cat(scores), kept // len(encoded)


if __name__ == "__main__":
    main()
