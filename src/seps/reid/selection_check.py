"""Check the patch selection inside a model: how many patches become how many tokens, what it costs, what it learns.

    print(seps.reid.check(model, batch))

This file needs torch alone (1.13 or newer, Python 3.8 or newer), so that it may be copied beside a DeMo. It takes any
model with a module like `MultiModalSDTPS` in it: children NAME_sparse and NAME_aggr for each sensor.

Shapes: B samples, N patches, K kept, Q merged, C width.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_SPARSE, _AGGR = "_sparse", "_aggr"


@dataclass
class SensorShapes:
    """Of one sensor: N patches, K kept of each sample, Q + 1 tokens, C."""

    name: str
    patches: int
    kept: list[int]
    tokens: int
    width: int


@dataclass
class SelectionCheck:
    """What `check` found; its text is a table.

    gradients: by decision ("plain", "Gumbel") and part ("predictor", "aggregation") the largest absolute gradient of
    each sensor. multiply_adds: of one sample through the whole model, None where torch cannot count them (before 2.1).
    """

    sensors: list[SensorShapes]
    parameters: int
    selection_parameters: int
    multiply_adds: float | None
    gradients: dict[str, dict[str, list[float]]]
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = ["sensor        N        K    Q + 1        C"]
        for sensor in self.sensors:
            kept = sorted(set(sensor.kept))
            shown = str(kept[0]) if len(kept) == 1 else f"{kept[0]}-{kept[-1]}"
            lines.append(f"{sensor.name:<8} {sensor.patches:>6} -> {shown:>5} -> {sensor.tokens:>5} {sensor.width:>8}")
        lines.append(f"{self.parameters / 1e6:.3f} M parameters, the selection {self.selection_parameters / 1e6:.3f} M")
        counted = "not counted by this torch" if self.multiply_adds is None else f"{self.multiply_adds / 1e9:.3f} G"
        lines.append(f"multiply-adds of one sample: {counted}")
        for decision, parts in self.gradients.items():
            shown = "; ".join(f"{part} {', '.join(f'{value:.1e}' for value in row)}" for part, row in parts.items())
            lines.append(f"largest gradients, {decision}: {shown}")
        lines += [f"PROBLEM: {problem}" for problem in self.problems] or ["No problem found."]
        return "\n".join(lines)


def check(model: nn.Module, *batch: Any, **named: Any) -> SelectionCheck:
    """Run a copy of `model` on a batch, `model(*batch, **named)`, in training, and look at its patch selection.

    The model itself stays as it is. Raises ValueError where it holds no selection of patches, or several.
    """
    found = [name for name, module in model.named_modules() if _sensors(module)]
    if len(found) != 1:
        named_so = f" ({', '.join(found)})" if found else ""
        raise ValueError(
            f"The model has {len(found)} modules with children NAME_sparse and NAME_aggr{named_so}: this check needs "
            "exactly one, such as MultiModalSDTPS."
        )
    gradients: dict[str, dict[str, list[float]]] = {}
    problems: list[str] = []
    seen: list[_Recorded] = []
    for decision, gumbel in (("plain", False), ("Gumbel", True)):
        trial = copy.deepcopy(model).train()
        selection = dict(trial.named_modules())[found[0]]
        if not _set_gumbel(selection, gumbel):
            continue
        recorded = _record(selection)
        outputs = trial(*batch, **named)
        loss = sum((part.float().square().mean() for part in _tensors(outputs)), torch.zeros(()))
        torch.autograd.backward(loss)
        gradients[decision], bad = _gradients(selection)
        problems += [f"{decision}: the gradient of {name} is not finite" for name in bad]
        seen.append(recorded)
    sensors = _shapes(selection, seen[0])
    problems = _problems(selection, sensors) + problems
    return SelectionCheck(
        sensors,
        sum(part.numel() for part in model.parameters()),
        sum(part.numel() for part in selection.parameters()),
        _multiply_adds(model, batch, named, len(sensors[0].kept)),
        gradients,
        problems,
    )


@dataclass
class _Recorded:
    """By sensor the patches that went in, the tokens that came out and D."""

    patches: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    keep: dict[str, Tensor] = field(default_factory=dict)


def _sensors(module: nn.Module) -> list[str]:
    """Names of the sensors of a selection module, in the order of its children; none for another module."""
    children = [name for name, _ in module.named_children()]
    return [
        name[: -len(_SPARSE)]
        for name in children
        if name.endswith(_SPARSE) and name[: -len(_SPARSE)] + _AGGR in children
    ]


def _record(selection: nn.Module) -> _Recorded:
    """Note what passes through the selection: by its method `slim` where it has one, else by its call."""
    recorded, names = _Recorded(), _sensors(selection)
    slim = getattr(selection, "slim", None)
    if slim is not None:

        def noted(name: str, patches: Any, *rest: Any, **named: Any) -> Any:
            tokens, keep = slim(name, patches, *rest, **named)
            recorded.patches[name], recorded.tokens[name], recorded.keep[name] = patches[name], tokens, keep
            return tokens, keep

        selection.slim = noted  # type: ignore[assignment]
        return recorded

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        for number, name in enumerate(names):
            recorded.patches[name] = inputs[number]
            recorded.tokens[name], recorded.keep[name] = output[number], output[len(names) + number]

    selection.register_forward_hook(hook)
    return recorded


def _set_gumbel(selection: nn.Module, gumbel: bool) -> bool:
    """Switch Gumbel on or off; False for a selection that cannot be switched."""
    if hasattr(selection, "use_gumbel"):
        selection.use_gumbel = gumbel  # type: ignore[assignment]
        return True
    parts = [getattr(selection, name + _SPARSE) for name in _sensors(selection)]
    for part in parts:
        if hasattr(part, "decision"):
            part.decision = "relaxed" if gumbel else "topk"
        elif gumbel:
            return False
    return True


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.requires_grad else []
    parts = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _gradients(selection: nn.Module) -> tuple[dict[str, list[float]], list[str]]:
    """The largest absolute gradient of each sensor's predictor and aggregation, and the names of those not finite."""
    found: dict[str, list[float]] = {"predictor": [], "aggregation": []}
    bad = []
    for name in _sensors(selection):
        for part, end in (("predictor", _SPARSE), ("aggregation", _AGGR)):
            grads = [p.grad for p in getattr(selection, name + end).parameters() if p.grad is not None]
            found[part].append(max((float(grad.abs().max()) for grad in grads), default=0.0))
            if any(not bool(torch.isfinite(grad).all()) for grad in grads):
                bad.append(name + end)
    return found, bad


