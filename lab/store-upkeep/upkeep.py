"""Adding pictures to a large store: writing and upkeep as they are now beside those of the former release.

    python -m benchmarks.upkeep --data dev-llava.jsonl --features FILE.pt --work DIR [--counts 50000 100000 200000]

For each count a store is built of synthetic pictures (`benchmarks.synthetic_store`). Then `--more` pictures are added
in commits of 512, as `seps index` writes them, and the store is tidied: `--rounds` times by each way, in turn, each
time on a fresh copy (of links, since files of a store are never changed). Each line of JSON has medians of seconds and
of megabytes read and written, their ratios, and recall@10 by vector against every vector compared, before and after.

`former` is the way of the former release: writing by the index of ids, joining every part below 65,536 rows once 33
are, and all of the indexes of words and ids written anew. Its vector index was left as it is until a tenth of the rows
are new and then made anew. `--scaled` scales the sizes of parts with the count, so that the store has the parts that
`benchmarks.million` makes of a million pictures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import synthetic_store
from benchmarks.million import prepared
from benchmarks.synthetic_store import Synthetic, fill
from seps.retrieval.data import load_data
from seps.retrieval.index import store as store_module
from seps.retrieval.index.codec import text_vectors
from seps.retrieval.index.connection import open_dataset
from seps.retrieval.index.rows import Row, to_table
from seps.retrieval.index.store import Store
from seps.retrieval.table import upkeep, vector_index

Facts = dict[str, Any]
COMMIT, QUERIES, TEN = 512, 100, 10
FORMER_PARTS, FORMER_ROWS, FORMER_SHARE = 32, 65_536, 0.1


class Traffic:
    """Bytes that datasets opened by a store read and write."""

    def __init__(self) -> None:
        self.opened: list[Any] = []

    def open(self, location: str) -> Any:
        """As `open_dataset`."""
        self.opened.append(open_dataset(location))
        return self.opened[-1]

    def megabytes(self) -> float:
        """Since it was asked last."""
        found = [dataset.io_stats_incremental() for dataset in self.opened]
        return sum(one.read_bytes + one.written_bytes for one in found) / 1e6


def former_put(store: Store, rows: Sequence[Row]) -> None:
    """`Store.put` of the former release."""
    merge = store._newest.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(to_table(rows, store.settings))


def former_tidy(store: Store) -> None:
    """`Store.tidy` of the former release, for a store that has its indexes."""
    small = [part for part in store._newest.get_fragments() if part.physical_rows < FORMER_ROWS]
    joined = len(small) > FORMER_PARTS
    if joined:
        store._newest.optimize.compact_files(target_rows_per_fragment=FORMER_ROWS)
    facts = store._newest.stats.index_stats(vector_index.NAME)
    rows = len(store)
    anew = len(facts["indices"]) != 1 or facts["num_unindexed_rows"] > FORMER_SHARE * rows
    if anew:
        vector_index.build(store._newest, rows)
    if joined or anew:
        store._newest.optimize.optimize_indices(index_names=["dense_idx", "id_idx"])
        store._newest.cleanup_old_versions(timedelta(0), delete_unverified=True)


WAYS: dict[str, tuple[Callable[[Store, Sequence[Row]], None], Callable[[Store], None]]] = {
    "former": (former_put, former_tidy),
    "now": (Store.put, Store.tidy),
}


def measured(place: Path, way: str, rows: Sequence[Row], tidied: Callable[[Store], None]) -> Facts:
    """Add the rows to the store and tidy it; `tidied` may look at it then."""
    traffic = Traffic()
    store_module.open_dataset = traffic.open  # type: ignore[attr-defined]
    put, tidy = WAYS[way]
    try:
        store = Store.open(place)
        start = time.perf_counter()
        for first in range(0, len(rows), COMMIT):
            put(store, rows[first : first + COMMIT])
        written, put_bytes = time.perf_counter(), traffic.megabytes()
        tidy(store)
        done, tidy_bytes = time.perf_counter(), traffic.megabytes()
    finally:
        store_module.open_dataset = open_dataset  # type: ignore[attr-defined]
    tidied(Store.open(place))
    return {
        "writing_seconds": written - start,
        "writing_megabytes": put_bytes,
        "upkeep_seconds": done - written,
        "upkeep_megabytes": tidy_bytes,
    }


def recall(store: Store, queries: Any) -> float:
    """Part of the ten best of all vectors that the index finds."""
    ids, vectors = [], []
    for some in store.scan(["id", "vector"], batch_size=8192):
        ids += some.values("id")
        vectors.append(some.vectors().astype(np.float32))
    every = np.concatenate(vectors)
    same = 0
    for query in queries:
        products = every @ query
        best = {ids[place] for place in np.argpartition(-products, TEN)[:TEN]}
        same += len(best & set(store.nearest(query, TEN, ["id"]).values("id")))
    return same / TEN / len(queries)


def scale_parts(count: int) -> None:
    """Sizes of parts as at a million pictures."""
    global FORMER_ROWS
    share = count / 1_000_000
    FORMER_ROWS = round(65_536 * share)
    upkeep.JOINED_ROWS, upkeep.SMALL_ROWS = FORMER_ROWS, round(16_384 * share)
    synthetic_store.ROWS = round(32_000 * share)


def compare(work: Path, pictures: Synthetic, count: int, more: int, rounds: int, queries: Any) -> Facts:
    """Both ways of one count."""
    place, copy = work / f"upkeep-{count}", work / "upkeep-copy"
    shutil.rmtree(place, ignore_errors=True)
    store, _ = fill(place, pictures, count)
    store.tidy()
    rows = pictures.rows(count, count + more)
    before, found = recall(store, queries), dict[str, float]()
    runs: dict[str, list[Facts]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(place, copy, copy_function=_link)

            def look(store: Store, way: str = way, number: int = number) -> None:
                if not number:
                    found[way] = recall(store, queries)

            runs[way].append(measured(copy, way, rows, look))
    shutil.rmtree(place)
    shutil.rmtree(copy)
    facts = {way: {name: round(median(run[name] for run in some), 3) for name in some[0]} for way, some in runs.items()}
    ratios = {name: round(facts["former"][name] / facts["now"][name], 2) for name in facts["now"]}
    return {
        "pictures": count,
        "more": more,
        "rounds": rounds,
        **facts,
        "former_over_now": ratios,
        "recall_at_10": {"before": round(before, 4), **{way: round(value, 4) for way, value in found.items()}},
    }


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def main() -> None:
    """Compare at each count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upkeep", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="photos, descriptions, and captions as queries")
    parser.add_argument("--features", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", default="base")
    parser.add_argument("--counts", type=int, nargs="+", default=[50_000, 100_000, 200_000])
    parser.add_argument("--more", type=int, nargs="+", default=[10_000, 20_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patches", type=int, default=4)
    parser.add_argument("--words", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scaled", action="store_true", help="sizes of parts in proportion to a million pictures")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.precision, options.noise, options.shift = "int8", 0.3, 0.3
    torch.set_num_threads(options.threads)
    data = load_data(str(options.data))
    pictures = prepared(options, data)
    captions = [record.captions[0] for record in data.records][:QUERIES]
    texts = pictures.model.encode_texts(captions)
    queries = text_vectors(texts).numpy()
    lines = []
    for count in options.counts:
        if options.scaled:
            scale_parts(count)
        for more in options.more:
            lines.append(json.dumps(compare(options.work, pictures, count, more, options.rounds, queries)))
            print(lines[-1], flush=True)
            if options.out:
                options.out.write_text("\n".join([json.dumps({"command": " ".join(sys.argv[1:])}), *lines]) + "\n")


if __name__ == "__main__":
    main()
