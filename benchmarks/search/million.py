"""A million pictures: built, indexed and searched by the store's own code, on features made of real photos'.

    python -m benchmarks.search.million --data dev.jsonl --work DIR [--count 1000000] [--out FILE.json]

`synthetic_store.py` says how a synthetic picture is made of two real ones. Each part prints one line of JSON:

- build: seconds of making rows, of writing them (`Store.put`) and of `Store.tidy`; bytes per picture;
- search: the whole query by `Searcher.search` on two threads, and its stages, with the load of the machine;
- recall: the part of the exact ten best (every picture scored, for `--exact` queries) that a search finds, by number of
  candidates, by share of the partitions that are probed, and with candidates chosen by their vectors alone;
- filters, names, thumbnails: pictures of one folder or since a date, a name in descriptions, one thumbnail by its id;
- server: `seps serve` on the store: its memory when it starts, and after rounds of queries and thumbnails;
- growth: pictures that come later: how long they take, how long a search takes before they are in the vector index.

The features of the photos (`tokens` (B, P + N, C)) come from FILE.pt, or are computed. Needs about 13 GB in DIR at a
million; what it wrote is removed unless `--keep`. `--measure` measures a store that was kept.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote, urlsplit

import torch

from benchmarks.search.serving import resident
from benchmarks.search.synthetic_store import THUMBNAIL, Synthetic, exhaustive, fill, name_of, originals, store_settings
from seps.images.sources import row_id
from seps.photos.search.query import CANDIDATES
from seps.photos.search.results import SHOWN
from seps.photos.search.searcher import Searcher
from seps.photos.store.filters import Filters
from seps.photos.store.lance import vector_index
from seps.photos.store.store import Store
from seps.photos.store.tables import Columns, pool
from seps.retrieval.config import SIZES
from seps.retrieval.data import load_data
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking.terms import matches_of

Facts = dict[str, Any]
TEN = 10
COUNTS = (50, 100, 200, 400)
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
THREADS = 2


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.million", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="photos, descriptions, and captions as queries")
    parser.add_argument("--features", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", default="base")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--size", default="small", choices=tuple(SIZES))
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--shift", type=float, default=0.3)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--exact", type=int, default=6, help="queries for which every picture is scored; 0: none")
    parser.add_argument("--measure", action="store_true", help="the store of DIR is there already")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    started, report = time.perf_counter(), Facts(command=" ".join(sys.argv[1:]), cores=os.cpu_count())

    def tell(name: str, facts: Facts) -> None:
        facts = {**facts, "after_seconds": round(time.perf_counter() - started), "load": round(os.getloadavg()[0], 1)}
        report[name] = facts
        print(name, json.dumps(facts), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    place = options.work / "million"
    data = load_data(str(options.data))
    try:
        pictures = prepared(options, data)
        if not options.measure:
            shutil.rmtree(place, ignore_errors=True)
            tell("build", build(place, pictures, options.count))
        captions = [record.captions[0] for record in data.records]
        queries = captions[:: max(1, len(captions) // options.queries)][: options.queries]
        searcher = Searcher(place)
        tell("search", search_facts(searcher, queries))
        tell("filters", filter_facts(searcher, queries))
        if options.exact:
            tell("recall", recall_facts(searcher, queries[:: max(1, len(queries) // options.exact)][: options.exact]))
        searcher.close()
        tell("server", server_facts(place, queries))
        if not options.measure:
            tell("growth", growth_facts(place, pictures, options.count, queries))
    finally:
        if not options.keep and not options.measure:
            shutil.rmtree(place, ignore_errors=True)


def prepared(options: argparse.Namespace, data: Any) -> Synthetic:
    """The real photos' states, from DIR where an earlier run left them."""
    model = from_pretrained(options.model).eval()
    settings = store_settings(model, options.model, options.size)
    known = options.work / f"photos-{options.model}-{options.size}.pt"
    if known.exists():
        real = torch.load(known, weights_only=False)  # what this command itself wrote
    else:
        if options.features:
            tokens = torch.load(options.features, weights_only=True)["tokens"]
        else:
            tokens = encode_images(model, data)
        real = originals(model, data, tokens, settings)
        options.work.mkdir(parents=True, exist_ok=True)
        torch.save(real, known)
    return Synthetic(model, real, settings, noise=options.noise, shift=options.shift)