def _shapes(selection: nn.Module, recorded: _Recorded) -> list[SensorShapes]:
    names = _sensors(selection)
    missing = [name for name in names if name not in recorded.patches]
    if missing:
        raise ValueError(f"The model did not call its selection for {', '.join(missing)}: nothing can be checked.")
    return [
        SensorShapes(
            name,
            recorded.patches[name].shape[1],
            (recorded.keep[name].detach() > 0.5).sum(dim=1).tolist(),
            recorded.tokens[name].shape[1],
            recorded.tokens[name].shape[2],
        )
        for name in names
    ]


def _problems(selection: nn.Module, sensors: list[SensorShapes]) -> list[str]:
    """What does not agree: with the module's own numbers where it has them, and between the sensors."""
    found = []
    built = getattr(selection, "num_patches", None)
    for sensor in sensors:
        if isinstance(built, int) and sensor.patches != built:
            hint = ": is a CLS token left in?" if sensor.patches == built + 1 else ""
            found.append(f"{sensor.name} has {sensor.patches} patches, the module was built for {built}{hint}")
        ratio = getattr(getattr(selection, sensor.name + _SPARSE), "sparse_ratio", None)
        wanted = None if ratio is None else math.ceil(sensor.patches * ratio)
        if wanted is not None and set(sensor.kept) != {wanted}:
            found.append(f"{sensor.name} keeps {sorted(set(sensor.kept))} of {sensor.patches}, expected {wanted}")
    if len({(sensor.tokens, sensor.width) for sensor in sensors}) > 1:
        found.append("the sensors have tokens of different shapes: " + str([(s.tokens, s.width) for s in sensors]))
    return found


def _multiply_adds(model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any], samples: int) -> float | None:
    """Of one sample; None where torch counts none (before 1.13)."""
    fresh = copy.deepcopy(model).train()
    try:
        from torch.utils.flop_counter import FlopCounterMode
    except ImportError:  # before torch 2.1
        return _products(fresh, batch, named, samples)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    counter = FlopCounterMode(display=False)
    # The fused attention of CPUs is one operator, which the counter passes over.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        fresh(*batch, **named)
    return float(counter.get_total_flops()) / 2 / samples


def _products(model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any], samples: int) -> float | None:
    """The multiply-adds of matrix products and convolutions, by the operators that run."""
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return None
    counts: list[int] = []

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = operator(*args, **(kwargs or {}))
            name = operator._schema.name.split("::")[-1]
            if name in ("mm", "bmm"):
                counts.append(made.numel() * args[0].shape[-1])
            elif name in ("addmm", "baddbmm"):
                counts.append(made.numel() * args[1].shape[-1])
            elif name == "convolution":
                counts.append(made.numel() * args[1][0].numel())
            return made

    with torch.no_grad(), Counter():  # type: ignore[no-untyped-call]
        model(*batch, **named)
    return sum(counts) / samples
