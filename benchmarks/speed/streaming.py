"""Training from photos that are read from tar shards, beside photos in memory: host memory, and time per step.

    python -m benchmarks.speed.streaming --work DIR [--images 118000] [--part 384] [--rounds 6] [--out FILE.json]

Shards are made in DIR from crops of the demo photos, a few hundred JPEGs under as many names as are asked for: all
shards of 1,000 members but the last are links to one file, so that the set takes little disk. Three parts, in one
process:

1. memory: `--images` photos for training and 5,000 for dev, small JPEGs (128 x 96; they are kept at 256 x 256 whatever
   their size) under the default `data.memory`. Resident memory after the model is loaded is the zero; printed is the
   most while the data is read and checked, and while batches of 128 are made ahead as for a GPU.
2. throughput: `--part` photos of 640 x 480, a training step of `mini` on one thread, in memory and streamed with the
   share in memory that part 1 had. Blocks of steps in alternation, each with its own prefetching; the ratio of a round
   is streamed over memory, for wall time and for processor time of all threads.
3. reading: processor milliseconds that a photo of a batch costs, in memory and streamed, without a model.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from benchmarks.common.machine import describe
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.data.streams import PictureStream
from seps.retrieval.embedded import embedded_folder
from seps.retrieval.model import RetrievalModel
from seps.retrieval.train.data import SharedData, load_sets, read_data
from seps.retrieval.train.task import RetrievalTask
from seps.training.batches import Prefetcher
from seps.training.config import TrainConfig
from seps.training.optim import build_optimizer

MEMBERS, DEV_IMAGES, DEV_PHOTOS, CROPS = 1000, 5000, 6, 8
WORDS = ("a", "the", "two", "man", "woman", "dog", "cat", "child", "street", "beach", "red", "large", "sits", "runs")


def crops(size: tuple[int, int], dev: bool) -> list[bytes]:
    """JPEGs of `size` (width, height): several crops of each demo photo; those for dev come from other photos."""
    paths = sorted(embedded_folder("gallery").glob("*.jpg"))
    draw = random.Random(0)
    made = []
    for path in paths[:DEV_PHOTOS] if dev else paths[DEV_PHOTOS:]:
        photo = Image.open(path).convert("RGB")
        for _ in range(CROPS):
            left, top = draw.uniform(0, 0.3) * photo.width, draw.uniform(0, 0.3) * photo.height
            box = (left, top, left + 0.7 * photo.width, top + 0.7 * photo.height)
            buffer = io.BytesIO()
            photo.resize(size, Image.Resampling.BICUBIC, box).save(buffer, "JPEG", quality=92)
            made.append(buffer.getvalue())
    return made


def make_shards(folder: Path, count: int, size: tuple[int, int], dev: bool = False) -> Path:
    """A JSONL of `count` photos with five captions each, in shards; written anew."""
    folder.mkdir(parents=True, exist_ok=True)
    photos, draw = crops(size, dev), random.Random(1)
    lines = []
    for start in range(0, count, MEMBERS):
        number = min(MEMBERS, count - start)
        shard = folder / f"{start // MEMBERS:03d}.tar"
        shard.unlink(missing_ok=True)
        first = folder / "000.tar"
        if start and number == MEMBERS:
            os.link(first, shard)
        else:
            _write(shard, number, photos)
        for member in range(number):
            captions = [" ".join(draw.choices(WORDS, k=10)) for _ in range(5)]
            line = {
                "image": f"{member:06d}.jpg",
                "shard": shard.name,
                "captions": captions,
                "id": f"{folder.name}-{start + member}",
            }
            lines.append(json.dumps(line))
    path = folder / ("dev.jsonl" if dev else "train.jsonl")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _write(path: Path, number: int, photos: list[bytes]) -> None:
    with tarfile.open(path, "w") as shard:
        for member in range(number):
            data = photos[member % len(photos)]
            info = tarfile.TarInfo(f"{member:06d}.jpg")
            info.size = len(data)
            shard.addfile(info, io.BytesIO(data))


def recipe(train: Path, dev: Path | None, batch: int) -> RunConfig:
    """Training of `mini` with the default memory for photos."""
    data = DataConfig(str(train), (str(dev),) if dev else ())
    return RunConfig(model=ModelConfig(), data=data, train=TrainConfig(batch_size=batch))


def task_for(model: RetrievalModel, config: RunConfig, data: SharedData) -> RetrievalTask:
    """The task that `train_model` makes of these."""
    return RetrievalTask(model, config, data.train, data.dev, pixels=data.pixels, dev_pixels=data.dev_pixels)


def resident(peak: bool = False) -> float:
    """MiB of this process in memory now, or at most since `reset_peak` (Linux)."""
    word = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(word)) / 1024


def reset_peak() -> None:
    """Let `resident(peak=True)` begin anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def memory(work: Path, images: int) -> dict[str, Any]:
    """Part 1: the most that reading, checking and prefetching take beyond the model."""
    train = make_shards(work / "memory", images, (128, 96))
    dev = make_shards(work / "memory-dev", DEV_IMAGES, (128, 96), dev=True)
    config = recipe(train, dev, 128)
    model = RetrievalModel(config.model)
    reset_peak()
    zero, said = resident(), []
    started = time.perf_counter(), time.process_time()
    data = read_data(config, load_sets(config), model.image_size, said.append)
    read = resident(peak=True) - zero
    seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    pixels = data.pixels
    if not isinstance(pixels, PictureStream):
        raise SystemExit(f"{images} photos fit into data.memory: give more --images.")
    task = task_for(model, config, data)
    reset_peak()
    with Prefetcher(lambda step: task.batch(0, step, 0, 1), range(20), 2, 1, pin=False) as batches:
        for _ in batches:
            pass
    return {
        "images": len(data.train),
        "dev_images": len(data.dev[0]),
        "said": said,
        "kept": len(pixels.kept),
        "in_memory_mib": len(pixels) * pixels.shape[1:].numel() / 2**20,
        "model_mib": zero,
        "reading_mib": read,
        "batches_mib": resident(peak=True) - zero,
        "reading_seconds": seconds[0],
        "reading_processor_seconds": seconds[1],
    }


