"""The folder in which the commands of the pages are run: what a reader would have, only smaller."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from doc_blocks import ROOT

GALLERY = ROOT / "src/seps/assets/gallery"
KEPT = (
    "tabby-cat",
    "dog-running-field",
    "coffee-cup",
    "sandy-beach",
    "koala-tree",
    "playground",
    "tea-hills",
    "otters-rock",
)


def prepare(folder: Path, encoders: dict[str, str]) -> Path:
    """Photos, data sets, a published layout, a published checkpoint, configs and tools, all in `folder`."""
    lines = [json.loads(line) for line in (GALLERY / "gallery.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if Path(line["image"]).stem in KEPT]
    (folder / "photos").mkdir(parents=True)
    for line in lines:
        shutil.copy(GALLERY / line["image"], folder / "photos")
    _jsonl(folder / "photos/gallery.jsonl", lines)
    (folder / "photos/holidays").mkdir()
    shutil.copy(GALLERY / "woman-sitting-beach.jpg", folder / "photos/holidays")
    (folder / "more").mkdir()
    for name in ("raccoon-face", "giant-panda", "rabbit-lawn"):
        shutil.copy(GALLERY / f"{name}.jpg", folder / "more")
    named = [{**line, "image": f"photos/{line['image']}"} for line in lines]
    for name, part in (("train", named[:4]), ("dev", named[4:6]), ("dev-llava", named[6:])):
        _jsonl(folder / f"{name}.jsonl", part)
    for name in ("configs", "tools", "benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("images", "results"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    _tiny_recipe(folder / "tiny.yaml", encoders)
    _published_layout(folder / "data/f30k", lines[:3])
    _published_checkpoint(folder / "model_best.pth", encoders)
    return folder


def _jsonl(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _tiny_recipe(path: Path, encoders: dict[str, str]) -> None:
    recipe = yaml.safe_load((ROOT / "configs/compare.yaml").read_text())
    recipe["model"] |= {**encoders, "image_size": [32, 32], "embed_size": 16}
    recipe["train"] |= {"epochs": 1, "batch_size": 4, "precision": "float32"}
    path.write_text(yaml.safe_dump(recipe))


def _published_layout(folder: Path, lines: list[dict[str, object]]) -> None:
    (folder / "images").mkdir(parents=True)
    for line in lines:
        shutil.copy(GALLERY / str(line["image"]), folder / "images")
    (folder / "id_mapping.json").write_text(json.dumps({str(i): line["image"] for i, line in enumerate(lines)}))
    (folder / "test_ids.txt").write_text("".join(f"{i}\n" for i in range(len(lines))))
    (folder / "test_caps.txt").write_text("".join(f"{line['captions'][0]}\n" for line in lines))  # type: ignore[index]
    _jsonl(folder / "f30k_test.jsonl", [{"text": line["dense"]} for line in lines])


def _published_checkpoint(path: Path, encoders: dict[str, str]) -> None:
    """A file as the published trainer writes it, with the tests' tiny encoders."""
    import argparse

    import torch

    import seps
    from seps.encoders import text_encoder, vision_encoder

    parts = {
        "img_enc.visual_encoder.": vision_encoder(encoders["vision"]).model,
        "txt_enc.bert.": text_encoder(encoders["text"]).model,
        "cross_net.": seps.CrossSparseAggrNet(16, 16, 0.5, 0.4, has_cls=True),
    }
    state = {prefix + name: value for prefix, part in parts.items() for name, value in part.state_dict().items()}
    for name in ("img_enc.vision_proj", "txt_enc.fc"):
        state |= {f"{name}.weight": torch.randn(16, 32), f"{name}.bias": torch.randn(16)}
    torch.save({"model": state, "opt": argparse.Namespace(sparse_ratio=0.5, aggr_ratio=0.4, vit_type="vit")}, path)
