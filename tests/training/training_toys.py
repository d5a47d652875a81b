"""Two toy tasks that learn in a second: a regression with dropout, and a contrastive pair of encoders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.training import TrainConfig
from seps.training.distributed import gather_ragged, gather_with_gradient, rank, world_size
from seps.training.seeding import derive_seed
from seps.training.tracking import read_metrics

SAMPLES = 32


def quick(**changes: Any) -> TrainConfig:
    """3 epochs of 4 steps."""
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05, "warmup_steps": 2}
    return TrainConfig(**{**settings, **changes})


def rows_of(epoch: int, step: int, size: int, rank: int, world: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(7, epoch))
    rows = torch.randperm(SAMPLES, generator=generator)[step * size : (step + 1) * size]
    return rows.tensor_split(world)[rank]


@dataclass
class RegressionBatch:
    x: Tensor
    y: Tensor
    names: list[str]


class Regression:
    """y = x w with dropout on x; `at_step` maps a step (from 0) to something to do inside its loss."""

    def __init__(self, batch_size: int = 8, dropout: float = 0.2, at_step: dict[int, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        self.size, self.at_step = batch_size, at_step or {}
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 4, generator=generator)
        self.y = self.x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
        self.scores: list[float] | None = None
        self.seen = 0

    def steps_per_epoch(self, world: int) -> int:
        return SAMPLES // self.size

    def batch(self, epoch: int, step: int, rank: int, world: int) -> RegressionBatch:
        rows = rows_of(epoch, step, self.size, rank, world)
        return RegressionBatch(self.x[rows], self.y[rows], [f"{epoch}/{step}/{row}" for row in rows.tolist()])

    def loss(self, batch: RegressionBatch, epoch: int) -> tuple[Tensor, dict[str, float]]:
        step = epoch * (SAMPLES // self.size) + int(batch.names[0].split("/")[1])
        loss = functional.mse_loss(self.model(batch.x), batch.y)
        act = self.at_step.get(step)
        if act is not None:
            loss = act(loss)
        return loss, {"mean_target": float(batch.y.mean())}

    def evaluate(self) -> dict[str, float]:
        if self.scores is not None:
            self.seen += 1
            return {"score": self.scores[self.seen - 1]}
        return {"score": -functional.mse_loss(self.model(self.x), self.y).item()}


def send(number: int) -> Any:
    """Something for `at_step`: send this process a signal."""

    def act(loss: Tensor) -> Tensor:
        os.kill(os.getpid(), number)
        return loss

    return act


class Pair(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(5, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.5))


class Contrastive:
    """Images find texts: each rank scores its rows against the texts and images of all ranks."""

    def __init__(self, batch_size: int = 8, dropout: float = 0.0) -> None:
        torch.manual_seed(3)
        self.model = Pair(dropout)
        self.size = batch_size
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(SAMPLES, 3, generator=generator)
        self.images = hidden @ torch.randn(3, 6, generator=generator)
        self.texts = hidden @ torch.randn(3, 5, generator=generator)

    def steps_per_epoch(self, world: int) -> int:
        return SAMPLES // self.size

    def batch(self, epoch: int, step: int, rank: int, world: int) -> dict[str, Tensor]:
        rows = rows_of(epoch, step, self.size, rank, world)
        return {"images": self.images[rows], "texts": self.texts[rows]}

    def parameter_groups(self, lr: float, backbone_scale: float) -> list[dict[str, Any]]:
        slow = list(self.model.image.parameters())
        rest = [*self.model.text.parameters(), self.model.log_scale]
        return [{"params": slow, "lr": lr * backbone_scale}, {"params": rest, "lr": lr}]

    def split(self, batch: dict[str, Tensor], chunk_size: int) -> list[dict[str, Tensor]]:
        parts = zip(batch["images"].split(chunk_size), batch["texts"].split(chunk_size), strict=True)
        return [{"images": images, "texts": texts} for images, texts in parts]

    def encode(self, chunk: dict[str, Tensor]) -> tuple[Tensor, ...]:
        mask = torch.ones(len(chunk["texts"]), dtype=torch.bool)
        return self.model.image(chunk["images"]), self.model.text(chunk["texts"]), mask

    def loss_from_features(
        self, features: tuple[Tensor, ...], batch: Any, epoch: int
    ) -> tuple[Tensor, dict[str, float]]:
        images, texts = (functional.normalize(feature.float(), dim=-1) for feature in features[:2])
        counts = gather_ragged(torch.tensor([len(images)]))
        start = int(counts[: rank()].sum())
        labels = torch.arange(start, start + len(images))
        scale = self.model.log_scale.exp()
        to_text = functional.cross_entropy(scale * images @ gather_with_gradient(texts).T, labels)
        to_image = functional.cross_entropy(scale * texts @ gather_with_gradient(images).T, labels)
        share = len(images) * world_size() / int(counts.sum())
        return (to_text + to_image) / 2 * share, {}

    def loss(self, batch: dict[str, Tensor], epoch: int) -> tuple[Tensor, dict[str, float]]:
        return self.loss_from_features(self.encode(batch), batch, epoch)

    def evaluate(self) -> dict[str, float]:
        images, texts = self.model.image(self.images), self.model.text(self.texts)
        similarity = functional.normalize(images, dim=-1) @ functional.normalize(texts, dim=-1).T
        return {"score": float((similarity.argmax(1) == torch.arange(SAMPLES)).float().mean())}


def losses(run_dir: Any) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every train line of a run's metrics."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


def evaluations(run_dir: Any) -> list[tuple[int, float]]:
    """(step, score) of every eval line."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [(line["step"], line["score"]) for line in lines if line["kind"] == "eval"]


def weights_equal(a: nn.Module, b: nn.Module) -> bool:
    other = b.state_dict()
    return all(torch.equal(value, other[name]) for name, value in a.state_dict().items())
