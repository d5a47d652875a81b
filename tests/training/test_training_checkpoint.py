import errno
import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_toys import Regression, losses, quick, send, weights_equal

from messages import naming
from seps.training import CheckpointError, checkpoint, find_checkpoint, train
from seps.training.checkpoint import Checkpoint, CheckpointStore, damage, load, model_tensors


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("model.safetensors", cut, "bytes instead of"),
    ("optimizer.safetensors", flip_a_bit, "content of optimizer.safetensors has changed"),
    ("state.json", Path.unlink, "state.json is missing"),
    ("manifest.json", cut, "manifest.json is missing or unreadable"),
    ("manifest.json", Path.unlink, "manifest.json is missing or unreadable"),
]


@pytest.mark.parametrize(("name", "harm", "sentence"), DAMAGE)
def test_damaged_newest_is_passed_over_and_the_run_still_the_same(
    tmp_path: Path, name: str, harm: Callable[[Path], None], sentence: str
) -> None:
    whole = Regression()
    train(whole, quick(), tmp_path / "whole")
    folder = tmp_path / "run"
    train(Regression(at_step={6: send(signal.SIGTERM)}), quick(checkpoint_every=3), folder)
    harm(folder / "checkpoints" / "step-00000007" / name)
    said: list[str] = []
    task = Regression()
    result = train(task, quick(checkpoint_every=3), folder, log=said.append)
    assert result.resumed_from == 6
    assert any(sentence in line and "step-00000007" in line for line in said)
    assert weights_equal(task.model, whole.model) and losses(folder) == losses(tmp_path / "whole")
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["damaged-step-00000007", "step-00000009", "step-00000012"]
    assert all(damage(folder / "checkpoints" / name) is None for name in kept[1:])


def test_damaged_best_counts_no_more(tmp_path: Path) -> None:
    task = Regression(at_step={6: send(signal.SIGTERM)})
    task.scores = [0.9]
    train(task, quick(), tmp_path)
    cut(find_checkpoint(tmp_path, "best") / "model.safetensors")
    with pytest.raises(CheckpointError, match="last"):
        find_checkpoint(tmp_path, "best")
    task = Regression()
    task.scores = [0.2, 0.1]
    assert train(task, quick(), tmp_path).best_score == 0.2


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    """An empty folder was told that it has not been evaluated, and a file that it is a folder that does not exist."""
    empty, file = tmp_path / "empty", tmp_path / "file.jsonl"
    empty.mkdir()
    file.write_text("{}")
    for which in ("best", "last"):
        with pytest.raises(CheckpointError, match="/nowhere"):
            find_checkpoint(tmp_path / "nowhere", which)
        with pytest.raises(CheckpointError, match="/empty"):
            find_checkpoint(empty, which)
        with pytest.raises(CheckpointError, match=naming("/file.jsonl")):
            find_checkpoint(file, which)
    assert not list(empty.iterdir())
    train(Regression(at_step={3: send(signal.SIGTERM)}), quick(checkpoint_every=2), tmp_path / "run")
    assert find_checkpoint(tmp_path / "run", "last").name.startswith("step-")
    with pytest.raises(CheckpointError, match="--which last"):
        find_checkpoint(tmp_path / "run", "best")


def test_all_damaged_is_refused(tmp_path: Path) -> None:
    train(Regression(), quick(), tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        cut(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="2"):
        train(Regression(), quick(), tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint"):
        find_checkpoint(tmp_path, "best")


def test_folder_left_by_a_crash_while_saving_is_ignored_and_removed(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".writing-step-00000009"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert train(Regression(), quick(), tmp_path).resumed_from == 0
    assert not left.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    real = checkpoint.write_tensors

    def full(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if path.name == file and "step-00000006" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match=naming("step 6", "step-00000004")):
        train(Regression(), quick(checkpoint_every=2), tmp_path)
    monkeypatch.undo()
    assert find_checkpoint(tmp_path, "last").name == "step-00000004"
    assert not list((tmp_path / "checkpoints").glob(".*"))
    whole, resumed = Regression(), Regression()
    train(whole, quick(), tmp_path / "whole")
    train(resumed, quick(checkpoint_every=2), tmp_path)
    assert weights_equal(whole.model, resumed.model)


def test_writer_that_really_runs_out_gives_the_sentence(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, lambda _: None)
    big = {"weight": torch.zeros(300_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        with pytest.raises(CheckpointError, match="written"):
            store.save(Checkpoint({"step": 1}, big, {}, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.newest() is None and not list(store.folder.iterdir())


def test_newer_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, lambda _: None)
    path = store.save(Checkpoint({"step": 1, "format": 99}, {}, {}, {}))
    with pytest.raises(CheckpointError, match="99"):
        load(path)


def test_tied_weights_and_buffers_survive(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model(torch.randn(5, 3))
    path = CheckpointStore(tmp_path, 2, lambda _: None).save(Checkpoint({"step": 3}, model_tensors(model), {}, {}))
    loaded = load(path).model
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    train(Regression(), quick(), tmp_path, about={"model": {"width": 8}})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".safetensors"}
    state = json.loads((find_checkpoint(tmp_path) / "state.json").read_text())
    assert state["about"] == {"model": {"width": 8}}
    assert [group["weight_decay"] for group in state["groups"]] == [0.0001, 0.0]


def test_no_checkpoint_gets_a_sentence(tmp_path: Path) -> None:
    for which in ("best", "last"):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            find_checkpoint(tmp_path, which)  # type: ignore[arg-type]


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    """Both wrote and removed each other's files: neither could save, and the sentence asked for more room."""
    refused: list[bool] = []

    def again(loss: Tensor) -> Tensor:
        for folder in (tmp_path / "run", tmp_path / "link"):
            with pytest.raises(ValueError, match="process"):
                train(Regression(), quick(checkpoint_every=1), folder)
            refused.append(True)
        return loss

    (tmp_path / "link").symlink_to(tmp_path / "run")
    whole, first = Regression(), Regression(at_step={5: again})
    train(whole, quick(), tmp_path / "whole")
    train(first, quick(checkpoint_every=2), tmp_path / "run")
    assert len(refused) == 2
    assert weights_equal(first.model, whole.model) and losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    assert train(Regression(), quick(), tmp_path / "run").step == 12  # free again
