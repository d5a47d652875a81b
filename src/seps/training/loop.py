"""The training loop: steps, evaluations, checkpoints, and continuing where a run stopped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from seps.hub.tensor_names import fitted, transformers_version, versions_sentence
from seps.method.checks import values_unchecked
from seps.training import distributed as processes
from seps.training.batches import Prefetcher, move_batch
from seps.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    load,
    load_model_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
)
from seps.training.config import TrainConfig
from seps.training.distributed import DistributedInfo
from seps.training.gradcache import Forward, cached_forward, plain_forward
from seps.training.interrupt import InterruptGuard
from seps.training.nonfinite import nonfinite_error
from seps.training.one_run import only_run_in
from seps.training.optim import WeightAverage, build_optimizer, clip_gradients, set_scheduled_rates
from seps.training.seeding import seed_everything
from seps.training.task import CachedTask, Figures, Task
from seps.training.tracking import MetricsLog, Progress, SilentProgress, refuse_foreign

# Keeps the random numbers of an evaluation apart from those of the steps.
_EVALUATION = 1


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` returns.

    `interrupted`: it was asked to stop and saved; the same call continues it. `best_score` and `best_checkpoint` are
    None before the first finite score; without a dev set the score stays None, and the last checkpoint is the best.
    `best_step` is 0 where no later weights score higher than those a run began with (`Task`: begins_trained).
    `metrics` is the last evaluation of this call (empty without one).
    """

    step: int
    total_steps: int
    resumed_from: int
    interrupted: bool
    best_score: float | None
    best_checkpoint: Path | None
    last_checkpoint: Path | None
    metrics: dict[str, float]
    best_step: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    """What the task says about its figures, such as the protocol they are taken under."""


