"""Tiny models and pictures that several areas use: drawn and made from seeds, trained by `seps train`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import duals
import tiny
from probes.bench import DAY, Bench, keep_times

QUERIES = ("a red square on the left .", "a blue circle and a green circle .", "the grey picture")


def scenes(bench: Bench) -> tuple[Path, Path]:
    """JSONL files of 24 training scenes and of 12 others, with captions and descriptions."""

    def make() -> tuple[Path, Path]:
        files = (
            tiny.make_scenes(bench.scratch / "scenes", 24),
            tiny.make_scenes(bench.scratch / "dev", 12, seed=7, name="dev"),
        )
        for file in files:
            list(keep_times(file.parent))
        return files

    return bench.once("scenes", make)


def encoders(bench: Bench) -> tuple[Path, Path]:
    """Folders of a tiny vision and a tiny text encoder."""
    return bench.once(
        "encoders",
        lambda: (tiny.save_vision_encoder(bench.scratch / "vision"), tiny.save_text_encoder(bench.scratch / "text")),
    )


def settings(bench: Bench, **changes: Any) -> list[str]:
    """The options of a short training run on the scenes; `changes` by name, `model__head` for model.head."""
    (vision, text), (train, dev) = encoders(bench), scenes(bench)
    values: dict[str, Any] = {
        "model.vision": str(vision),
        "model.text": str(text),
        "model.image_size": [32, 32],
        "model.embed_size": 16,
        "data.train": str(train),
        "data.dev": [str(dev)],
        "train.batch_size": 8,
        "train.epochs": 2,
        "train.eval_every": 2,
        "train.prefetch": 0,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    words: list[str] = []
    for name, value in values.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def trained(bench: Bench, name: str = "default", **changes: Any) -> Path:
    """The folder of a run of `seps train`; the model is its folder `model`."""

    def make() -> Path:
        out = bench.scratch / f"run {name}"
        bench.seps("train", "--out", out, "--device", "cpu", *settings(bench, **changes))
        return out

    return bench.once(f"trained {name}", make)


def photos(bench: Bench) -> Path:
    """A folder of 14 scenes, in two folders, with descriptions of most and with copies of some."""

    def make() -> Path:
        from PIL import Image

        folder = bench.scratch / "photos"
        tiny.make_scenes(folder, 12, seed=3, name="p")
        (folder / "sub").mkdir()
        shutil.copy(folder / "p001.png", folder / "sub" / "same.png")
        with Image.open(folder / "p002.png") as picture:
            picture.resize((64, 64)).save(folder / "sub" / "saved-again.jpg", quality=90)
        for number, path in enumerate(keep_times(folder)):
            os.utime(path, (DAY + 86_400 * number,) * 2)
        return folder

    return bench.once("photos", make)


def store(bench: Bench, name: str, *options: object, folder: Path | None = None, model: Path | None = None) -> Path:
    """A store of the photos, by the trained model unless another is named, made with these options."""

    def make() -> Path:
        place = bench.scratch / f"store {name}"
        used = model or trained(bench) / "model"
        words = (folder or photos(bench), "--store", place, "--model", used, "--device", "cpu", *options)
        bench.seps("index", *words)
        return place

    return bench.once(f"store {name}", make)


def dual(family: str) -> Path:
    """The folder of a tiny dual encoder."""
    return duals.dual_folder(family)
