"""Train a row for many runs at a time, their weights stacked, and evaluate them by query.

A run is a set (data seed) and a seed. The runs of a job are independent: a batched call (`torch.func.vmap`) computes
what a loop over them would, with kernels R times as large, which is what fills a GPU with a network this small.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.selection.data import Batch, Batches, Sets, evaluation_batch
from benchmarks.selection.model import SMALL, NetSize, StudyModel, matched
from benchmarks.selection.rows import SWAPS, Row
from seps.metrics.reid import reid_metrics
from seps.reid.synthetic.truth import KINDS
from seps.training.seeding import derive_seed

Stack = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Parameters and buffers of R models, each tensor with R in front."""


@dataclass(frozen=True)
class Recipe:
    """How every row is trained: three times the 344 steps of the former study, the last weights are taken."""

    steps: int = 1032
    identities: int = 16
    images: int = 4
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.05
    net: NetSize = SMALL


def attention(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The attention to use: the fused one for CPUs is not batched and would run model by model."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else contextlib.nullcontext()


class OutOfTime(Exception):
    """The time is over in the middle of a job."""


def make_stack(
    row: Row, sets: Sets, runs: Sequence[tuple[int, int]], recipe: Recipe, device: torch.device
) -> tuple[StudyModel, Stack]:
    """A model to call, and the first weights of all runs, each drawn from its own seed."""
    identities = int(sets.pids[sets.split("train")].max()) + 1
    models = []
    for data_seed, seed in runs:
        torch.manual_seed(derive_seed(data_seed, seed, 2))
        models.append(StudyModel(row, sets.grid, identities, recipe.net).to(device))
    params, buffers = stack_module_state(models)  # type: ignore[arg-type]
    return models[0], (params, buffers)


def train_row(
    row: Row,
    sets: Sets,
    runs: Sequence[tuple[int, int]],
    recipe: Recipe,
    deadline: float = math.inf,
    heard: Callable[[int, float], None] | None = None,
) -> tuple[StudyModel, Stack, list[float]]:
    """Train all runs of a row; the model, the stacked weights, and each run's mean loss of the last 50 steps.

    `heard(step, loss)` is called every 100 steps. Raises OutOfTime when `time.monotonic()` passes `deadline`.
    """
    device = sets.features.device
    model, (params, buffers) = make_stack(row, sets, runs, recipe, device)
    batches = Batches(sets, runs, recipe.steps, recipe.identities, recipe.images)
    groups = torch.arange(recipe.identities, device=device).repeat_interleave(recipe.images)
    decayed = [value for value in params.values() if value.ndim > 2]
    others = [value for value in params.values() if value.ndim <= 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )

    def loss_of(params: dict[str, Tensor], buffers: dict[str, Tensor], *batch: Tensor) -> Tensor:
        (loss,) = functional_call(model, (params, buffers), (*batch, groups))
        return loss

    all_losses = vmap(loss_of)
    model.train()
    tail = torch.zeros(len(runs), device=device)
    window = min(50, recipe.steps)
    for step in range(recipe.steps):
        if time.monotonic() > deadline:
            raise OutOfTime(f"{row.name} stopped at step {step} of {recipe.steps}")
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate(step, recipe)
        batch = batches(step)
        precision = torch.autocast(device.type, torch.bfloat16, enabled=False)
        with precision, attention(device):
            losses = all_losses(params, buffers, *vars(batch).values())
        optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        optimizer.step()
        if step >= recipe.steps - window:
            tail += losses.detach() / window
        if heard is not None and step % 100 == 0:
            heard(step, float(losses.detach().mean()))
    return model, (params, buffers), tail.tolist()


def rate(step: int, recipe: Recipe) -> float:
    """The part of the learning rate at a step: linear warm-up, then a cosine to zero."""
    warm = max(1, round(recipe.warmup * recipe.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, recipe.steps - warm)))


