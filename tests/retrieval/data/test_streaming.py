"""Photos that are read from their files while a model trains: the same batches, to the bit, as from memory.

Also after a kill, with several processes, and with a file that goes, changes or ends too early meanwhile.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, multiprocessing

import seps
from messages import mentions, naming
from seps.cli.main import main
from seps.images.decoding import READ_AHEAD, ImageReader
from seps.images.shards import UnreadableImage
from seps.images.sources import DataError
from seps.method.config import ConfigError
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.data import decode_all, load_jsonl
from seps.retrieval.data.streams import PictureStream, rows_to_keep
from seps.retrieval.evaluate.run import evaluate, evaluate_each
from seps.retrieval.model import RetrievalModel
from seps.retrieval.train.data import SharedData, load_sets, read_data
from seps.retrieval.train.run import train_model
from seps.retrieval.train.task import RetrievalTask
from seps.training import DistributedInfo, TrainConfig, find_checkpoint, load_weights, process_group
from seps.training.batches import Prefetcher

SIDE = 96  # at which photos are kept: 27,648 bytes, so that a budget of 1 MiB holds some of them
STEPS = 4  # in an epoch of 58 photos in batches of 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """JSONL of 60 photos for training, files of several formats and two shards, two of them bad; and of 8 for dev."""
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    made: dict[str, list[str]] = {"train": [], "dev": []}
    members: list[list[tuple[str, bytes]]] = [[], []]
    for number in range(68):
        split = "train" if number < 60 else "dev"
        size = (int(draw.integers(60, 300)), int(draw.integers(60, 300)))
        small = draw.integers(0, 256, (5, 7, 3), dtype=np.uint8)
        photo = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
        kind = ("JPEG", "PNG", "WEBP")[number % 3]
        buffer = io.BytesIO()
        photo.save(buffer, kind)
        data = buffer.getvalue()[:200] if number in (4, 41) else buffer.getvalue()
        name, shard = f"{number:03d}.{kind.lower()}", {}
        if split == "train" and number % 2:
            members[number % 4 // 2].append((name, data))
            shard = {"shard": f"train-{number % 4 // 2}.tar"}
        else:
            (folder / name).write_bytes(data)
        captions = [f"a {colour} square on the {side} ." for colour, side in (("red", "left"), ("blue", "right"))]
        line = {"image": name, **shard, "captions": captions[: 1 + number % 2], "dense": "the picture shows a circle ."}
        made[split].append(json.dumps(line))
    for number, found in enumerate(members):
        with tarfile.open(folder / f"train-{number}.tar", "w") as made_shard:
            for name, data in found:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                made_shard.addfile(member, io.BytesIO(data))
    for split, lines in made.items():
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "train.jsonl", folder / "dev.jsonl"


def settings(encoders: dict[str, str], photos: tuple[Path, Path], memory: int, **train: Any) -> RunConfig:
    steps = {"epochs": 3, "batch_size": 12, "learning_rate": 3e-3, "eval_every": 1, "seed": 5, **train}
    return RunConfig(
        model=ModelConfig(**encoders, embed_size=16),
        data=DataConfig(
            str(photos[0]), (str(photos[1]),), texts="mixed", caption_noise=0.2, decode_size=(SIDE, SIDE), memory=memory
        ),
        train=TrainConfig(**steps),
    )


def read(config: RunConfig) -> tuple[SharedData, list[str]]:
    said: list[str] = []
    return read_data(config, load_sets(config), (32, 32), said.append), said


def task_of(config: RunConfig) -> RetrievalTask:
    data, _ = read(config)
    torch.manual_seed(0)
    model = RetrievalModel(config.model)
    return RetrievalTask(model, config, data.train, data.dev, pixels=data.pixels, dev_pixels=data.dev_pixels)


def same(one: Any, other: Any) -> None:
    """Two batches have the same bits in every field."""
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            a, b = torch.from_numpy(a), torch.from_numpy(b)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b, field.name


def test_small_sets_stay_in_memory_and_large_ones_are_read_from_their_files(encoders, photos) -> None:
    whole, said = read(settings(encoders, photos, 2048))
    assert isinstance(whole.pixels, Tensor) and isinstance(whole.dev_pixels[0], Tensor)
    assert len(said) == 1 and "decoded" in said[0]
    assert DataConfig().memory == 2048

    some, said = read(settings(encoders, photos, 1))
    assert isinstance(some.pixels, PictureStream) and isinstance(some.dev_pixels[0], Tensor)
    kept = (2**20 - 8 * 3 * 32 * 32) // (3 * SIDE * SIDE)
    # One of the bad two is among the first: what was kept of it makes no room, so that reading needs no second pass.
    assert 30 < kept < 41 and len(some.pixels.kept) == kept - 1
    assert len(said) == 2 and mentions(said[0], 60, "1.6 MiB", "data.memory = 1 MiB", kept)

    none, said = read(settings(encoders, photos, 0))
    assert isinstance(none.pixels, PictureStream) and isinstance(none.dev_pixels[0], PictureStream)
    assert len(none.pixels.kept) == 0 and "files" in said[0]
    for other in (some, none):
        assert other.train == whole.train and other.pixels.shape == whole.pixels.shape == (58, 3, SIDE, SIDE)
        assert torch.equal(other.pixels[torch.arange(58)], whole.pixels)
        assert torch.equal(other.pixels[torch.tensor([57, 0, 30, 0])], whole.pixels[torch.tensor([57, 0, 30, 0])])
        assert torch.equal(other.dev_pixels[0][2:5], whole.dev_pixels[0][2:5])
        assert len(other.pixels[torch.tensor([], dtype=torch.int64)]) == 0
    with pytest.raises(ConfigError, match=naming("memory", "-1")):
        DataConfig(memory=-1)


def test_batches_have_the_same_bits_streamed_or_in_memory(encoders, photos) -> None:
    """All steps, for one, two and three ranks, made in line or ahead by several threads, from any step on."""
    whole = task_of(settings(encoders, photos, 2048))
    for memory in (0, 1):
        task = task_of(settings(encoders, photos, memory))
        assert isinstance(task.pixels, PictureStream)
        assert task.steps_per_epoch(1) == whole.steps_per_epoch(1) == STEPS
        for world in (1, 2, 3):
            for rank in range(world):
                # A fresh range from the middle of an epoch: what a resumed run asks for.
                for first, ahead, workers in ((0, 2, 3), (6, 0, 1)):
                    steps = range(first, 3 * STEPS)

                    def make(step: int, task=task, rank=rank, world=world) -> Any:
                        return task.batch(*divmod(step, STEPS), rank, world)

                    with Prefetcher(make, steps, ahead, workers, pin=False) as batches:
                        for step, batch in zip(steps, batches, strict=True):
                            same(batch, whole.batch(*divmod(step, STEPS), rank, world))


def curve(run: Path) -> list[tuple[Any, ...]]:
    """What every line of a run's log says, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "data_seconds", "time")
    return [tuple((name, value) for name, value in line.items() if name not in timed) for line in lines]


