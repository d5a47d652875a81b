"""Index and search, measured on real photos, and on a large gallery made from their features.

    python -m benchmarks.search.gallery FOLDER --work DIR [--size small] [--large 100000] [--out FILE.json]

FOLDER holds pictures (or shards) and a JSONL whose captions are the queries. Four parts, each printed as it is done:

- index: images a second, how busy the cores are, and where the processor time goes;
- states: what each smaller state costs, as the overlap of the exact ten best with those of float32;
- search: milliseconds of every stage, recall of the ten best against `--exact`;
- large: the same photos again and again, each copy with noise of its own on every patch and word, and a shift of all
  of them together, so that its vector moves. It is built as `seps index` builds it, thumbnails left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from seps.images.sources import row_id
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.maintenance import status
from seps.photos.search.query import CANDIDATES
from seps.photos.search.results import SHOWN
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from seps.retrieval.config import SIZES
from seps.retrieval.data.lines import json_lines
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.engine.queries import Queries
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained
from seps.threads import computing_threads

Facts = dict[str, Any]
TEN = 10
COUNTS = (10, 25, 50, 100, 200, 400, 800)
STATES = tuple(SIZES)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.gallery", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="scratch folder; its stores are removed again")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--size", default="full", choices=tuple(SIZES))
    parser.add_argument("--large", type=int, default=0, metavar="IMAGES", help="size of the large gallery; 0: none")
    parser.add_argument("--noise", type=float, default=0.5, help="on each patch and word, in standard deviations")
    parser.add_argument("--shift", type=float, default=0.5, help="on all patches, or words, of a copy together")
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--exact", type=int, default=2, help="queries on which scoring everything is timed at large")
    parser.add_argument("--states", action="store_true", help="compare the sizes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = from_pretrained(options.model)
    captions = [
        str(line["captions"][0]) for file in sorted(options.folder.glob("*.jsonl")) for _, line in json_lines(file)
    ]
    queries = captions[:: max(1, len(captions) // options.queries)][: options.queries]
    report: Facts = {"cores": os.cpu_count(), "queries": len(queries)}
    small = options.work / "small"
    shutil.rmtree(small, ignore_errors=True)

    def tell(name: str, facts: Facts) -> None:
        report[name] = facts
        print(name, json.dumps(facts, indent=1), flush=True)

    try:
        first = "full" if options.states else options.size
        tell("index", index_facts(options.folder, small, model, options.model, first))
        if options.states:
            tell("states", state_facts(Store.open(small), options.work / "state", model, queries))
        searcher = Searcher(small, model)
        tell("search", {**stage_facts(searcher, queries), **recall_facts(searcher, queries)})
        if options.large:
            large = options.work / "large"
            tell("build", enlarge(searcher, large, options.large, options.noise, options.shift))
            searcher = Searcher(large, model)
            tell("large", {**stage_facts(searcher, queries), **recall_facts(searcher, queries)})
            tell("exact", exact_facts(searcher, queries[: options.exact], report["large"]["total"]))
    finally:
        for name in ("small", "state", "large"):
            shutil.rmtree(options.work / name, ignore_errors=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


class Demand:
    """How much processor time this process's threads used or waited for: what they would use on a quiet machine."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Demand:
        self._look()
        self._before, self._start = sum(self._seen.values()), time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.cores = (sum(self._seen.values()) - self._before) / 1e9 / (time.monotonic() - self._start)

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            self._look()

    def _look(self) -> None:
        for task in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                running, waiting, _ = map(int, task.read_text().split())
                self._seen[task.parent.name] = running + waiting