class Side:
    """One of the two ways to the same batches, with the steps it has done."""

    def __init__(self, task: RetrievalTask) -> None:
        self.task, self.step = task, 0
        self.optimizer = build_optimizer(task, task.config.train)

    def block(self, steps: int, learn: bool) -> tuple[float, float]:
        """(seconds, processor seconds) of so many batches, with or without the training step."""
        per_epoch = self.task.steps_per_epoch(1)
        chosen = range(self.step, self.step + steps)
        self.step += steps
        started = time.perf_counter(), time.process_time()

        def make(step: int) -> Any:
            return self.task.batch(*divmod(step, per_epoch), 0, 1)

        with Prefetcher(make, chosen, self.task.config.train.prefetch, 1, pin=False) as batches:
            for batch in batches:
                if learn:
                    loss, _ = self.task.loss(batch, 0)
                    torch.autograd.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started[0], time.process_time() - started[1]


def throughput(work: Path, part: int, share: float, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """Parts 2 and 3."""
    config = recipe(make_shards(work / "part", part, (640, 480)), None, batch)
    model = RetrievalModel(config.model).train()
    whole = read_data(config, load_sets(config), model.image_size, print)
    if not isinstance(whole.pixels, torch.Tensor):
        raise SystemExit(f"{part} photos do not fit into data.memory: give a smaller --part.")
    held = whole.pixels[: round(share * len(whole.train))].clone()
    size = config.data.size_to_decode(model.image_size)
    streamed = replace(whole, pixels=PictureStream(whole.train.sources, size, "resize", kept=held))
    sides = [Side(task_for(model, config, data)) for data in (whole, streamed)]
    for step in range(3):
        one, other = (side.task.batch(0, step, 0, 1) for side in sides)
        if not torch.equal(one.pixels, other.pixels):
            raise SystemExit("The two ways gave different batches.")
    for side in sides:
        side.block(1, learn=True)
    rows = []
    for number in range(rounds):
        order = sides if number % 2 else sides[::-1]
        times = {id(side): side.block(steps, learn=True) for side in order}
        (a, a_busy), (b, b_busy) = (times[id(side)] for side in sides)
        rows.append({"wall": b / a, "processor": b_busy / a_busy, "memory_s": a / steps, "streamed_s": b / steps})
        print(f"round {number + 1}: wall x {b / a:.3f}, processor x {b_busy / a_busy:.3f}", flush=True)
    reading = [[1e3 * side.block(8, learn=False)[1] / (8 * batch) for side in sides] for _ in range(rounds)]
    files = [Path(source.path) for source in whole.train.sources]
    return {
        "images": part,
        "batch": batch,
        "bytes_per_photo": sum(path.stat().st_size for path in set(files)) / part,
        "kept": len(held),
        "steps_per_block": steps,
        "rounds": rows,
        "wall_ratio": median(row["wall"] for row in rows),
        "processor_ratio": median(row["processor"] for row in rows),
        "reading_ms_memory": median(row[0] for row in reading),
        "reading_ms_streamed": median(row[1] for row in reading),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.streaming", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the shards; about 0.4 GB")
    parser.add_argument("--images", type=int, default=118_000, help="photos of part 1 (default: 118,000); 0: skip it")
    parser.add_argument("--part", type=int, default=384, help="photos of parts 2 and 3 (default: 384); 0: skip them")
    parser.add_argument("--share", type=float, help="share in memory of part 2; default: that of part 1")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="training steps of a block (default: 2)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file, after each part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts: dict[str, Any] = {**describe(torch.device("cpu")), "cores": os.cpu_count(), "load": os.getloadavg()[0]}

    def note(name: str, part: dict[str, Any]) -> None:
        facts[name] = part
        print(json.dumps({key: value for key, value in part.items() if key != "rounds"}, indent=1), flush=True)
        if options.out:
            options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    if options.images:
        note("memory", memory(options.work, options.images))
    if options.part:
        found = facts.get("memory", {"kept": 0, "images": 1})
        share = found["kept"] / found["images"] if options.share is None else options.share
        chosen = (options.rounds, options.steps, options.batch)
        note("throughput", throughput(options.work, options.part, share, *chosen))


if __name__ == "__main__":
    main()
