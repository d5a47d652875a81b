"""Entries in one harness: the same data, recipe and seeds. One run is one entry with one seed.

Each entry changes the shared recipe in what it is about and nothing else (`entries`, `ablation`). Runs go on one after
another or several at a time (`compare_workers`); `compare_report` makes the tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.experiments.ablation import ABLATION
from seps.experiments.entries import BASELINES, Suite
from seps.experiments.probe import gradient_at_patches, kept_at_test, summary_of_training
from seps.retrieval.config import RunConfig
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.eval.evaluate import evaluate
from seps.retrieval.eval.protocol import Protocol
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.train.run import choose_trust, honest_protocols
from seps.retrieval.train.task import RetrievalTask
from seps.training import NonFiniteLossError, find_checkpoint, load_weights, train

Log = Callable[[str], None]
SUITES: Mapping[str, Suite] = {"baselines": BASELINES, "ablation": ABLATION}


@dataclass(frozen=True)
class Job:
    """One run: an entry of a suite, and a seed."""

    suite: str
    name: str
    seed: int

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        return f"{self.name}-{self.seed}"


@dataclass
class Material:
    """What all runs share: the recipe, the data and the decoded photos."""

    recipe: RunConfig
    train: RetrievalDataset
    dev: list[RetrievalDataset]
    pixels: Tensor
    """(images, 3, h, w) uint8 of the training set."""
    dev_pixels: list[Tensor]


def protocols_for(model: RetrievalModel) -> list[Protocol]:
    """Under which protocols a model can be measured."""
    leaks = isinstance(model.head, SlimmingHead) and model.head.net.config.dense == "branch"
    return [*honest_protocols(model), "published"] if leaks else honest_protocols(model)


def config_for(job: Job, recipe: RunConfig) -> RunConfig:
    """The recipe as this run trains it."""
    config = SUITES[job.suite][job.name].change(recipe)
    return replace(config, train=replace(config.train, seed=job.seed))


def run_one(
    job: Job, material: Material, runs: Path, *, device: torch.device | str, keep: bool = False
) -> dict[str, Any]:
    """Train one entry with one seed and measure it on every dev set under every protocol it knows.

    A loss that is not finite is a result too (`nonfinite`: the step), without figures. The run's folder in `runs`
    goes when the result is there, unless `keep`. Raises InterruptedError when the training was asked to stop.
    """
    config = config_for(job, material.recipe)
    torch.manual_seed(job.seed)
    model = RetrievalModel(config.model)
    # Without evaluations while it trains there is nothing to choose: the last weights are measured below.
    dev = material.dev if config.train.eval_every else []
    dev_pixels = material.dev_pixels if dev else []
    task = RetrievalTask(model, config, material.train, dev, pixels=material.pixels, dev_pixels=dev_pixels)
    run_dir = runs / job.folder
    result: dict[str, Any] = {"name": job.name, "seed": job.seed, "epochs": config.train.epochs, "rsum": {}}
    result["chunk_size"] = config.train.chunk_size
    result["head_parameters"] = sum(p.numel() for p in model.head.parameters())
    try:
        trained = train(task, config.train, run_dir, device=device, log=lambda _: None, about={"entry": job.name})
        if trained.interrupted:
            raise InterruptedError(f"{job.folder} was asked to stop at step {trained.step} of {trained.total_steps}.")
        result |= {"nonfinite": None, **_measure(task, run_dir, material, device)}
    except NonFiniteLossError as error:
        result |= {"nonfinite": error.step + 1, **summary_of_training(run_dir)}
    if not keep:
        shutil.rmtree(run_dir, ignore_errors=True)
    return result


def _measure(task: RetrievalTask, run_dir: Path, material: Material, device: torch.device | str) -> dict[str, Any]:
    model, config = task.model.model, task.config
    weights = load_weights(find_checkpoint(run_dir, "best"))
    own = {key.removeprefix("model."): value for key, value in weights.items() if key.startswith("model.")}
    model.load_state_dict(own)
    model.to(device).eval()
    if config.choose_trust and model.trust is not None:
        choose_trust(model, material.dev, material.dev_pixels)
    rsums = {
        f"{part.split}/{protocol}": evaluate(model, part, protocol, pixels=shown).metrics.rsum
        for part, shown in zip(material.dev, material.dev_pixels, strict=True)
        for protocol in protocols_for(model)
    }
    return {
        "rsum": rsums,
        "trust": model.trust,
        **summary_of_training(run_dir),
        "gradient": gradient_at_patches(task, device),
        "kept_at_test": kept_at_test(task, device),
    }
