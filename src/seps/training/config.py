"""The settings of a training run: the only place their defaults live."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from seps.method.config import ConfigError
from seps.parsing import is_number, is_whole

Schedule = Literal["cosine", "step", "constant", "epoch-cosine"]
Optimizer = Literal["adamw", "adam"]
Precision = Literal["float32", "bf16"]

# Changing one of these between two starts of a run does not change what the run computes; but chunk_size, and the
# number of processes, change which numbers dropout draws.
RESUME_MAY_CHANGE = frozenset(
    {"chunk_size", "eval_every", "checkpoint_every", "log_every", "keep_last", "prefetch", "workers"}
)


class CheckedSettings:
    """What sections of settings share: checks that name field, value and remedy."""

    def _require(self, name: str, good: bool, remedy: str) -> None:
        if not good:
            raise ConfigError(f"{type(self).__name__}.{name} = {getattr(self, name)!r}: {remedy}.")

    def _require_each(self, names: str, good: Callable[[Any], bool], remedy: str) -> None:
        for name in names.split():
            self._require(name, good(getattr(self, name)), remedy)

    def _require_choice(self, name: str, choices: object) -> None:
        self._require(name, getattr(self, name) in get_args(choices), f"choose one of {get_args(choices)}")


@dataclass(frozen=True)
class TrainConfig(CheckedSettings):
    """How to train, for both applications. Raises ConfigError naming the field, its value and the remedy."""

    epochs: int = 10
    """Set the number of passes over the data. A run started again with more epochs is extended: each further step
    has the learning rate of a run of the new length (schedule and warmup_fraction are computed again; finished
    steps stay)."""
    batch_size: int = 64
    """Set the number of samples per optimiser step, over all processes together."""
    learning_rate: float = 2e-4
    """Set the peak learning rate of new parts."""
    backbone_lr_scale: float = 0.1
    """Multiply the learning rate of pretrained parts, relative to learning_rate."""
    optimizer: Optimizer = "adamw"
    """Choose the optimiser. "adamw": biases, norms and one-dimensional tensors have no weight decay. "adam": the
    decay is L2 in the gradient of every parameter, as in TransReID and DeMo."""
    bias_lr_scale: float = 1.0
    """Multiply the learning rate of biases, in the parts that learn at the full learning_rate."""
    weight_decay: float = 1e-4
    """Set the weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Set the two decay rates of the moments of Adam."""
    warmup_steps: int = 0
    """Increase the learning rate linearly over this many steps; 0 uses warmup_fraction."""
    warmup_fraction: float = 0.05
    """Increase the learning rate linearly over this fraction of the run (warmup_steps = 0)."""
    schedule: Schedule = "cosine"
    """Choose the learning rate schedule. "cosine": down to final_lr_fraction of the peak. "step": multiplied by
    step_gamma at the start of each of step_epochs. "constant". "epoch-cosine", as in TransReID and DeMo: constant
    within an epoch; in the warm-up epochs (warmup_fraction) every group goes linearly from warmup_start x
    learning_rate to its rate; then by a cosine over all epochs, including those of the warm-up, to
    final_lr_fraction x learning_rate, which is one rate for all groups."""
    step_epochs: tuple[int, ...] = ()
    """Multiply the learning rate by step_gamma at the start of these epochs (schedule "step")."""
    step_gamma: float = 0.1
    """Set the factor of schedule "step"."""
    final_lr_fraction: float = 0.0
    """End the cosine at this fraction of the peak learning rate."""
    warmup_start: float = 0.0
    """Start the warm-up at this fraction of learning_rate (schedule "epoch-cosine")."""
    lr_noise: float = 0.0
    """Multiply the rate of each epoch but the last by 1 + n, with n from a normal distribution truncated at this
    bound (schedule "epoch-cosine"; published: 0.67); 0 is off."""
    clip_norm: float = 2.0
    """Clip the gradient norm to this value; 0 does not clip (the norm is reported in both cases)."""
    precision: Precision = "float32"
    """Choose the precision: "float32", or "bf16", which runs the loss under autocast; the weights stay float32."""
    chunk_size: int = 0
    """Encode this many samples at once by cached gradients, which saves memory; 0 encodes the whole batch."""
    seed: int = 0
    """Seed all randomness of a run, together with step number and rank. Each process and each chunk draws separate
    dropout: runs are bit-identical only with the same number of processes and the same chunk_size."""
    eval_every: int = 1
    """Evaluate every so many epochs and at the end; 0 evaluates only at the end."""
    checkpoint_every: int = 0
    """Save a checkpoint every so many steps, in addition to those at every evaluation and at the end; 0 adds none."""
    log_every: int = 1
    """Write a line to metrics.jsonl every so many steps."""
    ema_decay: float = 0.0
    """Evaluate a running average of the weights with this decay instead of the weights; 0 is off."""
    keep_last: int = 2
    """Keep this many of the newest checkpoints; the best always stays."""
    prefetch: int = 2
    """Prepare this many batches ahead; 0 prepares them in the training loop."""
    workers: int = 1
    """Prepare batches with this many threads."""

    def __post_init__(self) -> None:
        # YAML and JSON give lists where tuples are meant.
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "step_epochs", tuple(self.step_epochs))
        for option in fields(self):
            self._check_type(option.name)
        off = "must not be negative; 0 switches it off"
        self._require_each("epochs batch_size log_every keep_last workers", lambda v: v >= 1, "must be at least 1")
        self._require_each("warmup_steps chunk_size seed eval_every checkpoint_every prefetch", lambda v: v >= 0, off)
        rates = "learning_rate step_gamma bias_lr_scale"
        self._require_each(rates, lambda v: 0 < v < math.inf, "must be a finite number above 0")
        scales = "backbone_lr_scale weight_decay clip_norm"
        self._require_each(scales, lambda v: 0 <= v < math.inf, "must be a finite number, 0 or more")
        off = "must be at least 0 and below 1; 0 switches it off"
        self._require_each("warmup_fraction ema_decay lr_noise", lambda v: 0 <= v < 1, off)
        self._require_each("final_lr_fraction warmup_start", lambda v: 0 <= v <= 1, "must lie between 0 and 1")
        self._require_choice("optimizer", Optimizer)
        self._require_choice("schedule", Schedule)
        self._require_choice("precision", Precision)
        good_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._require("betas", good_betas, "give two numbers, each at least 0 and below 1, such as (0.9, 0.999)")
        self._check_step_epochs()
        self._check_epoch_cosine()

    def _check_type(self, name: str) -> None:
        """Numbers must be numbers: a text or a bool from a file of settings would fail later, or count as 1."""
        default, value = TrainConfig.__dataclass_fields__[name].default, getattr(self, name)
        parts = value if isinstance(default, tuple) else (value,)
        if isinstance(default, int) or name == "step_epochs":
            whole = all(map(is_whole, parts))
            self._require(name, whole, "must be a whole number" if name != "step_epochs" else "must be whole numbers")
        elif isinstance(default, float) or name == "betas":
            good = all(map(is_number, parts))
            self._require(name, good, "must be a number" if name != "betas" else "must be two numbers")

    def _check_step_epochs(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.step_epochs), self.step_epochs, strict=False))
        self._require("step_epochs", ascending, "give rising epoch numbers from 1, such as (15, 25)")
        if self.schedule == "step":
            self._require("step_epochs", bool(self.step_epochs), 'schedule "step" needs at least one epoch')
        else:
            remedy = f'has no effect with schedule "{self.schedule}": leave it out'
            self._require("step_epochs", not self.step_epochs, remedy)

    def _check_epoch_cosine(self) -> None:
        if self.schedule == "epoch-cosine":
            self._require("warmup_steps", not self.warmup_steps, "give warmup_fraction: this schedule counts in epochs")
            return
        remedy = f'has no effect with schedule "{self.schedule}": use "epoch-cosine"'
        for name in ("warmup_start", "lr_noise"):
            self._require(name, not getattr(self, name), remedy)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def differences(self, earlier: Mapping[str, Any]) -> list[str]:
        """What differs from the JSON of an earlier start and would change the run, as 'field: old -> new'.

        More epochs than before are no difference: such a run is extended.
        """
        now = self.to_json()
        names = [field.name for field in fields(self) if field.name not in RESUME_MAY_CHANGE]
        return [
            f"{name}: {earlier[name]!r} -> {now[name]!r}"
            for name in names
            if name in earlier and earlier[name] != now[name] and not (name == "epochs" and now[name] > earlier[name])
        ]
