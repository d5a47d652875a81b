"""A loss or gradient that is not finite: stop, and keep the batch that caused it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seps.files import write_json
from seps.training.batches import leaves

_LONGEST_TEXT = 2000


class NonFiniteLossError(ValueError):
    """Training stopped at a NaN or infinity: `path` is the saved batch, `step` the steps done before it."""

    def __init__(self, message: str, path: Path, step: int) -> None:
        super().__init__(message)
        self.path, self.step = path, step


def nonfinite_error(
    what: str, folder: Path, batch: Any, step: int, rank: int, metrics: Mapping[str, float]
) -> NonFiniteLossError:
    """The error to raise when `what` ("loss", "gradient norm") of the step after `step` is not finite.

    The tensors of `batch` are saved in `folder` as safetensors, everything else as JSON beside them.
    """
    path = folder / f"nonfinite-step-{step:08d}-rank-{rank}.safetensors"
    try:
        _save(path, batch, {"step": step, "rank": rank, "metrics": {name: repr(v) for name, v in metrics.items()}})
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


def _save(path: Path, batch: Any, about: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in leaves(batch):
        if isinstance(value, Tensor):
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            others[name] = value if plain else repr(value)[:_LONGEST_TEXT]
    save_file(tensors, str(path))
    bad = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    write_json(path.with_suffix(".json"), {**about, "not_finite": bad, "other_values": others})
