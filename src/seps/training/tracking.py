"""What a run says about itself: metrics.jsonl, TensorBoard if installed, progress."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from seps.files import write_text
from seps.parsing import is_whole, parse_object

Kind = Literal["train", "eval"]


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file as dicts; a line cut off by a crash is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = parse_object(line)
            except ValueError:
                continue
            if line.endswith("\n"):
                yield value


def refuse_foreign(path: Path) -> None:
    """Raise ValueError for a metrics file that some other program wrote: a run takes lines out of its own."""
    lines = list(read_metrics(path))
    ours = all(line.get("kind") in get_args(Kind) and is_whole(line.get("step")) for line in lines)
    if not lines and path.exists() and path.stat().st_size:  # one torn line at most
        text = path.read_text(encoding="utf-8", errors="replace")
        ours = text.startswith('{"kind"') and "\n" not in text.rstrip("\n")
    if not ours:
        raise ValueError(
            f"{path} is not the log of a run of seps, and was left as it is: choose another folder, or move the file "
            "away."
        )


def drop_after(path: Path, step: int, evaluated: bool) -> None:
    """Take out the lines that a run resumed at `step` writes again (its evaluation unless `evaluated`)."""
    if not path.exists():
        return
    kept = [
        line
        for line in read_metrics(path)
        if line["step"] < step or (line["step"] == step and (line.get("kind") == "train" or evaluated))
    ]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


class MetricsLog:
    """Appends one JSON line per record to `RUN/metrics.jsonl`, flushed at once; NaN and infinity become null.

    `step` and `evaluated` say where the run continues; what stands beyond is taken out first. `labels` are texts that
    every record carries, such as the protocol of the evaluation. TensorBoard gets the same figures (in
    `RUN/tensorboard`) when it is installed.
    """

    def __init__(
        self, run_dir: Path, step: int = 0, evaluated: bool = False, labels: Mapping[str, str] | None = None
    ) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.labels = dict(labels or {})
        drop_after(self.path, step, evaluated)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(run_dir / "tensorboard", step + 1)
        if self._board is not None:
            for name, text in self.labels.items():
                self._board.add_text(name, text, step)

    def write(self, kind: Kind, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add a record. Raises ValueError when the file cannot take it."""
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        place = {"kind": kind, "step": step, "epoch": epoch, **self.labels}
        # Twice: first in the line, and never overwritten by a figure of the same name.
        record = {**place, **plain, **place}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"{self.path} could not be written: {error}. Make room, then start the same command to resume."
            ) from error
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Through to the disk, so that a checkpoint never outlives the lines before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and TensorBoard."""
        # Every record is flushed as it is written: what cannot be written now is the record that `write` has told of.
        with contextlib.suppress(OSError):
            self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path, purge_step: int) -> Any:
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    return module.SummaryWriter(str(folder), purge_step=purge_step)


class Progress(Protocol):
    """What shows how far a training run is, such as a progress bar.

    The loop calls `start` once, `update` after each step, `note` after each evaluation, and `stop` at the end.
    """

    def start(self, step: int, total: int) -> None: ...

    def update(self, step: int, loss: float, samples_per_second: float) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class SilentProgress:
    """Shows nothing."""

    def start(self, step: int, total: int) -> None: ...

    def update(self, step: int, loss: float, samples_per_second: float) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...
