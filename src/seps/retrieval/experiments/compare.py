"""One run of a comparison: one variant of a suite with one seed, trained and measured on every dev set.

Each variant changes the shared recipe in what it is about and nothing else (`suites`). Runs go on several at a time
(`workers`); `report` makes the tables.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seps.method.checks import evaluating
from seps.metrics import metrics_from_ranks, ranks, rsum_by_image
from seps.retrieval.config import Protocol, RunConfig
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.data.streams import Pixels
from seps.retrieval.evaluate.run import check_evaluation, score_dataset
from seps.retrieval.experiments.suites import suite_with_own_rows
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import begin
from seps.retrieval.train.data import SharedData, read_data
from seps.retrieval.train.run import choose_description_weight, honest_protocols
from seps.retrieval.train.task import RetrievalTask
from seps.training import NonFiniteLossError, find_checkpoint, load_weights, train
from seps.training.batches import move_batch
from seps.training.tracking import read_metrics


@dataclass(frozen=True)
class Trial:
    """One run: a variant of a suite, and a seed."""

    suite: str
    name: str
    seed: int

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        return f"{self.name}-{self.seed}"


def protocols_for(model: RetrievalModel) -> list[Protocol]:
    """Under which protocols a model can be measured."""
    net = model.head.network
    leaky = net is not None and net.config.dense == "branch"
    return [*honest_protocols(model), "published"] if leaky else honest_protocols(model)


def config_for(trial: Trial, recipe: RunConfig) -> RunConfig:
    """The recipe as this run trains it."""
    config = suite_with_own_rows(trial.suite)[trial.name].change(recipe)
    return replace(config, train=replace(config.train, seed=trial.seed))


def run_one(
    trial: Trial, shared: SharedData, runs: Path, *, device: torch.device | str, keep: bool = False
) -> dict[str, Any]:
    """Train one variant with one seed and measure it on every dev set under every protocol it knows.

    A loss that is not finite is a result too (`nonfinite`: the step), without figures. The run's folder in `runs`
    goes when the result is there, unless `keep`. Raises InterruptedError when the training was asked to stop.
    """
    config = config_for(trial, shared.recipe)
    torch.manual_seed(trial.seed)
    model = begin(config.model, config.start)
    if shared.image_size != model.image_size:
        # A variant of another size reads its photos for itself.
        shared = read_data(config, [shared.train, *shared.dev], model.image_size, lambda _: None)
    # Without evaluations while it trains there is nothing to choose: the last weights are measured below.
    dev = shared.dev if config.train.eval_every else []
    dev_pixels = shared.dev_pixels if dev else []
    task = RetrievalTask(model, config, shared.train, dev, pixels=shared.pixels, dev_pixels=dev_pixels)
    run_dir = runs / trial.folder
    result: dict[str, Any] = {"name": trial.name, "seed": trial.seed, "epochs": config.train.epochs, "rsum": {}}
    result["chunk_size"] = config.train.chunk_size
    result["head_parameters"] = sum(p.numel() for p in model.head.parameters())
    try:
        trained = train(task, config.train, run_dir, device=device, log=lambda _: None, about={"entry": trial.name})
        if trained.interrupted:
            raise InterruptedError(f"{trial.folder} was asked to stop at step {trained.step} of {trained.total_steps}.")
        result |= {"nonfinite": None, **_measure(task, run_dir, shared, device)}
    except NonFiniteLossError as error:
        result |= {"nonfinite": error.step + 1, **summary_of_training(run_dir)}
    if not keep:
        shutil.rmtree(run_dir, ignore_errors=True)
    return result


def _measure(task: RetrievalTask, run_dir: Path, shared: SharedData, device: torch.device | str) -> dict[str, Any]:
    model, config = task.model.model, task.config
    weights = load_weights(find_checkpoint(run_dir, "best"))
    own = {key.removeprefix("model."): value for key, value in weights.items() if key.startswith("model.")}
    model.load_state_dict(own)
    model.to(device).eval()
    if config.choose_trust and model.description_weight is not None:
        choose_description_weight(model, shared.dev, shared.dev_pixels)
    found = {
        f"{part.split}/{protocol}": _rsum(model, part, protocol, shown)
        for part, shown in zip(shared.dev, shared.dev_pixels, strict=True)
        for protocol in protocols_for(model)
    }
    return {
        "rsum": {key: rsum for key, (rsum, _) in found.items()},
        "by_image": {key: images for key, (_, images) in found.items()},
        "trust": model.description_weight,
        **summary_of_training(run_dir),
        "gradient": gradient_at_patches(task, device),
        "kept_at_test": kept_at_test(task, device),
    }


def _rsum(
    model: RetrievalModel, part: RetrievalDataset, protocol: Protocol, pixels: Pixels
) -> tuple[float, list[float]]:
    """rSum, and what each image adds to it: so that two rows can be compared image by image."""
    scores = score_dataset(model, part, check_evaluation(part, protocol, model=model), pixels=pixels)
    i2t, t2i = ranks(scores, part.image_of_caption)
    images = rsum_by_image(i2t, t2i, part.image_of_caption)
    return metrics_from_ranks(i2t, t2i).rsum, [round(value, 2) for value in images.tolist()]


def gradient_at_patches(task: RetrievalTask, device: torch.device | str) -> dict[str, float] | None:
    """The loss gradient of the first batch at the patches the image encoder gives; None for a head without pixels.

    `norm` is over all patches of the batch, `share` the part of the patches with any gradient at all.
    """
    model = task.model.model
    if not model.head.uses_pixels:
        return None
    seen: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    batch = move_batch(task.batch(0, 0, 0, 1), torch.device(device))
    hook = model.vision.register_forward_hook(cut)
    training = task.model.training
    task.model.train()
    torch.manual_seed(task.config.train.seed)
    try:
        loss, _ = task.loss(batch, task.config.train.epochs - 1)
        gradient = torch.autograd.grad(loss, seen[0], allow_unused=True)[0]
    finally:
        hook.remove()
        task.model.train(training)
    if gradient is None:
        return {"norm": 0.0, "share": 0.0}
    patches = gradient[:, model.vision.num_prefix_tokens :].float()
    return {"norm": float(patches.norm()), "share": float((patches.abs().amax(dim=-1) > 0).float().mean())}


@torch.no_grad()
def kept_at_test(task: RetrievalTask, device: torch.device | str) -> float | None:
    """Part of the patches that the caption's branch keeps when it does not train, over all pairs of the first batch."""
    model = task.model.model
    if model.head.network is None:
        return None
    with evaluating(task.model):
        batch = move_batch(task.batch(0, 0, 0, 1), torch.device(device))
        tokens, words, mask, _, _ = task.encode(batch)
        images = ImageFeatures(tokens, guides=batch.guides or None)
        masks = model.head(images, TextFeatures(words, mask), want_masks=True).masks
    return float(masks[0].float().mean())


def summary_of_training(run_dir: Path) -> dict[str, Any]:
    """Time, and how the figures moved, from a run's metrics.jsonl. Steps of the first tenth are not timed."""
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if line.get("kind") == "train"]
    if not lines:
        return {}
    timed = [line["seconds"] for line in lines[len(lines) // 10 :]]
    summary: dict[str, Any] = {
        "seconds": sum(line["seconds"] for line in lines),
        "step_ms": 1000 * statistics.median(timed),
        "largest_gradient": max(line["grad_norm"] for line in lines),
        "median_gradient": statistics.median(line["grad_norm"] for line in lines),
        "loss": [lines[0]["loss"], lines[-1]["loss"]],
    }
    for name in ("kept", "kept_dense", "ratio"):
        values = [line[name] for line in lines if name in line]
        if values:
            summary[name] = [values[0], values[-1]]
    return summary
