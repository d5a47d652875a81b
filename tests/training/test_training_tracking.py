import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from training_toys import Regression, RegressionBatch, losses, quick

from full_disk import full_disk
from messages import naming
from seps.training.batches import Prefetcher, leaves, map_tensors
from seps.training.loop import train
from seps.training.seeding import derive_seed
from seps.training.tracking import MetricsLog, read_metrics


def test_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.write("train", step, 0, {"loss": 1 / step})
    log.write("eval", 3, 0, {"score": 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3, "lo')
    for evaluated, expected in ((True, [1, 2, 3, 3]), (False, [1, 2, 3])):
        MetricsLog(tmp_path, 3, evaluated).close()
        assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == expected
    log = MetricsLog(tmp_path, 3)
    log.write("train", 4, 0, {"loss": float("nan")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"kind": "train", "step": 4, "epoch": 0, "loss": None}
    log.close()


def test_log_every_leaves_steps_out_but_not_the_last(tmp_path: Path) -> None:
    train(Regression(), quick(log_every=5), tmp_path)
    assert [step for step, _, _ in losses(tmp_path)] == [5, 10, 12]


def test_tensorboard_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None: ...

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train(Regression(), quick(), tmp_path)
    assert [(value, step) for name, value, step in written if name == "train/loss"] == [
        (loss, step) for step, loss, _ in losses(tmp_path)
    ]
    assert ("eval/score" in {name for name, _, _ in written}) is True


def test_progress_is_told_everything_and_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[Any, ...]] = []

    class Recorder:
        def start(self, step: int, total: int) -> None:
            calls.append(("start", step, total))

        def update(self, step: int, loss: float, samples_per_second: float) -> None:
            assert loss > 0 and samples_per_second > 0
            calls.append(("update", step))

        def note(self, text: str) -> None:
            calls.append(("note", text.split()[0]))

        def stop(self) -> None:
            calls.append(("stop",))

    train(Regression(), quick(epochs=1), tmp_path, progress=Recorder())
    steps = [("update", step) for step in range(1, 5)]
    assert calls == [("start", 0, 4), *steps, ("note", "score"), ("stop",)]
    assert capsys.readouterr() == ("", "")


class Named(NamedTuple):
    a: torch.Tensor
    b: str


def test_batches_of_any_nesting_are_walked() -> None:
    inner = RegressionBatch(torch.ones(1), torch.ones(2), ["n"])
    batch = {"named": Named(torch.ones(3), "text"), "list": [inner, (torch.ones(4), None)]}
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    sizes = {name: value.sum().item() for name, value in leaves(doubled) if isinstance(value, torch.Tensor)}
    assert sizes == {"named.a": 6.0, "list.0.x": 2.0, "list.0.y": 4.0, "list.1.0": 8.0}
    assert isinstance(doubled["named"], Named) and isinstance(doubled["list"][0], RegressionBatch)
    assert dict(leaves(doubled))["list.0.names.0"] == "n" and inner.x.item() == 1.0
    assert [name for name, _ in leaves(torch.ones(1))] == ["batch"]


@pytest.mark.parametrize(("ahead", "workers"), [(0, 1), (1, 1), (3, 2), (50, 4)])
def test_prefetched_batches_come_in_order(ahead: int, workers: int) -> None:
    with Prefetcher(lambda step: step * step, range(3, 20), ahead, workers, False) as batches:
        assert list(batches) == [step * step for step in range(3, 20)]


def test_seeds_differ_by_every_part() -> None:
    seeds = {derive_seed(seed, step, rank) for seed in range(5) for step in range(20) for rank in range(3)}
    assert len(seeds) == 300 and derive_seed(1, 2, 3) == derive_seed(1, 2, 3)


def test_batches_with_expanded_tensors_can_be_pinned(monkeypatch: Any) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise RuntimeError("more than one element refers to a single memory location")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    row = torch.tensor([True, False])
    with Prefetcher(lambda step: {"present": row.expand(3, -1)}, range(2), 1, 1, True) as batches:
        assert [batch["present"].tolist() for batch in batches] == [[[True, False]] * 3] * 2


def test_a_full_disk_ends_a_run_with_the_name_of_the_file(tmp_path: Path) -> None:
    """Closing the file failed again, and that error, which names nothing, took the place of the sentence."""
    with (
        full_disk(700),
        pytest.raises(ValueError, match=naming("metrics.jsonl")),
    ):
        train(Regression(), quick(), tmp_path)
    assert train(Regression(), quick(), tmp_path).step == 12