def train(
    task: Task,
    config: TrainConfig,
    run_dir: Path | str,
    *,
    distributed: DistributedInfo | None = None,
    device: torch.device | str | None = None,
    resume: bool = True,
    progress: Progress | None = None,
    log: Callable[[str], None] | None = None,
    about: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train `task` as `config` says, into `run_dir`; a run already there is continued.

    The model is moved to `device` (default: that of `distributed` if it is a GPU, else where the model is).
    With several processes call this on each, inside `distributed.process_group`. `log` takes sentences for
    the user (default: python's logger "seps.training"), `about` JSON values to keep in every state.json, such
    as how to build the model. SIGINT and SIGTERM end it after the step, saved; a second SIGINT raises
    KeyboardInterrupt.

    Raises ValueError for a task or a run folder that does not fit the configuration, and where another run is training
    into that folder; CheckpointError when a checkpoint cannot be written or read, NonFiniteLossError when the loss or
    gradient is NaN or infinite.
    """
    log = log or logging.getLogger("seps.training").info
    run = _Run(task, config, Path(run_dir), distributed or DistributedInfo(), device, log, dict(about or {}))
    with only_run_in(run.run_dir):
        run.restore(resume)
        with InterruptGuard() as guard:
            # One bar for all processes.
            shown = progress if progress is not None and run.info.rank == 0 else SilentProgress()
            interrupted = run.train(guard, shown)
        return run.result(interrupted)


def _read(figures: Figures) -> dict[str, float]:
    """Plain numbers; what lies on a GPU comes over in one piece."""
    tensors = {name: value for name, value in figures.items() if isinstance(value, torch.Tensor)}
    values = torch.stack([value.detach().float().reshape(()) for value in tensors.values()]).tolist() if tensors else []
    read = dict(zip(tensors, values, strict=True))
    return {name: read[name] if name in read else float(value) for name, value in figures.items()}


class _Run:
    """One run: the objects that change while it trains, and each thing that can happen to them."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        run_dir: Path,
        info: DistributedInfo,
        device: torch.device | str | None,
        log: Callable[[str], None],
        about: dict[str, Any],
    ) -> None:
        if info.world != processes.world_size():
            raise ValueError(
                f"distributed says {info.world} processes but {processes.world_size()} have joined: call "
                "train inside seps.training.distributed.process_group."
            )
        self.task, self.config, self.info, self.about = task, config, info, about
        self.model = task.model
        self.labels: dict[str, str] = dict(getattr(task, "labels", {}))
        self.device = self._place(device)
        self.per_epoch = task.steps_per_epoch(info.world)
        if self.per_epoch < 1:
            raise ValueError(
                f"The task has {self.per_epoch} steps in an epoch with batch_size {config.batch_size}: give "
                "it more data or a smaller batch_size."
            )
        self.total = self.per_epoch * config.epochs
        self.cached = self._cached_task()
        self.optimizer = build_optimizer(task, config)
        self.average = WeightAverage(self.model, config.ema_decay) if config.ema_decay else None
        self.run_dir = run_dir
        self.store = CheckpointStore(run_dir, config.keep_last, log)
        self.log = log if info.rank == 0 else (lambda _: None)
        self.step = self.resumed_from = 0
        self.saved_step = self.evaluated_step = -1
        self.best: dict[str, Any] | None = None
        self.metrics: dict[str, float] = {}
        self.metrics_log: MetricsLog | None = None
        self.epoch_begun = -1

    def _place(self, device: torch.device | str | None) -> torch.device:
        if device is None and self.info.device.type == "cuda":
            device = self.info.device
        if device is None:
            return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        self.model.to(device)
        return torch.device(device)

    def _cached_task(self) -> CachedTask | None:
        if self.config.chunk_size == 0:
            return None
        if not isinstance(self.task, CachedTask):
            raise ValueError(
                f"TrainConfig.chunk_size = {self.config.chunk_size}, but {type(self.task).__name__} has no "
                "split, encode and loss_from_features for cached gradients: set chunk_size to 0."
            )
        return self.task

    def restore(self, resume: bool) -> None:
        """Continue from the newest whole checkpoint, if any, read by the first process and given to all."""
        found = processes.on_first_rank(lambda: self._read(resume))
        state = processes.broadcast_json(found.state if found else None)
        if state is None:
            processes.broadcast_module(self.model)
            return
        source = f"The checkpoint of step {state['step']} in {self.run_dir}"
        tensors = processes.broadcast_tensors(found.model if found else None)
        load_model_tensors(self.model, tensors, source, versions_sentence(state.get("transformers")))
        optimizer = processes.broadcast_tensors(found.optimizer if found else None)
        load_optimizer_tensors(self.optimizer, optimizer, state["groups"])
        ema = processes.broadcast_tensors(found.ema if found else None)
        if self.average is not None:
            own = dict(self.model.named_parameters())
            self.average.weights = {name: value.to(self.device) for name, value in fitted(ema, own).items()}
        self.step = self.resumed_from = self.saved_step = int(state["step"])
        self.evaluated_step = self.step if state["evaluated"] else -1
        self.best = state["best"]
        self.log(f"Continuing {self.run_dir} after step {self.step} of {self.total}.")
        before = int(state["config"]["epochs"])
        if before != self.config.epochs:
            self.log(
                f"The run had {before} epochs and gets {self.config.epochs}: from here on the learning rate is that of "
                f"a run of {self.config.epochs} epochs at the same step."
            )

    def _read(self, resume: bool) -> Checkpoint | None:
        refuse_foreign(self.run_dir / "metrics.jsonl")
        self.store.refuse_foreign()
        self.store.clean()
        folder = self.store.newest()
        if folder is None:
            return None
        if not resume:
            raise ValueError(
                f"{self.run_dir} already holds a run ({folder.name}): resume it, or choose another folder."
            )
        checkpoint = load(folder)
        self._check_same_run(checkpoint.state, folder)
        self.store.set_aside_after(folder)
        state = {**checkpoint.state, "evaluated": self.store.evaluated(folder), "best": self.store.best()}
        return Checkpoint(state, checkpoint.model, checkpoint.optimizer, checkpoint.ema)

    def _check_same_run(self, state: Mapping[str, Any], folder: Path) -> None:
        differences = self.config.differences(state["config"])
        if state["steps_per_epoch"] != self.per_epoch:
            differences.append(f"steps per epoch: {state['steps_per_epoch']} -> {self.per_epoch} (the data changed?)")
        if differences:
            raise CheckpointError(
                f"{folder} belongs to a run with other settings ({'; '.join(differences)}): resume with the "
                "same settings, or choose another folder."
            )

    def train(self, guard: InterruptGuard, progress: Progress) -> bool:
        """Run to the end or to the first interruption; returns whether it was interrupted."""
        config, info = self.config, self.info
        if info.rank == 0:
            self.metrics_log = MetricsLog(self.run_dir, self.step, self.evaluated_step == self.step, self.labels)

        def make(step: int) -> Any:
            return self.task.batch(*divmod(step, self.per_epoch), info.rank, info.world)

        steps = range(self.step, self.total)
        pin = self.device.type == "cuda"
        self.model.train()
        with ExitStack() as stack:
            if self.metrics_log is not None:
                stack.callback(self.metrics_log.close)
            batches = stack.enter_context(Prefetcher(make, steps, config.prefetch, config.workers, pin))
            progress.start(self.step, self.total)
            stack.callback(progress.stop)
            stop = processes.any_rank(guard.requested)
            while not stop:
                if self._evaluation_due():
                    self._evaluate(progress)
                    stop = processes.any_rank(guard.requested)
                elif self.step == self.total:
                    return False
                else:
                    started = time.perf_counter()
                    stop = self._step(self._next(batches), started, guard, progress)
                    every = config.checkpoint_every
                    if stop or self.step == self.total or (every and self.step % every == 0):
                        self._save()
        return self.step < self.total or self._evaluation_due()

    def _next(self, batches: Prefetcher) -> Any:
        """The next batch; what was learned is saved before an error of the data ends the run."""
        try:
            return next(batches)
        except Exception:
            # Several processes save together, and the others do not know of this one's error.
            if self.step and self.info.world == 1:
                self._save()
            raise

    def _evaluation_due(self) -> bool:
        untrained = not self.step and not getattr(self.task, "begins_trained", False)
        if untrained or self.step == self.evaluated_step or self.step % self.per_epoch:
            return False
        every = self.config.eval_every
        return self.step in (0, self.total) or (every > 0 and (self.step // self.per_epoch) % every == 0)

    def _step(self, batch: Any, started: float, guard: InterruptGuard, progress: Progress) -> bool:
        """One optimiser step; returns whether some process was asked to stop meanwhile.

        `started` is when the wait for the batch began, so that a slow disk shows in the speed.
        """
        waited = time.perf_counter() - started
        epoch = self.step // self.per_epoch
        if epoch != self.epoch_begun:
            getattr(self.task, "begin_epoch", lambda _: None)(epoch)
            self.epoch_begun = epoch
        batch = move_batch(batch, self.device)
        seed_everything(self.config.seed, self.step, self.info.rank)
        lr = set_scheduled_rates(self.optimizer, self.step, self.per_epoch, self.config)
        # The loss and the gradients' norm are looked at here: nothing before them need be.
        with values_unchecked():
            forward = self._forward(batch, epoch)
        self._check_shape(forward.loss)
        # First all work of the step is asked for, then its results: reading the loss is to wait for it.
        forward.backward()
        local = _read({**forward.metrics, "loss": forward.loss.detach()}) | {"_stop": float(guard.requested)}
        values = processes.mean_values(local)
        stop = values.pop("_stop") > 0
        if not math.isfinite(values["loss"]):
            raise nonfinite_error("loss", self.run_dir, batch, self.step, self.info.rank, local)
        processes.average_gradients(self.model.parameters())
        norm = clip_gradients(self.model.parameters(), self.config.clip_norm)
        values |= {"grad_norm": norm, "learning_rate": lr}
        if not math.isfinite(norm):
            raise nonfinite_error("gradient norm", self.run_dir, batch, self.step, self.info.rank, values)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.step)
        self.step += 1
        seconds = time.perf_counter() - started
        self._report(epoch, {**values, "seconds": seconds, "data_seconds": waited}, progress)
        return stop

    def _check_shape(self, loss: torch.Tensor) -> None:
        if loss.numel() != 1:
            raise ValueError(
                f"The loss of {type(self.task).__name__} has shape {tuple(loss.shape)}: return a single "
                "number, the mean over the rows."
            )

    def _forward(self, batch: Any, epoch: int) -> Forward:
        if self.cached is None:
            return plain_forward(self.task, batch, epoch, self._autocast)
        return cached_forward(self.cached, batch, epoch, self.config.chunk_size, self._autocast)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _report(self, epoch: int, values: dict[str, float], progress: Progress) -> None:
        progress.update(self.step, values["loss"], self.config.batch_size / max(values["seconds"], 1e-9))
        last = self.step == self.total
        if self.metrics_log is not None and (self.step % self.config.log_every == 0 or last):
            self.metrics_log.write("train", self.step, epoch, values)

    def _evaluate(self, progress: Progress) -> None:
        """Score the weights of this step, already saved, and note whether they are the best so far."""
        self._save()
        seed_everything(self.config.seed, self.step, self.info.rank, _EVALUATION)
        self.model.eval()
        with torch.no_grad(), self.average.applied() if self.average else nullcontext():
            figures = {name: float(value) for name, value in self.task.evaluate().items()}
        metrics = processes.broadcast_json(figures)
        self.model.train()
        if metrics and "score" not in metrics:
            raise ValueError(f"evaluate() of {type(self.task).__name__} gave no 'score', only {sorted(metrics)}.")
        score, before = metrics.get("score"), (self.best or {}).get("score")
        if score is not None and not math.isfinite(score):
            self.log(f"The score after step {self.step} is {score}: this checkpoint cannot become the best.")
        # Where nothing is measured (no dev set) the newest weights count.
        is_best = score is None or (math.isfinite(score) and (before is None or score > before))
        epoch = max(0, self.step // self.per_epoch - 1)
        if self.metrics_log is not None:
            self.metrics_log.write("eval", self.step, epoch, metrics)
        processes.on_first_rank(lambda: self.store.record_evaluation(self.step, metrics, is_best, self.labels))
        if is_best:
            self.best = {"checkpoint": self.store.folder_of(self.step).name, "step": self.step, "score": score}
        self.metrics, self.evaluated_step = metrics, self.step
        if score is not None:
            progress.note(f"score {score:.4g}" + (" (best)" if is_best else ""))

    def _save(self) -> None:
        if self.saved_step != self.step:
            processes.on_first_rank(lambda: self.store.save(self._checkpoint()))
            self.saved_step = self.step

    def _checkpoint(self) -> Checkpoint:
        if self.metrics_log is not None:
            self.metrics_log.sync()
        optimizer, groups = optimizer_tensors(self.optimizer)
        state = {
            "step": self.step,
            "epoch": self.step // self.per_epoch,
            "steps_per_epoch": self.per_epoch,
            "best_score": self.best.get("score") if self.best else None,
            "world": self.info.world,
            "transformers": transformers_version(),
            "config": self.config.to_json(),
            "groups": groups,
            "about": self.about,
        }
        weights = self.average.weights if self.average is not None else {}
        ema = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}
        return Checkpoint(state, model_tensors(self.model), optimizer, ema)

    def result(self, interrupted: bool) -> TrainResult:
        """Where the run stands."""
        best = self.best
        return TrainResult(
            step=self.step,
            total_steps=self.total,
            resumed_from=self.resumed_from,
            interrupted=interrupted,
            best_score=best.get("score") if best else None,
            best_step=best.get("step") if best else None,
            best_checkpoint=self.store.folder / best["checkpoint"] if best else None,
            last_checkpoint=self.store.folder_of(self.saved_step) if self.saved_step >= 0 else None,
            metrics=self.metrics,
            labels=self.labels,
        )
