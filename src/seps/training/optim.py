"""AdamW or Adam over parameter groups, the learning-rate schedule, clipping, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seps.training.config import TrainConfig
from seps.training.task import ParameterGroup, Task

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def backbone_groups(
    model: nn.Module, is_backbone: Callable[[str], bool], lr: float, backbone_scale: float
) -> list[ParameterGroup]:
    """Two groups: parameters whose name `is_backbone` accepts at lr x backbone_scale, the others at lr."""
    backbone: list[nn.Parameter] = []
    head: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (backbone if is_backbone(name) else head).append(parameter)
    groups = [{"params": backbone, "lr": lr * backbone_scale}, {"params": head, "lr": lr}]
    return [group for group in groups if group["params"]]


def undecayed_names(model: nn.Module) -> set[str]:
    """Parameters that weight decay leaves alone: biases, norms, and tensors below two dimensions."""
    names = {
        name for name, parameter in model.named_parameters() if parameter.ndim < 2 or name.rpartition(".")[2] == "bias"
    }
    for prefix, module in model.named_modules():
        if isinstance(module, _NORMS):
            names |= {f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)}
    return names


def split_biases(
    model: nn.Module, groups: Sequence[ParameterGroup], learning_rate: float, scale: float
) -> list[ParameterGroup]:
    """The groups at the full `learning_rate` in two: biases at `scale` times it, and the others."""
    biases = {id(parameter) for name, parameter in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    result: list[ParameterGroup] = []
    for group in groups:
        if group["lr"] != learning_rate:
            result.append(group)
            continue
        for chosen, lr in ((False, group["lr"]), (True, group["lr"] * scale)):
            members = [parameter for parameter in group["params"] if (id(parameter) in biases) == chosen]
            result += [{**group, "params": members, "lr": lr}] if members else []
    return result


def split_decay(
    model: nn.Module, groups: Sequence[ParameterGroup], weight_decay: float, *, everything: bool = False
) -> list[ParameterGroup]:
    """Each group in two, decayed and not (a group that sets its own weight_decay stays as it is).

    `everything`: biases, norms and one-dimensional tensors are decayed too.
    Raises ValueError for a parameter that is in two groups or not in the model (it would not be saved).
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    undecayed = set() if everything else undecayed_names(model)
    seen: set[str] = set()
    result: list[ParameterGroup] = []
    for group in groups:
        parts: dict[float, list[tuple[str, nn.Parameter]]] = {}
        for parameter in group["params"]:
            name = name_of.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"parameter_groups gave a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "task's model, so no checkpoint would hold it: register it in the model."
                )
            if name in seen:
                raise ValueError(f"parameter_groups put the parameter '{name}' in two groups: keep it in one.")
            seen.add(name)
            decay = group.get("weight_decay", 0.0 if name in undecayed else weight_decay)
            parts.setdefault(decay, []).append((name, parameter))
        for decay, members in parts.items():
            result.append(
                {
                    **group,
                    "params": [parameter for _, parameter in members],
                    "names": [name for name, _ in members],
                    "weight_decay": decay,
                    "initial_lr": group["lr"],
                }
            )
    return result


def build_optimizer(task: Task, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or Adam over the task's parameter groups; frozen parameters are in it too and may thaw later."""
    model = task.model
    custom = getattr(task, "parameter_groups", None)
    groups: list[ParameterGroup]
    if custom is None:
        groups = [{"params": list(model.parameters()), "lr": config.learning_rate}]
    else:
        groups = list(custom(config.learning_rate, config.backbone_lr_scale))
    if config.bias_lr_scale != 1:
        groups = split_biases(model, groups, config.learning_rate, config.bias_lr_scale)
    adam = config.optimizer == "adam"
    groups = split_decay(model, groups, config.weight_decay, everything=adam)
    if not groups:
        raise ValueError("The task's model has no parameters to train: check what parameter_groups returns.")
    kind = torch.optim.Adam if adam else torch.optim.AdamW
    return kind(groups, lr=config.learning_rate, betas=config.betas)


def lr_factor(step: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """What the peak rate is multiplied by for the optimiser step number `step` (from 0)."""
    total = config.epochs * steps_per_epoch
    warmup = config.warmup_steps or round(config.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "step":
        epoch = step // steps_per_epoch
        return float(config.step_gamma ** sum(start <= epoch for start in config.step_epochs))
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, total - warmup)
        low = config.final_lr_fraction
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return 1.0


_NOISE_SEED = 42
"""Of the published schedule: the noise of epoch t (from 1) comes from a generator with the seed 42 + t."""


def epoch_cosine_rate(epoch: int, peak: float, config: TrainConfig) -> float:
    """The rate of a group whose own rate is `peak` in `epoch` (from 1), by the schedule of TransReID and DeMo.

    Its start and its end are rates, not parts of the peak: a group that learns slowly starts *above* its peak.
    """
    start, end = config.warmup_start * config.learning_rate, config.final_lr_fraction * config.learning_rate
    warmup = round(config.warmup_fraction * config.epochs)
    if epoch < warmup:
        rate = start + epoch * (peak - start) / warmup
    elif epoch < config.epochs:
        rate = end + 0.5 * (peak - end) * (1 + math.cos(math.pi * epoch / config.epochs))
    else:
        return end
    if config.lr_noise:
        generator, noise = torch.Generator().manual_seed(_NOISE_SEED + epoch), math.inf
        while abs(noise) >= config.lr_noise:
            noise = float(torch.randn(1, generator=generator))
        rate *= 1 + noise
    return rate


def set_scheduled_rates(
    optimizer: torch.optim.Optimizer, step: int, steps_per_epoch: int, config: TrainConfig
) -> float:
    """Give every group its rate at optimiser step number `step` (from 0); returns the largest, for the log."""
    if config.schedule != "epoch-cosine":
        return set_learning_rate(optimizer, lr_factor(step, steps_per_epoch, config))
    for group in optimizer.param_groups:
        group["lr"] = epoch_cosine_rate(step // steps_per_epoch + 1, group["initial_lr"], config)
    return max(float(group["lr"]) for group in optimizer.param_groups)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Give every group its own peak times `factor`; returns the largest rate, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return max(float(group["lr"]) for group in optimizer.param_groups)


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float) -> float:
    """Scale the gradients to a norm of at most `clip_norm` (0: leave them); returns the norm before."""
    limit = clip_norm if clip_norm > 0 else math.inf
    return float(torch.nn.utils.clip_grad_norm_(list(parameters), limit))


class WeightAverage:
    """Exponential moving average of the parameters that learn (buffers are taken from the model as they are).

    The decay rises to its value over the first steps, min(decay, (1 + n) / (10 + n)), so that the random
    start is soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step number `step` (from 0)."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self.model.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(parameter, weight)
            elif parameter.requires_grad:
                self.weights[name] = parameter.detach().clone()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the averaged weights; afterwards its own again, bit for bit."""
        own: dict[str, Tensor] = {}
        parameters: dict[str, Any] = dict(self.model.named_parameters())
        try:
            for name, average in self.weights.items():
                own[name] = parameters[name].data
                parameters[name].data = average
            yield
        finally:
            for name, value in own.items():
                parameters[name].data = value