@torch.no_grad()
def evaluate(
    model: StudyModel, stack: Stack, row: Row, sets: Sets, runs: Sequence[tuple[int, int]], shots: int = 60
) -> list[dict[str, Any]]:
    """What `row` makes of trained weights on the test identities: by run the average precision of every query, in
    percent, for the patterns 1 (original), 2 (the branch) and 3 (both), and the part kept of each kind of pixels."""
    trained_as = model.row
    model.become(row)
    model.eval()
    try:
        device = sets.features.device
        which = torch.tensor([sets.seeds.index(data_seed) for data_seed, _ in runs], device=device)
        query, gallery = sets.split("query"), sets.split("gallery")
        parts, kept = [], torch.zeros(2, len(runs), len(KINDS), device=device)
        for some in torch.cat([query, gallery]).split(shots):
            batch = evaluation_batch(sets, which, some)
            found = features_of(model, stack, batch)
            parts.append(found[:3])
            if found[3].ndim == 4:
                kept[0] += (found[3][..., None] * batch.shares).sum(dim=(1, 2, 3))
                kept[1] += batch.shares.sum(dim=(1, 2, 3))
        features = [torch.cat(column, dim=1) for column in zip(*parts, strict=True)]
        return [
            {
                "row": row.name,
                "data_seed": data_seed,
                "seed": seed,
                "pids": sets.pids[query].tolist(),
                "ap": _precisions(row, [part[run] for part in features], sets),
                "kept": _kept(kept[:, run]),
            }
            for run, (data_seed, seed) in enumerate(runs)
        ]
    finally:
        model.become(trained_as)


def features_of(model: StudyModel, stack: Stack, batch: Batch) -> tuple[Tensor, ...]:
    """Features of both branches, tokens and decisions of R models, each (R, B, ...), in float32."""

    def one(params: dict[str, Tensor], buffers: dict[str, Tensor], *batch: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = functional_call(model, (params, buffers), batch)
        return found

    with attention(batch.features.device):
        return vmap(one)(*stack, batch.features, batch.shares, batch.noise)  # type: ignore[no-any-return]


def _precisions(row: Row, features: list[Tensor], sets: Sets) -> dict[str, list[float]]:
    """Average precision of each query by pattern, from one run's features of all queries, then all gallery shots."""
    query, gallery = sets.split("query"), sets.split("gallery")
    original, branch, tokens = features
    cosines = {"1": _cosines(original, len(query))}
    if row.branch != "none":
        second = matched(tokens[: len(query)], tokens[len(query) :]) if row.branch == "match" else None
        cosines["2"] = _cosines(branch, len(query)) if second is None else second
        cosines["3"] = (cosines["1"] + cosines["2"]) / 2
    labels = (sets.pids[query], sets.pids[gallery], sets.cameras[query], sets.cameras[gallery])
    found = {}
    for pattern, similarity in cosines.items():
        metrics = reid_metrics(1 - similarity.float(), *labels)
        if metrics.precisions is None or metrics.valid_queries != len(query):
            raise ValueError(f"{metrics.valid_queries} of {len(query)} queries have a match in another camera.")
        found[pattern] = [round(100 * value, 3) for value in metrics.precisions.tolist()]
    return found


def _cosines(features: Tensor, queries: int) -> Tensor:
    unit = torch.nn.functional.normalize(features, dim=1)
    return unit[:queries] @ unit[queries:].T


def _kept(sums: Tensor) -> dict[str, float]:
    """The part kept of all and of each kind; empty where nothing decides."""
    kept, area = sums.double().cpu()
    if not float(area.sum()):
        return {}
    parts = {kind: float(kept[number] / area[number].clamp_min(1e-9)) for number, kind in enumerate(KINDS)}
    return {"all": float(kept.sum() / area.sum()), **parts}


def run_row(
    row: Row,
    sets: Sets,
    runs: Sequence[tuple[int, int]],
    recipe: Recipe,
    deadline: float = math.inf,
    heard: Callable[[int, float], None] | None = None,
) -> list[dict[str, Any]]:
    """Train a row and evaluate it, and its weights as every row that `SWAPS` names: one line a run and evaluation."""
    started = time.monotonic()
    model, stack, losses = train_row(row, sets, runs, recipe, deadline, heard)
    seconds = time.monotonic() - started
    lines = evaluate(model, stack, row, sets, runs)
    for line, loss in zip(lines, losses, strict=True):
        line |= {"loss": round(loss, 5), "seconds": round(seconds, 1), "stacked": len(runs)}
    for swap in SWAPS:
        if swap.of == row.name:
            lines += [{**line, "row": swap.name} for line in evaluate(model, stack, swap.row, sets, runs)]
    return lines
