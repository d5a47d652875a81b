"""A tiny encoder, tiny settings and tiny sets for the tests of re-identification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from seps.encoders import Preprocessing, VisionEncoder, ViT
from seps.encoders.vit import ViTConfig
from seps.reid.config import ReidConfig, ReidModelConfig, from_mapping
from seps.reid.data import ReidDataset, ReidReader
from seps.reid.demo.model import DemoReidModel
from seps.reid.evaluate import Case
from seps.reid.network.model import ReidModel

SENSORS = ("RGB", "NI", "TI")
KINDS = ("weight", "bias")


class ToyEncoder(VisionEncoder):
    """Patches of 16 pixels by one convolution, CLS = their mean through a layer of its own."""

    def __init__(self, width: int = 24, image_size: tuple[int, int] = (64, 32), prefix: int = 1) -> None:
        super().__init__(
            width=width,
            num_prefix_tokens=prefix,
            image_size=image_size,
            stride=(16, 16),
            preprocessing=Preprocessing((0.4, 0.5, 0.6), (0.5, 0.5, 0.5)),
        )
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.cls = nn.Linear(width, width)
        self.early_width = width

    @classmethod
    def of_size(cls, image_size: tuple[int, int] = (64, 32)) -> ToyEncoder:
        return cls(image_size=image_size)

    def encode(self, normalised: Tensor) -> Tensor:
        return self.encode_with_early(normalised)[0]

    def encode_with_early(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        patches = torch.tanh(self.patch(normalised)).flatten(2).transpose(1, 2)
        cls = self.cls(patches.mean(dim=1, keepdim=True))
        return torch.cat([cls] * self.num_prefix_tokens + [patches], dim=1), patches


def toy_model(identities: int = 5, cameras: int = 3, sensors: tuple[str, ...] = SENSORS, **settings: Any) -> ReidModel:
    chosen = {"image_size": (64, 32), "width": 16, "aggr_ratio": 0.5, **settings}
    config = ReidModelConfig(**chosen)
    count = 1 if config.backbones == "shared" else len(sensors)
    backbones = [ToyEncoder(image_size=config.image_size) for _ in range(count)]
    return ReidModel(config, sensors, identities, cameras, backbones)


def toy_demo_model(width: int = 16, cameras: int = 3, **settings: Any) -> DemoReidModel:
    """DeMo's network on a plain ViT of one narrow block."""
    config = ReidModelConfig(network="demo", image_size=(64, 32), width=width, aggr_ratio=0.5, **settings)
    shape = ViTConfig(patch_size=16, grid=(4, 2), width=width, heads=2, hidden=2 * width, depth=1)
    return DemoReidModel(config, SENSORS, 5, cameras, [ViT(shape, config.image_size)])


def tiny_vit_file(path: Path, width: int = 64) -> Path:
    """A .pth with timm's names: one narrow block, 16-pixel patches, positions of a 4 x 4 grid."""
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, width), "pos_embed": (1, 17, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, 16, 16), "patch_embed.proj.bias": (width,)}
    shapes |= {f"{name}.{kind}": (width,) for name in ("norm", "blocks.0.norm1", "blocks.0.norm2") for kind in KINDS}
    for name, rows in (("attn.qkv", 3 * width), ("attn.proj", width), ("mlp.fc1", width), ("mlp.fc2", width)):
        shapes |= {f"blocks.0.{name}.weight": (rows, width), f"blocks.0.{name}.bias": (rows,)}
    generator = torch.Generator().manual_seed(7)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}, path)
    return path


def toy_config(root: Path, layout: str = "generic", **sections: Any) -> ReidConfig:
    values: dict[str, Any] = {
        "data": {"layout": layout, "root": str(root), "identities": 2, "images": 2, "holdout": 1, "pad": 2},
        "model": {"image_size": [64, 32], "stride": 16, "width": 16, "aggr_ratio": 0.5, "pretrained": False},
        "train": {"epochs": 2, "eval_every": 1, "learning_rate": 1e-3},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return from_mapping(values)


def write(path: Path, pid: int, size: tuple[int, int]) -> None:
    """An image whose look follows from the identity, with noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([pid, len(path.name), sum(map(ord, str(path.name)))])
    base = np.random.default_rng(pid).integers(0, 255, (4, 2, 3))
    pixels = np.kron(base, np.ones((size[0] // 4, size[1] // 2, 1))) + rng.normal(0, 8, (*size, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def rgbnt201(root: Path) -> Path:
    for split, pids in (("train_171", range(1, 6)), ("test", range(20, 23))):
        for pid in pids:
            for camera in (1, 2):
                for shot in range(2):
                    for sensor in SENSORS:
                        write(root / split / sensor / f"{pid:06d}_cam{camera}_0_0{shot}.jpg", pid, (64, 32))
    return root


def rgbnt100(root: Path) -> Path:
    for split, pids in (("bounding_box_train", range(1, 6)), ("query", (8, 9)), ("bounding_box_test", (8, 9))):
        for pid in pids:
            for camera in (1, 2):
                write(root / "rgbir" / split / f"{pid:04d}_c{camera}_000{camera}.jpg", pid, (64, 96))
    return root


def msvr310(root: Path) -> Path:
    for split, pids in (("bounding_box_train", range(1, 6)), ("query3", (8, 9)), ("bounding_box_test", (8, 9))):
        for pid in pids:
            for scene in (1, 2):
                for folder in ("vis", "ni", "th"):
                    name = f"{pid:04d}_s{scene:03d}_v{pid % 8}_001.jpg"
                    write(root / split / f"{pid:04d}" / folder / name, pid, (64, 32))
    return root


def slow_features(model: ReidModel, dataset: ReidDataset, reader: ReidReader, case: Case) -> list[list[Tensor]]:
    """Blocks (R, M, C) of each query and of each gallery shot, by the network's own call for this case alone."""
    found = []
    for records in (dataset.query, dataset.gallery):
        pixels = torch.stack([reader.read(record) for record in records]).float() / 255
        present = torch.tensor([[sensor in case.present for sensor in model.modalities]] * len(records))
        cameras = torch.tensor([dataset.cameras.index(record.camid) for record in records])
        with torch.no_grad():
            flat = model.embed(pixels, cameras, present, case.missing).pattern(case.pattern)
        found.append(list(flat.view(len(records), -1, len(model.modalities), model.config.width)))
    return found


def slow_distances(query: list[Tensor], gallery: list[Tensor]) -> list[list[float]]:
    """1 - the mean over the branches of the cosine of whole features, which all lack the same sensors."""
    return [
        [
            1
            - sum(float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in zip(q, g, strict=True))
            / len(q)
            for g in gallery
        ]
        for q in query
    ]


def slow_map(matrix: list[list[float]], dataset: ReidDataset) -> tuple[float, float]:
    """(mAP, R1) by the definition: a shot at a time, by the data set's rule; queries without a match do not count."""
    precisions, firsts = [], []
    for row, query in zip(matrix, dataset.query, strict=True):
        place = hits = 0
        seen: list[float] = []
        first = False
        for index in sorted(range(len(row)), key=lambda i: (row[i], i)):
            shot = dataset.gallery[index]
            same_view = shot.sceneid == query.sceneid if dataset.excludes == "scene" else shot.camid == query.camid
            if shot.pid == query.pid and same_view:
                continue
            place += 1
            if shot.pid == query.pid:
                hits += 1
                seen.append(hits / place)
                first = first or place == 1
        if seen:
            precisions.append(sum(seen) / len(seen))
            firsts.append(float(first))
    return sum(precisions) / len(precisions), sum(firsts) / len(firsts)
