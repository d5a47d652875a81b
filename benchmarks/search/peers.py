"""Other ways to find pictures by their patches, in one run on the same vectors: recall of the exact ten, time, memory.

    python -m benchmarks.search.peers --data dev.jsonl [--photos 100] [--count 10000 100000] [--out FILE.json]

A picture has `PATCHES` patches of `base`, spread over its grid. Pictures are made of real photos, two each: every patch
is that of one or the other photo, with noise. Queries are captions of `--data`. All ways read normalised vectors.
`exact` is plain MaxSim over all pictures: the sum over the words of the best patch. `+ 100` and `+ 1000` score the best
of a way again by MaxSim. fast-plaid runs in an environment of its own, below `runs/`, with the release of torch that it
is built for; without a package index its row names the failure. It is built on a GPU where there is one, and searched
on the CPU like the others. `--features` keeps the real vectors in a file, for a machine without the photos, and
`--python` names a Python that has fast-plaid.

- `recall`: the part of the ten best of `exact` that are among the way's ten, mean over the queries.
- `ms`: median per query, one at a time; the page shows it where `load` at the start is below the threads.
- `bytes`: per picture as half-precision values, of fast-plaid in its folder; `mib`: of all pictures. `process_mib`:
  peak of the process of fast-plaid, with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.machine import describe
from seps.retrieval.data import load_data
from seps.retrieval.engine.faster import faster
from seps.retrieval.engine.keeping import spread
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.patches import PatchEngine
from seps.retrieval.evaluate.encoding import encode_images

Facts = dict[str, Any]
Search = Callable[[Tensor], NDArray[np.int64]]
PATCHES, TEN, AGAIN = 32, 10, (100, 1000)
BLOCK = 2_000
NOISE = 0.3
"""Of each value, in standard deviations."""
ENVIRONMENT = Path("runs/peers-env")
PACKAGES = ("torch==2.11.0", "fast-plaid==1.7.0.2110", "numpy")
PLAID = """
import json, resource, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path
import numpy as np
import torch
from fast_plaid import search

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

if __name__ == "__main__":
    work, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    pictures = torch.from_numpy(np.load(work / "pictures.npy"))
    queries = [torch.from_numpy(one) for one in np.load(work / "queries.npz").values()]
    start = time.perf_counter()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    index = search.FastPlaid(index=str(work / "index"), device=place)
    index.create(documents_embeddings=list(pictures.float()))
    built = time.perf_counter() - start
    index = search.FastPlaid(index=str(work / "index"), device="cpu")
    del pictures
    held = sum(path.stat().st_size for path in (work / "index").rglob("*") if path.is_file())
    found, times = [], []
    for query in queries:
        start = time.perf_counter()
        best = index.search(queries_embeddings=query[None].float(), top_k=10)[0]
        times.append(time.perf_counter() - start)
        found.append([int(place) for place, _ in best])
    print(json.dumps({"found": found, "times": times, "held": held, "built": built, "place": place, "peak": peak()}))
"""


@torch.no_grad()
def vectors(data: str, photos: int, queries: int) -> tuple[Tensor, list[Tensor]]:
    """Normalised patches (B, N, C) of real photos, and the words (M, C) of some captions."""
    dataset = load_data(data)
    engine = load_engine("base")
    assert isinstance(engine, PatchEngine)
    grid = engine.model.vision.grid_for(*engine.traits.image_size)
    some = replace(dataset, records=dataset.records[:photos])
    tokens = encode_images(faster(engine), some)[:, engine.model.vision.num_prefix_tokens :]
    places = spread(grid).argsort()[:PATCHES].sort().values
    texts = engine.encode_texts([record.captions[0] for record in some.records[:queries]]).text_features
    words = [F.normalize(one[valid], dim=-1) for one, valid in zip(texts.words, texts.mask, strict=True)]
    return F.normalize(tokens[:, places].float(), dim=-1), words


def made(real: Tensor, count: int) -> Tensor:
    """(count, N, C) float16 normalised: pictures made of two real ones each."""
    chance, parts = torch.Generator().manual_seed(0), []
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        first, second = (real[torch.randint(len(real), (size,), generator=chance)] for _ in range(2))
        share = 0.5 + 0.5 * torch.rand(size, 1, generator=chance)
        mine = torch.rand(first.shape[:2], generator=chance) < share
        noise = torch.randn(first.shape, generator=chance) * (NOISE * real.std())
        parts.append(F.normalize(torch.where(mine[..., None], first, second) + noise, dim=-1).half())
    return torch.cat(parts)


def maxsim(pictures: Tensor, words: Tensor) -> Tensor:
    """(B,) sums over the words (M, C) of the best patch."""
    flat = pictures.float().flatten(0, 1)
    return (words @ flat.T).view(len(words), len(pictures), -1).amax(dim=2).sum(dim=0)


def exact(pictures: Tensor, words: Tensor) -> NDArray[np.int64]:
    """The ten best of all, a block at a time."""
    scores = torch.cat([maxsim(pictures[at : at + BLOCK], words) for at in range(0, len(pictures), BLOCK)])
    return best(scores, TEN)


def best(scores: Tensor, count: int) -> NDArray[np.int64]:
    """Places of the largest scores."""
    return scores.topk(min(count, len(scores))).indices.numpy()


def again(pictures: Tensor, words: Tensor, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ten best of some candidates by MaxSim."""
    places = torch.from_numpy(candidates)
    return places[maxsim(pictures[places], words).topk(min(TEN, len(places))).indices].numpy()


