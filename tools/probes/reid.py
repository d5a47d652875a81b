"""Re-identification with each of its options: losses, figures, features, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import tiny
from probes.bench import Bench, log_lines
from probes.exported import outputs
from probes.registry import probe

RUNS: dict[str, dict[str, Any]] = {
    "default": {},
    "mini": {"model.encoder": "mini", "model.stride": 16, "model.freeze_blocks": 9},
    "concat": {"model.fusion": "concat"},
    "separate backbones": {"model.backbones": "separate"},
    "gate": {"model.selection": "gate"},
    "gate position": {"model.selection": "gate", "model.guides": "position"},
    "position": {"model.guides": "position"},
    "no own guide": {"model.own_guide": 0.0, "model.beta": 0.1},
    "kept": {"model.sparse_ratio": 0.7, "model.aggr_ratio": 0.3},
    "camera": {"model.camera_embedding": True},
    "gate first": {"model.selection": "gate", "model.select_at": "first"},
    "demo": {"model.network": "demo"},
    "demo without global": {"model.network": "demo", "model.global_local": False},
    "demo each sensor": {"model.network": "demo", "model.direct": False},
    "demo camera": {"model.network": "demo", "model.camera_embedding": True},
    "gumbel": {"model.decision": "gumbel"},
    "relaxed": {"model.decision": "relaxed", "model.temperature": 0.5},
    "binary": {"model.decision": "binary", "loss.ratio": 1.0},
    "zero": {"model.missing": "zero"},
    "raw triplets": {"loss.triplet_space": "raw"},
    "dropout of sensors": {"loss.modality_dropout": 0.5},
    "smoothing": {"loss.label_smoothing": 0.0, "loss.identity": 0.5},
    "two sensors": {"data.modalities": ["RGB", "TI"]},
    "bf16": {"train.precision": "bf16"},
}
PLAIN = ("gate first", "demo", "demo without global", "demo each sensor", "demo camera")
"""Runs that need a plain vision transformer."""


def clip_file(path: Path) -> Path:
    """A plain vision transformer of one narrow block in the file layout of OpenAI's CLIP, with its projection."""
    width, generator = 64, torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {
        "class_embedding": (width,),
        "positional_embedding": (17, width),
        "proj": (width, 16),
        "conv1.weight": (width, 3, 16, 16),
    }
    for name in ("ln_pre", "ln_post", "transformer.resblocks.0.ln_1", "transformer.resblocks.0.ln_2"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for name, rows, columns in (
        ("attn.in_proj_", 3 * width, width),
        ("attn.out_proj.", width, width),
        ("mlp.c_fc.", 2 * width, width),
        ("mlp.c_proj.", width, 2 * width),
    ):
        shapes |= {f"transformer.resblocks.0.{name}weight": (rows, columns)}
        shapes |= {f"transformer.resblocks.0.{name}bias": (rows,)}
    state = {f"visual.{name}": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    torch.save(state, path)
    return path


def shots(bench: Bench) -> Path:
    """A drawn set of twelve people."""

    def make() -> Path:
        folder = bench.scratch / "shots"
        words = ("--identities", "12", "--images", "4", "--height", "64", "--width", "32", "--workers", "1")
        bench.seps("reid", "synth", folder, *words)
        return folder

    return bench.once("shots", make)


def run(bench: Bench, name: str) -> Path:
    """The run with these options."""

    def make() -> Path:
        encoder = bench.once("encoder", lambda: tiny.save_vision_encoder(bench.scratch / "vision"))
        if name in PLAIN:
            encoder = bench.once("plain encoder", lambda: clip_file(bench.scratch / "clip.pt"))
        values: dict[str, Any] = {
            "data.root": str(shots(bench)),
            "data.identities": 4,
            "data.images": 2,
            "data.pad": 2,
            "data.holdout": 2,
            "data.threads": 1,
            "model.encoder": str(encoder),
            "model.image_size": [64, 32],
            "model.width": 16,
            "train.batch_size": 8,
            "train.epochs": 2,
            "train.eval_every": 2,
            "train.prefetch": 0,
            **RUNS[name],
        }
        words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
        out = bench.scratch / f"run {name}"
        bench.seps("reid", "train", "--out", out, "--device", "cpu", *words)
        return out

    return bench.once(f"reid {name}", make)


@probe("reid")
def drawn_set(bench: Bench) -> dict[str, Any]:
    """Every drawn file."""
    return {str(path.relative_to(shots(bench))): path.read_bytes() for path in sorted(shots(bench).rglob("*.*g"))}


@probe("reid", each=RUNS)
def losses(bench: Bench, name: str) -> Any:
    """The log of the run."""
    return log_lines(run(bench, name) / "metrics.jsonl")


@probe("reid", each=RUNS)
def figures(bench: Bench, name: str) -> Any:
    """`seps reid eval`, for every set of sensors that is missing, and re-ranked."""
    words = ("--missing", "--rerank", "--per-query", "--json", "--device", "cpu")
    return bench.seps("reid", "eval", run(bench, name), *words).json()


@probe("reid", each=("1", "2", "3"))
def pattern(bench: Bench, number: str) -> Any:
    """Each branch by itself."""
    return bench.seps("reid", "eval", run(bench, "default"), "--pattern", number, "--json", "--device", "cpu").json()


@probe("reid", each=("default", "gate", "camera", "concat", "separate backbones"))
def features(bench: Bench, name: str) -> dict[str, Any]:
    """Features of a folder."""
    import numpy as np

    out = bench.scratch / "features.npz"
    folder = sorted({path.parent.parent for path in shots(bench).rglob("*.*g")})[0]
    bench.seps("reid", "features", run(bench, name), folder, "--out", out, "--camera", "1", "--device", "cpu")
    with np.load(out) as file:
        return {key: file[key] if file[key].dtype.kind in "fiub" else file[key].tolist() for key in file.files}


@probe("reid")
def threshold(bench: Bench) -> Any:
    """The distance up to which two shots are the same."""
    out = bench.scratch / "threshold"
    words = ("--out", out, "--false-accept", "0.1", "--json", "--device", "cpu")
    return bench.seps("reid", "threshold", run(bench, "default"), *words).json()


@probe("reid")
def drawings(bench: Bench) -> dict[str, Any]:
    """The pictures of `seps reid show`."""
    out = bench.scratch / "shown"
    words = ("--out", out, "--queries", "2", "--places", "3", "--device", "cpu")
    bench.seps("reid", "show", run(bench, "default"), *words)
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*.png"))}


@probe("reid", each=("default", "gate"))
def exported_file(bench: Bench, name: str) -> dict[str, Any]:
    """The ONNX file."""
    out = bench.scratch / f"onnx {name}"
    bench.seps("reid", "export", run(bench, name), "-o", out)
    return outputs(out)