def index_facts(folder: Path, place: Path, model: Any, name: str, size: str) -> Facts:
    """Index once. Shares are of the processor time; `busy` is that time over wall time and cores.

    `wanted` counts the time that threads waited for a core as well, which others had.
    """
    with Demand() as demand:
        done = index_folder(folder, place, model, name, options=IndexOptions(size=size))
    spent = done.decoding + done.encoding + done.own
    held = status(Store.open(place))
    return {
        "images": done.new,
        "seconds": round(done.seconds, 1),
        "images_per_second": round(done.new / done.seconds, 1),
        "busy": round(spent / done.seconds / (os.cpu_count() or 1), 3),
        "wanted": round(demand.cores / (os.cpu_count() or 1), 3),
        "decoding": round(done.decoding / spent, 3),
        "encoding": round(done.encoding / spent, 3),
        "own": round(done.own / spent, 3),
        **disk(held),
    }


def disk(held: Facts) -> Facts:
    """Bytes of an image, thumbnail aside."""
    return {
        "size": held["size"],
        "patches": held["patches"],
        "bytes_without_thumbnail": held["disk_bytes_per_image"] - held["thumbnail_bytes_per_image"],
    }


def stage_facts(searcher: Searcher, queries: Sequence[str]) -> Facts:
    """Median milliseconds of each stage with the default candidates; the first query warms up.

    `rerank_processor` is processor time of all cores: beside it, `rerank` tells how busy the machine was otherwise.
    """
    times: dict[str, list[float]] = {name: [] for name in ("text", "nearest", "fetch", "rerank", "total")}
    busy: list[float] = []
    for query in queries:
        marks = [time.perf_counter()]
        words = searcher.encode(query)
        part = searcher.part_of_query(words)
        vector = part.vector
        marks.append(time.perf_counter())
        searcher.store.nearest(vector, CANDIDATES, ["id"])
        marks.append(time.perf_counter())
        table = searcher.store.nearest(vector, CANDIDATES, [*SHOWN, *searcher.columns])
        marks.append(time.perf_counter())
        spent = time.process_time()
        list(searcher.scored(table, part))
        busy.append((time.process_time() - spent) * 1e3)
        marks.append(time.perf_counter())
        searcher.search(query, TEN)
        marks.append(time.perf_counter())
        text, nearest, both, rerank, total = np.diff(marks) * 1e3
        for name, value in zip(times, (text, nearest, both - nearest, rerank, total), strict=True):
            times[name].append(float(value))
    times["rerank_processor"] = busy
    return {name: round(median(values[1:]), 1) for name, values in times.items()}


def recall_facts(searcher: Searcher, queries: Sequence[str]) -> Facts:
    """Part of the exact ten best among so many candidates, the mean over the queries."""
    best = exact_best(searcher, queries)
    found: dict[int, list[float]] = {count: [] for count in sorted({*COUNTS, CANDIDATES})}
    for query, wanted in zip(queries, best, strict=True):
        vector = searcher.part_of_text(query).vector
        ids = searcher.store.nearest(vector, max(found), ["id"]).values("id")
        for count, values in found.items():
            values.append(len(wanted & set(ids[:count])) / TEN)
    return {"default_candidates": CANDIDATES, "recall": {n: round(float(np.mean(v)), 4) for n, v in found.items()}}


def exact_best(searcher: Searcher, queries: Sequence[str]) -> list[set[str]]:
    """Ids of the exact ten best of each query: every image is scored, with all queries at once."""
    texts = searcher.engine.encode_texts(list(queries))
    scores, names = [], []
    for ids, part in _scored(searcher, texts):
        names += ids
        scores.append(part)
    order = np.argsort(-np.concatenate(scores), axis=0, kind="stable")[:TEN]
    return [{names[row] for row in column} for column in order.T]


def _scored(searcher: Searcher, texts: Queries) -> Iterator[tuple[list[str], Any]]:
    pool = computing_threads(os.cpu_count() or 1, "exact")

    def work(batch: Any) -> tuple[list[str], Any]:
        return batch.values("id"), searcher.engine.score(searcher.pictures(batch), texts).numpy()

    waiting = []
    for batch in searcher.store.scan(["id", *searcher.columns], batch_size=64):
        waiting.append(pool.submit(work, batch))
        if len(waiting) > 8:
            yield waiting.pop(0).result()
    for job in waiting:
        yield job.result()
    pool.shutdown()