class Muvera:
    """Fixed vectors whose product is about the MaxSim of two sets, as in MUVERA (Dhulipala et al. 2024).

    Random planes cut the space into 2^`bits` cells, `times` over. A query's vectors are summed in each cell, a
    picture's are averaged; where a picture has none, the nearest by number of planes stands. Each cell is projected to
    `width` values by random signs.
    """

    def __init__(self, channels: int, times: int = 10, bits: int = 4, width: int = 16) -> None:
        chance = torch.Generator().manual_seed(0)
        self.planes = torch.randn(times, channels, bits, generator=chance)
        self.signs = (torch.randint(2, (times, channels, width), generator=chance) * 2.0 - 1) / width**0.5
        self.powers, self.cells = 2 ** torch.arange(bits), 2**bits
        numbers = torch.arange(self.cells)[:, None] // self.powers % 2
        self.apart = (numbers[:, None] != numbers).sum(dim=-1).float()  # planes between two cells

    def __call__(self, sets: Tensor, *, query: bool) -> Tensor:
        """(B, N, C) -> (B, times * cells * width)."""
        parts = []
        for planes, signs in zip(self.planes, self.signs, strict=True):
            cell = ((sets @ planes > 0) * self.powers).sum(dim=-1)  # (B, N)
            member = F.one_hot(cell, self.cells).float()  # (B, N, cells)
            sums = member.transpose(1, 2) @ (sets @ signs)  # (B, cells, width)
            if not query:
                counts = member.sum(dim=1)[..., None]
                nearest = self.apart[cell].argmin(dim=1)  # (B, cells): a vector per cell
                stand_in = (sets @ signs).gather(1, nearest[..., None].expand(-1, -1, sums.shape[-1]))
                sums = torch.where(counts > 0, sums / counts.clamp_min(1), stand_in)
            parts.append(sums.flatten(1))
        return torch.cat(parts, dim=1)


def measured(name: str, queries: list[Tensor], search: Search, truth: list[NDArray[np.int64]], held: int) -> Facts:
    """One row."""
    search(queries[0])
    found, times = [], []
    for words in queries:
        start = time.perf_counter()
        found.append(search(words))
        times.append(time.perf_counter() - start)
    return row(name, found, times, truth, held)


def row(name: str, found: list[Any], times: list[float], truth: list[NDArray[np.int64]], held: int) -> Facts:
    """Recall, milliseconds, MiB."""
    parts = [len(set(map(int, own)) & set(map(int, all_of))) / TEN for own, all_of in zip(found, truth, strict=True)]
    return {"way": name, "recall": mean(parts), "ms": median(times) * 1e3, "held": held}


