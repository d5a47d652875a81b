"""Photos per second of `seps index`, on this machine and over Ray, and what a killed worker costs.

    python -m benchmarks.index.indexing --out FILE.json [--photos 320] [--models mini base] [--workers 1 2 4]

Photos: the demo photos that come with the package, each cut a little differently and saved again as JPEG of 640 px, so
that no two have the same content; or the photos of `--folder`. Every row is the default call (`seps index FOLDER
--store DIR`, with `--model` and, for Ray, `--engine ray --workers N`): a GPU where there is one, its bank of background
queries, batches of 32. In each round all rows run in turn, each into a store of its own; figures are medians over the
rounds. Where Lance or pyarrow is not installed, the rows end with the packed states (`store` is false): no bank,
nothing written, and no Ray.

- `photos_per_second`: of the whole call, without loading the model; Ray's actors start within it. `first_round`: the
  same in the first round, in which the libraries of a GPU start.
- `steady`: the same without start and end: from when the batches are done that were read ahead during the start.
- `starting`, `finishing`: seconds until the first batch is done, and from the last one to the end of the call.
- `step_ms`: where the time of a photo goes while it is steady, in milliseconds of the threads (see `STEPS` in
  benchmarks/index/watching.py): with 16 threads 16 ms of decoding are one photo per millisecond. None for Ray.
- `device_waits`: on a GPU the part of the steady time in which no thread held the GPU, because all of them were
  decoding, packing or writing. None on a CPU, where threads compute next to each other.
- `encoder_alone`: on a GPU, photos per second of the encoder with batches of 32 that lie in its memory: the limit.
- `processor_ms`: processor time per photo, of this process and of the decoding and encoding of Ray's workers; what it
  leaves out is Ray's own processes and the start of its workers. Unlike the others it hardly depends on the load.
- `killed`: the run of Ray in which one worker is killed by the system in the middle. Its store is compared with that of
  the same run undisturbed, row by row: rows that are missing, rows whose facts differ, and the largest difference
  between their vectors (the images of the killed batch are encoded one by one, which rounds otherwise).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from benchmarks.common.machine import clock, describe
from benchmarks.index.packages import STORES
from benchmarks.index.watching import STEPS, Spans, Timed, steady_window
from seps.images.sources import ImageSource
from seps.photos.indexing import build
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.embedding import ImageJob, PreparedBatch, Preparer, prepare_locally
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from seps.ray_cluster import RayConfig
from seps.retrieval.embedded import embedded_folder
from seps.retrieval.engine.faster import fast_vision
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.pretrained import from_pretrained

Facts = dict[str, Any]
SIDE = 640
SAME = ("path", "size", "mtime", "sha256", "width", "height", "thumbnail", "dense", "positions")


def make_photos(folder: Path, count: int) -> None:
    """`count` photos of different content, from the demo photos."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(embedded_folder("gallery").glob("*.jpg"))

    def make(number: int) -> None:
        draw = random.Random(number)
        with Image.open(sources[number % len(sources)]) as opened:
            picture = opened.convert("RGB")
        width, height = picture.size
        left, top = draw.randrange(1 + width // 10), draw.randrange(1 + height // 10)
        cut = picture.crop((left, top, width - width // 10 + left, height - height // 10 + top))
        scale = SIDE / max(cut.size)
        cut = cut.resize((max(1, round(cut.width * scale)), max(1, round(cut.height * scale))))
        cut.save(folder / f"{number:05}.jpg", quality=90)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, range(count)))


class Killed(Preparer):
    """A `Preparer` whose process is killed the first time it meets a certain photo."""

    at, mark = "", ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.killer, self.told = self.at, self.mark  # of the object: the class of another process has none

    def __call__(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
        """Prepare, or die."""
        if any(job.source.path.name == self.killer for job in jobs) and not os.path.exists(self.told):
            open(self.told, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(jobs)


def run(folder: Path, store: Path, model: Any, name: str, ray: RayConfig | None, preparer: type[Preparer]) -> Facts:
    """One call: its figures."""
    if not STORES:
        return run_without_store(folder, model, name)
    marks: list[tuple[float, int]] = []
    spans = Timed.spans = Spans()
    put = Store.put

    def timed_put(own: Store, *arguments: Any) -> None:
        with spans.of("writing"):
            put(own, *arguments)

    start = time.perf_counter()
    with mock.patch.object(build, "Preparer", preparer), mock.patch.object(Store, "put", timed_put):
        report = index_folder(
            folder,
            store,
            model,
            name,
            options=IndexOptions(ray=ray),
            progress=lambda done, total: marks.append((time.perf_counter(), done)),
        )
    found = figures(model, name, ray, marks, start, spans)
    found["decoding"] = report.decoding / (report.decoding + report.encoding)
    return {**found, "processor_ms": 1e3 * (report.own + report.decoding + report.encoding) / report.new}


def run_without_store(folder: Path, model: Any, name: str) -> Facts:
    """Decode, encode and pack as `seps index` does, and write nothing."""
    engine = engine_of(model)
    layout = engine.layout(engine.traits.default_size)
    jobs = [ImageJob(ImageSource(path), None) for path in sorted(folder.rglob("*.jpg"))]
    size = IndexOptions().batch_size
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    spans = Timed.spans = Spans()
    start, done, decoding, encoding = time.perf_counter(), 0, 0.0, 0.0
    marks: list[tuple[float, int]] = []
    for _, batch in prepare_locally(batches, Timed(engine, layout)):
        done += len(batch.outcomes)
        decoding, encoding = decoding + batch.decoding, encoding + batch.encoding
        marks.append((time.perf_counter(), done))
    found = figures(model, name, None, marks, start, spans)
    return {**found, "decoding": decoding / (decoding + encoding), "store": False}


def figures(
    model: Any, name: str, ray: RayConfig | None, marks: Sequence[tuple[float, int]], start: float, spans: Spans
) -> Facts:
    """The figures of a call that began at `start` and has just ended; `marks` are moments and photos done by then."""
    end, done = time.perf_counter(), marks[-1][1]
    found: Facts = {
        "model": name,
        "workers": None if ray is None else ray.workers,
        "photos": done,
        "seconds": end - start,
        "photos_per_second": done / (end - start),
        "steady": None,
        "starting": marks[0][0] - start,
        "finishing": end - marks[-1][0],
        "step_ms": None,
        "device_waits": None,
    }
    # Each of Ray's workers makes its encoder with its first batch; threads read as many batches ahead, and two more.
    window = steady_window(marks, min(16, os.cpu_count() or 1) + 2 if ray is None else ray.workers)
    if window is None:
        return found
    first, last, photos = window
    found["steady"] = photos / (last - first)
    if ray is None:
        steps = spans.steps(first, last)
        found["step_ms"] = {step: round(1e3 * steps[step] / photos, 4) for step in STEPS}
        if model.device.type != "cpu":
            found["device_waits"] = 1 - steps["held"] / (last - first)
    return found


@torch.no_grad()
def encoder_alone(model: Any, batch: int = 32) -> float | None:
    """Photos per second of the encoder that `seps index` takes, without any copy; None on a CPU."""
    if model.device.type == "cpu":
        return None
    pixels = torch.rand(batch, 3, *model.image_size, device=model.device)
    work = partial(model.encode_pixels, pixels, fast_vision(model))
    return batch / clock(work, model.device, 20)


def rows(store: Path) -> dict[str, Row]:
    """The rows of a store by id."""
    opened = Store.open(store)
    return opened.rows(sorted(opened.known()))


def compared(left: dict[str, Row], right: dict[str, Row]) -> Facts:
    """What differs between two stores."""
    both = sorted(left.keys() & right.keys())
    gaps = [
        np.abs(np.asarray(left[i].vector, np.float32) - np.asarray(right[i].vector, np.float32)).max() for i in both
    ]
    return {
        "rows": len(left),
        "missing": len(left.keys() ^ right.keys()),
        "other_facts": sum(any(getattr(left[i], n) != getattr(right[i], n) for n in SAME) for i in both),
        "other_bits": sum(left[i].tokens != right[i].tokens for i in both),
        "largest_difference_of_vectors": float(max(gaps, default=0.0)),
    }


def merged(runs: Sequence[Facts]) -> Facts:
    """Medians over the rounds of one row."""
    first = runs[0]
    names = ("seconds", "photos_per_second", "steady", "starting", "finishing", "decoding", "device_waits")
    values = {name: [one[name] for one in runs if one.get(name) is not None] for name in (*names, "processor_ms")}
    steps = [one["step_ms"] for one in runs if one["step_ms"] is not None]
    return {
        **first,
        **{name: round(median(own), 4) if own else None for name, own in values.items()},
        "first_round": round(first["photos_per_second"], 4),
        "step_ms": {step: round(median(one[step] for one in steps), 4) for step in STEPS} if steps else None,
    }


def measure(options: argparse.Namespace, work: Path, device: torch.device, facts: Facts) -> None:
    """All rows, in turn, round by round, then the run with a killed worker; the file has what was measured so far."""
    folder = options.folder or work / "photos"
    if options.folder is None:
        make_photos(folder, options.photos)
    models = {name: from_pretrained(name, device=device) for name in options.models}
    here = device.type == "cpu" or not options.workers
    on_cpu = models[options.ray_model] if here else from_pretrained(options.ray_model)
    share = 0.0 if device.type == "cpu" else 1.0
    clusters = {workers: RayConfig(workers=workers, gpus=share / workers) for workers in options.workers}
    facts["encoder_alone"] = {name: encoder_alone(model) for name, model in models.items()}
    taken: dict[str, list[Facts]] = {}

    def once(title: str, model: Any, name: str, ray: RayConfig | None) -> None:
        store = work / f"{title} {len(taken.get(title, []))}"
        found = run(folder, store, model, name, ray, Timed if ray is None else Preparer)
        taken.setdefault(title, []).append(found)
        print(told(title, found), flush=True)
        facts["rows"] = [merged(runs) for runs in taken.values()]
        save(facts, options.out)

    for _ in range(options.rounds):
        for name, model in models.items():
            once(f"{name}, this process", model, name, None)
        for workers, cluster in clusters.items():
            once(f"{options.ray_model}, Ray, {workers}", on_cpu, options.ray_model, cluster)
    if clusters and options.folder is None:
        Killed.mark = str(work / "killed")
        Killed.at = f"{options.photos // 2:05}.jpg"
        workers = max(clusters)
        run(folder, work / "with a kill", on_cpu, options.ray_model, clusters[workers], Killed)
        undisturbed = work / f"{options.ray_model}, Ray, {workers} 0"
        facts["killed"] = {
            "workers": workers,
            "happened": os.path.exists(Killed.mark),
            **compared(rows(undisturbed), rows(work / "with a kill")),
        }
        print(f"killed: {facts['killed']}", flush=True)
        save(facts, options.out)


def told(title: str, found: Facts) -> str:
    """The line that is printed of a call."""
    steady = "too few photos to say" if found["steady"] is None else f"{found['steady']:.1f}"
    line = f"{title:24} {found['photos_per_second']:7.1f} photos a second, steady {steady}"
    line += f"; start {found['starting']:.1f} s, end {found['finishing']:.1f} s"
    if found["step_ms"] is not None:
        line += "; ms of a photo: " + ", ".join(f"{step} {ms:.2f}" for step, ms in found["step_ms"].items())
    return line if found["device_waits"] is None else f"{line}; the GPU waits {found['device_waits']:.0%}"


def save(facts: Facts, out: Path | None) -> None:
    """Write what there is."""
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--photos", type=int, default=320, help="how many are made")
    parser.add_argument("--folder", type=Path, help="photos to take instead; Ray's kill is then left out")
    parser.add_argument("--models", nargs="+", default=["mini", "base"])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4], help="of Ray; none: leave Ray out")
    parser.add_argument("--ray-model", default="mini", help="the model that Ray's rows are measured with")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.ray_model not in options.models:
        parser.error(f"--ray-model {options.ray_model} must be one of --models, which it is compared with.")
    if options.folder is not None and next(options.folder.rglob("*.jpg"), None) is None:
        parser.error(f"There is no photo (*.jpg) in {options.folder}.")
    if not STORES and options.workers:
        print("Lance or pyarrow is not installed: no store is written, and Ray is left out.", flush=True)
        options.workers = []
    if options.workers and importlib.util.find_spec("ray") is None:
        parser.error("Ray is not installed: pip install 'seps[dist]', or leave its rows out with --workers alone.")
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as work:
        facts = {"machine": {**describe(device), "cores": os.cpu_count()}, "rounds": options.rounds}
        facts["side"] = SIDE if options.folder is None else None
        measure(options, Path(work), device, facts)


if __name__ == "__main__":
    main()