def weights(run: Path) -> dict[str, Tensor]:
    return load_weights(find_checkpoint(run, "last"))


def same_run(run: Path, other: Path) -> None:
    assert curve(run) == curve(other)
    one, two = weights(run), weights(other)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def whole_run(encoders, photos, tmp_path_factory) -> Path:
    """A run from memory, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_model(settings(encoders, photos, 2048), run)
    return run


TRAINED = """
import os, signal, sys, torch
torch.set_num_threads(1)
from seps import settings
from seps.retrieval.config import RunConfig
from seps.retrieval.train.run import train_model
from seps.retrieval.train.task import RetrievalTask
plain, steps = RetrievalTask.loss, []

def loss(self, batch, epoch):
    steps.append(epoch)
    if len(steps) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, batch, epoch)

RetrievalTask.loss = loss
result = train_model(settings.load(RunConfig, sys.argv[1]), sys.argv[2])
print(result.resumed_from, result.step)
"""


def trained(config: RunConfig, run: Path, killed_at: int = 0) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own: what other tests did to this one may change how it rounds."""
    named = run.with_suffix(".yaml")
    named.write_text(seps.settings.to_yaml(config))
    environment = {**os.environ, "PYTHONPATH": str(Path(seps.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINED, str(named), str(run), str(killed_at)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_a_streamed_run_killed_in_the_middle_of_an_epoch_ends_with_the_bits_of_one_from_memory(
    encoders, photos, tmp_path
) -> None:
    whole = trained(settings(encoders, photos, 2048), tmp_path / "whole")
    assert whole.stdout.split()[-2:] == ["0", "12"], whole.stderr
    ended = trained(settings(encoders, photos, 0, checkpoint_every=3), tmp_path / "run", killed_at=7)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    # It goes on from step 6, the second of its epoch, and may keep more in memory than before.
    resumed = trained(settings(encoders, photos, 1, checkpoint_every=3), tmp_path / "run")
    assert resumed.stdout.split()[-2:] == ["6", "12"], resumed.stderr
    same_run(tmp_path / "run", tmp_path / "whole")


def two_ways(rank: int, port: int, configs: list[RunConfig], folder: str) -> None:
    torch.set_num_threads(1)
    with process_group(DistributedInfo(rank, 2, rank, "127.0.0.1", port), timeout_minutes=2) as info:
        for config in configs:
            train_model(config, Path(folder) / str(config.data.memory), distributed=info)


@pytest.mark.slow
def test_two_processes_train_to_the_same_bits_streamed_or_in_memory(encoders, photos, tmp_path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configs = [settings(encoders, photos, memory, epochs=1) for memory in (2048, 0)]
    multiprocessing.spawn(two_ways, (port, configs, str(tmp_path)), nprocs=2)
    same_run(tmp_path / "0", tmp_path / "2048")


def remove(folder: Path) -> None:
    (folder / "008.webp").unlink()


def change(folder: Path) -> None:
    Image.new("RGB", (80, 60), (1, 2, 3)).save(folder / "008.webp")


def cut(folder: Path) -> None:
    shard = folder / "train-0.tar"
    os.truncate(shard, shard.stat().st_size // 3)


@pytest.mark.parametrize(
    ("damage", "file", "said"),
    [
        (remove, "008.webp", "file"),
        (change, "008.webp", "changed"),
        (cut, "train-0.tar", "opy the"),
    ],
)
def test_a_picture_that_goes_while_a_run_reads_it_ends_it_with_a_sentence_and_nothing_is_lost(
    encoders, photos, whole_run, tmp_path, monkeypatch, capsys, damage: Callable[[Path], None], file: str, said: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for path in photos[0].parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    plain, begun = RetrievalTask.batch, []

    def batch(self: RetrievalTask, epoch: int, step: int, rank: int, world: int) -> Any:
        if (epoch, step) == (1, 1) and not begun:
            begun.append(damage(folder))
        return plain(self, epoch, step, rank, world)

    monkeypatch.setattr(RetrievalTask, "batch", batch)
    config = settings(encoders, (folder / "train.jsonl", folder / "dev.jsonl"), 0, prefetch=0)
    (tmp_path / "config.yaml").write_text(seps.settings.to_yaml(config))
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    capsys.readouterr()
    assert main(words) == 2
    # The last line is the error, those before it what is said of the data.
    shown = capsys.readouterr().err.splitlines()[-1]
    assert file in shown and said in shown and "began" in shown
    saved = json.loads((find_checkpoint(tmp_path / "run", "last") / "state.json").read_text())
    assert saved["step"] >= 5 and saved["step"] % STEPS, "a step of the middle of an epoch, where no checkpoint is due"
    for path in photos[0].parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert main(words) == 0
    assert [line for line in curve(tmp_path / "run") if ("kind", "train") in line] == [
        line for line in curve(whole_run) if ("kind", "train") in line
    ]


def test_an_evaluation_of_a_stream_decodes_once_for_all_protocols(encoders, photos, monkeypatch) -> None:
    from seps.retrieval.data.streams import pictures

    torch.manual_seed(0)
    model = RetrievalModel(ModelConfig(**encoders, embed_size=16)).eval()
    data = load_jsonl(photos[1])
    whole = decode_all(data, model.image_size)
    decoded: list[str] = []
    plain = pictures.decode_image

    def counting(content: bytes, source: Any, *more: Any) -> Any:
        decoded.append(str(source))
        return plain(content, source, *more)

    monkeypatch.setattr(pictures, "decode_image", counting)
    with PictureStream(data.sources, model.image_size) as stream:
        reports = evaluate_each(model, data, ["none", "image", "published"], pixels=stream)
    assert sorted(decoded) == sorted(map(str, data.sources))
    assert reports == [evaluate(model, data, name, pixels=whole) for name in ("none", "image", "published")]


def test_a_stream_says_what_does_not_fit_and_names_the_first_bad_picture(photos) -> None:
    data = load_jsonl(photos[0])
    with pytest.raises(DataError, match=naming("60", "3", "checksums")):
        PictureStream(data.sources, (8, 8), checksums=np.zeros(3, np.uint32))
    with pytest.raises(DataError, match=naming("60", "pictures")):
        PictureStream(data.sources, (8, 8), kept=torch.zeros(2, 3, 8, 9, dtype=torch.uint8))
    with PictureStream(data.sources, (8, 8)) as stream:
        with pytest.raises(UnreadableImage, match=r"004\.png"):
            stream[torch.tensor([1, 4, 41])]
        faults: dict[int, UnreadableImage] = {}
        assert len(list(stream.pictures(faults))) == 58 and list(faults) == [4, 41]
        with pytest.raises(UnreadableImage, match=r"004\.png"):
            list(stream.pictures())


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), st.data())
def test_what_is_kept_fits_the_budget_and_nothing_more_would(sets: list[tuple[int, int, int]], data: Any) -> None:
    shapes = [(count, 3, height, width) for count, height, width in sets]
    sizes = [3 * height * width for _, height, width in sets]
    budget = data.draw(st.integers(0, 2 * sum(shape[0] * size for shape, size in zip(shapes, sizes, strict=True))))
    rows = rows_to_keep(shapes, budget)
    used = sum(count * size for count, size in zip(rows, sizes, strict=True))
    assert used <= budget
    for shape, count, size in zip(shapes, rows, sizes, strict=True):
        assert 0 <= count <= shape[0]
        assert count == shape[0] or used + size > budget


def test_a_reader_runs_no_more_than_a_little_ahead_of_its_caller() -> None:
    begun, lock = [0], threading.Lock()

    def work(number: int) -> int:
        with lock:
            begun[0] += 1
        return number

    with ImageReader(workers=2) as reader:
        results = reader.map(work, range(5000))
        assert [next(results) for _ in range(10)] == list(range(10))
        reader.close()
    assert begun[0] <= READ_AHEAD + 11
    with ImageReader(workers=2) as reader:
        assert list(reader.map(lambda a, b: a + b, range(500), range(500))) == [2 * k for k in range(500)]
