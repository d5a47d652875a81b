"""A loss or gradient that is not finite: stop, and keep the batch that caused it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seps.training.batches import leaves

_LONGEST_TEXT = 2000


class NonFiniteLossError(ValueError):
    """Training stopped at a NaN or infinity: `path` is the saved batch, `step` the steps done before it."""

    def __init__(self, message: str, path: Path, step: int) -> None:
        super().__init__(message)
        self.path, self.step = path, step


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)[:_LONGEST_TEXT]


def save_batch(folder: Path, batch: Any, step: int, rank: int, metrics: Mapping[str, float]) -> Path:
    """Write the tensors of `batch` as safetensors (returned) and everything else as JSON beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"nonfinite-step-{step:08d}-rank-{rank}.safetensors"
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in leaves(batch):
        if isinstance(value, Tensor):
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        else:
            others[name] = _plain(value)
    save_file(tensors, str(path))
    about = {
        "step": step,
        "rank": rank,
        "metrics": {name: repr(value) for name, value in metrics.items()},
        "not_finite": [
            name
            for name, value in tensors.items()
            if value.is_floating_point() and not bool(torch.isfinite(value).all())
        ],
        "other_values": others,
    }
    path.with_suffix(".json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return path


def nonfinite_error(
    what: str, folder: Path, batch: Any, step: int, rank: int, metrics: Mapping[str, float]
) -> NonFiniteLossError:
    """The error to raise when `what` ("loss", "gradient norm") of the step after `step` is not finite."""
    path = folder / f"nonfinite-step-{step:08d}-rank-{rank}.safetensors"
    try:
        path = save_batch(folder, batch, step, rank, metrics)
        saved = f"The batch is saved in {path}, its other values and figures in the .json beside it."
    except Exception as error:
        # The stop matters more than the evidence: a full disk must not hide the non-finite loss.
        saved = f"The batch could not be saved in {path} ({error})."
    return NonFiniteLossError(
        f"The {what} at step {step + 1} is not finite ({metrics.get(what.replace(' ', '_'))}). {saved} "
        "Look there for bad input; else lower learning_rate, lengthen the warm-up, lower clip_norm or use "
        'precision "float32". Checkpoints written before this step are intact.',
        path,
        step,
    )