def exact_facts(searcher: Searcher, queries: Sequence[str], two_stage: float) -> Facts:
    """Milliseconds of scoring everything for one query, and how many times longer that is."""
    times = []
    for query in queries:
        start = time.perf_counter()
        searcher.search(query, TEN, exact=True)
        times.append((time.perf_counter() - start) * 1e3)
    return {
        "milliseconds": round(median(times)),
        "queries": len(times),
        "times_two_stage": round(median(times) / two_stage),
    }


def state_facts(store: Store, place: Path, model: Any, queries: Sequence[str]) -> Facts:
    """Bytes of smaller states, and the overlap of their exact ten best with those of the store given, of size full."""
    wanted = exact_best(Searcher(store, model), queries)
    facts = {}
    engine = engine_of(model)
    for size in STATES:
        shutil.rmtree(place, ignore_errors=True)
        layout = engine.layout(size)
        small = Store.create(place, replace(store.settings, layout=layout))
        for rows, features in _rows(store):
            states = engine.keep(features, layout).packed(layout.precision)
            small.put([replace(row, **state) for row, state in zip(rows, states, strict=True)])
        small.tidy(always=True)
        best = exact_best(Searcher(small, model), queries)
        overlap = float(np.mean([len(a & b) / TEN for a, b in zip(best, wanted, strict=True)]))
        facts[size] = {
            "top10_overlap": round(overlap, 4),
            "bytes_without_thumbnail": disk(status(small))["bytes_without_thumbnail"],
        }
    return facts


def _rows(store: Store, size: int = 128) -> Iterator[tuple[list[Row], Any]]:
    """Rows and their features, some at a time."""
    ids = sorted(store.known())
    for start in range(0, len(ids), size):
        rows = store.rows(ids[start : start + size])
        images = store.select(list(rows), ["id", *store.settings.layout.columns])
        yield [rows[identity] for identity in images.values("id")], store.settings.layout.unpack(images)


def enlarge(searcher: Searcher, place: Path, count: int, noise: float, shift: float) -> Facts:
    """Fill a store with noisy copies of the rows of a small one, and index it as `seps index` would."""
    shutil.rmtree(place, ignore_errors=True)
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations
    large = Store.create(place, searcher.store.settings)
    originals = list(_rows(searcher.store))
    chance = torch.Generator().manual_seed(0)
    pool = torch.randn(2**24, generator=chance)

    def some(shape: tuple[int, ...]) -> torch.Tensor:
        size = int(np.prod(shape))
        offset = int(torch.randint(len(pool) - size, (1,), generator=chance))
        return pool[offset : offset + size].reshape(shape)

    def noisy(values: torch.Tensor) -> torch.Tensor:
        together, each = some((len(values), 1, values.shape[-1])), some(tuple(values.shape))
        return values + values.std() * (shift * together + noise * each)

    written = copy = 0
    pending: list[Row] = []
    while written < count:
        for rows, pictures in originals:
            images = pictures.features
            features = ImageFeatures(
                noisy(images.tokens), None if images.dense is None else noisy(images.dense), images.dense_mask
            )
            layout = large.settings.layout
            noised = PatchPictures(features, layout.num_prefix_tokens)
            states = searcher.engine.keep(noised, layout).packed(layout.precision)
            for row, state in list(zip(rows, states, strict=True))[: count - written]:
                path = f"{copy}/{row.path}"
                facts: Facts = {"id": row_id(path, row.member), "path": path, "thumbnail": b"\xff\xd8"}
                pending.append(replace(row, **facts, **state))
                written += 1
            if len(pending) >= 2000 or written >= count:
                large.put(pending)
                pending = []
            if written >= count:
                break
        copy += 1
    filled = time.perf_counter()
    torch.set_num_threads(threads)
    large.tidy()
    return {
        "images": len(large),
        "noise": noise,
        "shift": shift,
        "approximate_index": large.indexed(),
        "fill_seconds": round(filled - start),
        "tidy_seconds": round(time.perf_counter() - filled),
        **disk(status(large)),
    }


if __name__ == "__main__":
    main()