def build(place: Path, pictures: Synthetic, count: int) -> Facts:
    """Fill and index a store."""
    start, spent = time.perf_counter(), time.process_time()
    store, facts = fill(place, pictures, count)
    filled, parts = time.perf_counter(), len(list(place.rglob("data/*.lance")))
    store.tidy()
    tidy = time.perf_counter() - filled
    every, indexes = store.disk_bytes(), sum(path.stat().st_size for path in place.rglob("_indices/**/*"))
    return {
        "pictures": len(store),
        "photos": len(pictures.real),
        **{f"{name}_seconds": value for name, value in facts.items()},
        "fill_seconds": round(filled - start, 1),
        "tidy_seconds": round(tidy, 1),
        "processor_seconds": round(time.process_time() - spent, 1),
        "parts": parts,
        "bytes_per_picture_without_thumbnail": round(every / len(store) - len(THUMBNAIL)),
        "of_it_indexes": round(indexes / len(store)),
        "partitions": vector_index.partitions(len(store)),
        "probes": vector_index.probes(len(store)),
        "peak_megabytes": round(_peak()),
    }


def timed(work: Callable[[Any], object], items: Sequence[Any]) -> Facts:
    """Milliseconds of `work`, and processor time of all threads; the first of the items warms up."""
    times, spent = [], []
    for item in items:
        start, busy = time.perf_counter(), time.process_time()
        work(item)
        times.append((time.perf_counter() - start) * 1e3)
        spent.append((time.process_time() - busy) * 1e3)
    times, spent = sorted(times[1:]), sorted(spent[1:])
    late = times[min(len(times) - 1, round(0.95 * len(times)))]
    return {"median": round(median(times), 1), "p95": round(late, 1), "processor": round(median(spent), 1)}


def search_facts(searcher: Searcher, queries: Sequence[str]) -> Facts:
    """The whole query, and its stages one at a time."""
    start = time.perf_counter()
    searcher.search(queries[0], TEN)
    first = time.perf_counter() - start
    parts = [searcher.part_of_query(searcher.encode(query)) for query in queries]
    vectors = [part.vector for part in parts]
    columns, estimate = [*SHOWN, *searcher.columns], searcher.estimate()
    found = [searcher.store.nearest(vector, CANDIDATES, columns, None, estimate) for vector in vectors[:20]]
    return {
        "first_query_ms": round(first * 1e3),
        "whole": timed(lambda query: searcher.search(query, TEN), queries),
        "text": timed(searcher.encode, queries),
        "vectors": timed(lambda one: searcher.store.nearest(one, CANDIDATES, ["id"], None, estimate), vectors),
        "vectors_and_states": timed(
            lambda one: searcher.store.nearest(one, CANDIDATES, columns, None, estimate), vectors
        ),
        "scores": timed(lambda both: list(searcher.scored(*both)), list(zip(found, parts, strict=False))),
        "candidates": CANDIDATES,
        "pool": pool(CANDIDATES, len(searcher.store)),
        "memory_megabytes": round(resident(os.getpid())),
    }


