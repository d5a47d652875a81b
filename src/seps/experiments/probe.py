"""What a run says about its training: does the gradient reach the patches, did the losses move, was it stable."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.train.task import RetrievalTask
from seps.training.batches import move_batch
from seps.training.tracking import read_metrics


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
    if not isinstance(model.head, SlimmingHead):
        return None
    training = task.model.training
    task.model.eval()
    tokens, words, mask, _, _ = task.encode(move_batch(task.batch(0, 0, 0, 1), torch.device(device)))
    masks = model.head(ImageFeatures(tokens), TextFeatures(words, mask), want_masks=True).masks
    task.model.train(training)
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