def kept(features: str | None, make: Callable[[], tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, list[Tensor]]:
    """The real vectors out of a file, which is written where it is missing."""
    if features is None or not Path(features).is_file():
        real, queries = make()
        if features is not None:
            np.savez(features, real.numpy(), *[words.numpy() for words in queries])
        return real, queries
    with np.load(features) as arrays:
        real, *words = [torch.from_numpy(arrays[name]) for name in arrays.files]
    return real, words


def fast_plaid(
    pictures: Tensor,
    queries: list[Tensor],
    truth: list[NDArray[np.int64]],
    python: str | Path | None = None,
    limit: float | None = None,
) -> Facts:
    """fast-plaid, by default in its own environment, which is made when it is missing."""
    python = python or ENVIRONMENT / "bin" / "python"
    if not Path(python).is_file():
        venv.create(ENVIRONMENT, with_pip=True)
    if subprocess.run([python, "-c", "import fast_plaid"], capture_output=True, check=False).returncode:
        installed = subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=False)
        if installed.returncode:
            return {"way": "fast-plaid", "failed": "not installed"}
    with tempfile.TemporaryDirectory() as work:
        np.save(Path(work) / "pictures.npy", pictures.numpy())
        np.savez(Path(work) / "queries.npz", *[words.numpy() for words in queries])
        script = Path(work) / "plaid.py"
        script.write_text(PLAID, encoding="utf-8")
        command = [python, script, work, str(torch.get_num_threads())]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"way": "fast-plaid", "failed": f"not done after {limit:.0f} seconds"}
    if done.returncode:
        return {"way": "fast-plaid", "failed": (done.stderr.strip().splitlines() or [str(done.returncode)])[-1][:200]}
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    found = row("fast-plaid", facts["found"], facts["times"], truth, facts["held"])
    return {**found, "build_seconds": facts["built"], "built_on": facts["place"], "process_mib": facts["peak"]}


def compare(
    real: Tensor, queries: list[Tensor], count: int, python: str | None = None, limit: float | None = None
) -> Iterator[Facts]:
    """All ways over so many pictures, a row each."""
    pictures = made(real, count)
    size = pictures.numel() * 2
    truth: list[NDArray[np.int64]] = []
    times = []
    for words in queries:
        start = time.perf_counter()
        truth.append(exact(pictures, words))
        times.append(time.perf_counter() - start)
    means = F.normalize(pictures.float().mean(dim=1), dim=-1)
    fixed = Muvera(pictures.shape[2])
    table = torch.cat([fixed(pictures[at : at + BLOCK].float(), query=False) for at in range(0, count, BLOCK)])
    ways: list[tuple[str, Callable[[Tensor, int], NDArray[np.int64]], int]] = [
        ("one vector", partial(_by_mean, means), means.numel() * 2),
        ("MUVERA", partial(_by_fixed, table, fixed), table.numel() * 2),
    ]
    yield _sized(row("exact", truth, times, truth, size), count)
    for name, first, held in ways:
        yield _sized(measured(name, queries, partial(_ten, first), truth, held), count)
        for many in AGAIN:
            search = partial(_twice, pictures, first, many)
            yield _sized(measured(f"{name} + {many}", queries, search, truth, held + size), count)
    yield _sized(fast_plaid(pictures, queries, truth, python, limit), count)


def _sized(facts: Facts, count: int) -> Facts:
    held = facts.pop("held", None)
    sizes = {} if held is None else {"bytes": held / count, "mib": held / 2**20}
    return {"pictures": count, **facts, **sizes}


def _ten(first: Callable[[Tensor, int], NDArray[np.int64]], words: Tensor) -> NDArray[np.int64]:
    return first(words, TEN)


def _twice(
    pictures: Tensor, first: Callable[[Tensor, int], NDArray[np.int64]], many: int, words: Tensor
) -> NDArray[np.int64]:
    return again(pictures, words, first(words, many))


def _by_mean(means: Tensor, words: Tensor, number: int) -> NDArray[np.int64]:
    return best(means @ F.normalize(words.mean(dim=0), dim=0), number)


def _by_fixed(table: Tensor, fixed: Muvera, words: Tensor, number: int) -> NDArray[np.int64]:
    return best(table @ fixed(words[None], query=True)[0], number)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.peers", description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--features")
    parser.add_argument("--python")
    parser.add_argument("--limit", type=float, help="seconds for fast-plaid")
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--count", type=int, nargs="+", default=[10_000])
    parser.add_argument("--out")
    options = parser.parse_args()
    real, queries = kept(options.features, lambda: vectors(options.data, options.photos, options.queries))
    facts: Facts = {
        **describe(torch.device("cpu")),
        "load": os.getloadavg()[0],
        "packages": PACKAGES,
        "photos": len(real),
        "queries": len(queries),
        "patches": PATCHES,
        "rows": [],
    }
    for count in options.count:
        for found in compare(real, queries, count, options.python, options.limit):
            facts["rows"].append(found)
            print(json.dumps(found), flush=True)
            if options.out:
                Path(options.out).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