def filter_facts(searcher: Searcher, queries: Sequence[str]) -> Facts:
    """Filters, names in descriptions, thumbnails, opening: milliseconds."""
    store, count = searcher.store, len(searcher.store)
    folder = Filters(folder="001")
    dates = store.select(_ids(0, 200), ["taken"]).values("taken")
    since = Filters(since=sorted(dates)[-2])
    numbers = [2 * (7919 * i % (count // 2)) for i in range(21)]
    return {
        "folder": timed(lambda query: searcher.search(query, TEN, filters=folder), queries[:20]),
        "folder_pictures": sum(len(some) for some in store.scan(["id"], folder, 8192)),
        "since_a_date": timed(lambda query: searcher.search(query, TEN, filters=since), queries[:20]),
        "name": timed(lambda number: searcher.search(f"a photo of {name_of(number)}", TEN), numbers),
        "thumbnail_by_id": timed(
            lambda one: store.get(one, ["id", "sha256", "thumbnail"]), _ids(0, count)[:: count // 100]
        ),
        "open_store": timed(lambda _: Store.open(store.location), range(10)),
    }


def recall_facts(searcher: Searcher, queries: Sequence[str]) -> Facts:
    """Part of the exact ten best that is found; exact: every picture scored, for a search with what rare words add."""
    texts = searcher.engine.encode_texts(list(queries))
    matches = [matches_of(query, searcher.store) for query in queries]

    unit = searcher.engine.traits.score_unit

    def scores(some: Columns) -> torch.Tensor:
        added = [[unit * found.of(identity) for found in matches] for identity in some.values("id")]
        plain = torch.from_numpy(searcher.query_scores(some, texts))
        return torch.cat([plain, plain + torch.tensor(added)], dim=1)

    found, seconds = exhaustive(searcher.store, scores, 2 * len(queries), TEN)
    best, whole = found[: len(queries)], found[len(queries) :]
    vectors = searcher.engine.vectors(texts).numpy()

    def recall(count: int, estimate: Any) -> float:
        found = [searcher.store.nearest(vector, count, ["id"], None, estimate).values("id") for vector in vectors]
        pairs = zip(found, best, strict=True)
        return round(sum(len(set(some) & set(wanted)) for some, wanted in pairs) / TEN / len(best), 4)

    hits = [[hit.id for hit in searcher.search(query, TEN)] for query in queries]
    same = sum(len(set(some) & set(wanted)) for some, wanted in zip(hits, whole, strict=True)) / TEN / len(best)
    usual = vector_index.PROBED_SHARE, vector_index.LEAST_PROBES
    by_share, vector_index.LEAST_PROBES = {}, 1
    for share in SHARES:
        vector_index.PROBED_SHARE = share
        by_share[f"1/{round(1 / share)}"] = recall(CANDIDATES, searcher.estimate())
    vector_index.PROBED_SHARE, vector_index.LEAST_PROBES = usual
    return {
        "queries": len(queries),
        "exact_seconds": round(seconds),
        "recall_at_10_of_search": round(same, 4),
        "by_candidates": {count: recall(count, searcher.estimate()) for count in COUNTS},
        "by_probed_share": by_share,
        "by_candidates_vectors_alone": {count: recall(count, None) for count in (*COUNTS, 1600, 6400)},
    }


def server_facts(place: Path, queries: Sequence[str], rounds: int = 4) -> Facts:
    """`seps serve`: memory after start, and after each round of all queries and ten thumbnails of each."""
    command = [sys.executable, "-m", "seps.cli.main", "serve", "--store", str(place), "--port", "0"]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if server.stdout is None:
            raise RuntimeError("the server has no output")
        address = urlsplit(server.stdout.readline().split("Open ")[1].split()[0]).netloc
        began = time.perf_counter() - start
        connection = http.client.HTTPConnection(address, timeout=300)

        def ask(path: str) -> Any:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return json.loads(body) if answer.getheader("content-type") == "application/json" else None

        memory, times, thumbnails = [round(resident(server.pid))], [], []
        for number in range(rounds):
            for query in queries:
                asked = time.perf_counter()
                found = ask(f"/api/search?q={quote(f'{query} {number}')}&k=10")
                times.append((time.perf_counter() - asked) * 1e3)
                for hit in found["results"]:
                    asked = time.perf_counter()
                    ask(hit["thumbnail"])
                    thumbnails.append((time.perf_counter() - asked) * 1e3)
            memory.append(round(resident(server.pid)))
        return {
            "start_seconds": round(began, 1),
            "memory_megabytes": memory,
            "queries_per_round": len(queries),
            "search_ms": round(median(times), 1),
            "search_p95_ms": round(sorted(times)[int(0.95 * len(times))], 1),
            "thumbnail_ms": round(median(thumbnails), 1),
        }
    finally:
        server.terminate()
        server.wait(30)


def growth_facts(place: Path, pictures: Synthetic, count: int, queries: Sequence[str]) -> Facts:
    """One per cent more pictures, beside the index; a search in another thread sees whole commits."""
    more = max(100, count // 100)
    searcher, sizes, done = Searcher(place), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            sizes.append(len(searcher.store))
            searcher.search(queries[len(sizes) % len(queries)], TEN)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    store, facts = fill(place, pictures, more, first=count)
    added = time.perf_counter() - start
    store.tidy()
    tidy = time.perf_counter() - start - added
    done.set()
    watcher.join()
    return {
        "more": more,
        "added_seconds": round(added, 1),
        "writing_seconds": facts["writing"],
        "tidy_seconds": round(tidy, 1),
        "sizes_seen": sorted(set(sizes)),
        "whole": timed(lambda query: searcher.search(query, TEN), queries[:20]),
    }


def _ids(start: int, stop: int) -> list[str]:
    """Ids of synthetic pictures."""
    return [row_id(Synthetic.path(number), None) for number in range(start, stop)]


def _peak() -> float:
    """Most megabytes that this process held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    return 0.0


if __name__ == "__main__":
    main()
