import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_toys import Contrastive, Regression, evaluations, losses, quick, send, weights_equal

from messages import mentions, naming
from seps.files import read_json
from seps.training import CheckpointError, NonFiniteLossError, find_checkpoint, load_weights, loop, train
from seps.training.optim import lr_factor
from seps.training.tracking import read_metrics


def test_regression_learns(tmp_path: Path) -> None:
    task = Regression(dropout=0.0)
    before = -task.evaluate()["score"]
    result = train(task, quick(epochs=40), tmp_path)
    assert result.step == result.total_steps == 160 and not result.interrupted
    assert -result.metrics["score"] < 0.02 * before


def test_contrastive_learns_also_in_bf16_with_chunks_and_average(tmp_path: Path) -> None:
    task = Contrastive(batch_size=32)
    config = quick(
        epochs=60,
        batch_size=32,
        backbone_lr_scale=1.0,
        precision="bf16",
        chunk_size=8,
        ema_decay=0.9,
        eval_every=0,
    )
    result = train(task, config, tmp_path)
    assert result.best_score is not None and result.best_score > 0.9
    assert all(parameter.dtype == torch.float32 for parameter in task.model.parameters())
    assert [step for step, _ in evaluations(tmp_path)] == [60]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Regression]:
    folder, task = tmp_path_factory.mktemp("whole"), Regression()
    train(task, quick(ema_decay=0.9), folder)
    return folder, task


@pytest.mark.parametrize("stops", [[0], [2, 3], [5, 7, 11], [3, 10]])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_runs_end_bit_for_bit_like_a_whole_one(
    whole: tuple[Path, Regression], tmp_path: Path, stops: list[int], number: signal.Signals
) -> None:
    for stop in stops:
        result = train(Regression(at_step={stop: send(number)}), quick(ema_decay=0.9), tmp_path)
        assert result.interrupted and result.step == stop + 1
        assert result.last_checkpoint is not None and result.last_checkpoint.exists()
    task = Regression()
    result = train(task, quick(ema_decay=0.9), tmp_path)
    assert result.resumed_from == stops[-1] + 1 and not result.interrupted
    folder, expected = whole
    assert losses(tmp_path) == losses(folder)
    assert evaluations(tmp_path) == evaluations(folder)
    assert weights_equal(task.model, expected.model)
    average, other = load_weights(find_checkpoint(tmp_path)), load_weights(find_checkpoint(folder))
    assert all(torch.equal(value, other[name]) for name, value in average.items())


def test_settings_that_do_not_matter_may_change_on_resume(whole: tuple[Path, Regression], tmp_path: Path) -> None:
    train(Regression(at_step={6: send(signal.SIGTERM)}), quick(ema_decay=0.9), tmp_path)
    task = Regression()
    train(task, quick(ema_decay=0.9, checkpoint_every=1, prefetch=0, keep_last=1), tmp_path)
    assert weights_equal(task.model, whole[1].model)
    names = {read_json(tmp_path / pointer)["checkpoint"] for pointer in ("best.json", "last.json")}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == names


def test_second_interrupt_stops_at_once_and_handlers_come_back(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    done: list[int] = []

    def act(loss: torch.Tensor) -> torch.Tensor:
        send(signal.SIGINT)(loss)
        done.append(1)
        send(signal.SIGINT)(loss)
        done.append(2)
        return loss

    with pytest.raises(KeyboardInterrupt):
        train(Regression(at_step={5: act}), quick(), tmp_path)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is handler


def test_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = train(Regression(), quick(), tmp_path)
    again = train(Regression(), quick(), tmp_path)
    assert again.step == again.resumed_from == 12 and again.best_score == first.best_score
    assert len(losses(tmp_path)) == 12 and len(evaluations(tmp_path)) == 3


def test_best_is_the_highest_score_and_last_the_newest(tmp_path: Path) -> None:
    task = Regression()
    task.scores = [0.1, 0.9, 0.5, float("nan")]
    said: list[str] = []
    result = train(task, quick(epochs=4, keep_last=1), tmp_path, log=said.append)
    assert result.best_score == 0.9
    assert find_checkpoint(tmp_path, "best").name == "step-00000008"
    assert find_checkpoint(tmp_path, "last").name == "step-00000016"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert any("nan" in sentence and "best" in sentence for sentence in said)
    last = read_json(find_checkpoint(tmp_path, "last") / "state.json")
    assert last["step"] == 16 and last["config"]["learning_rate"] == 0.05


def test_without_a_dev_set_the_last_weights_are_the_model(tmp_path: Path) -> None:
    task = Regression()
    task.evaluate = dict  # type: ignore[method-assign, assignment]
    result = train(task, quick(), tmp_path)
    assert result.best_score is None and result.metrics == {}
    assert result.best_checkpoint == result.last_checkpoint == find_checkpoint(tmp_path, "best")
    assert find_checkpoint(tmp_path, "best").name == "step-00000012"
    # The same command with more epochs: not the model of the shorter run.
    more = train(task, quick(epochs=5), tmp_path)
    assert more.resumed_from == 12 and find_checkpoint(tmp_path, "best").name == "step-00000020"


def test_evaluation_killed_half_way_is_made_up_for(whole: tuple[Path, Regression], tmp_path: Path) -> None:
    class Dies(Regression):
        def evaluate(self) -> dict[str, float]:
            raise MemoryError("killed")

    with pytest.raises(MemoryError):
        train(Dies(), quick(ema_decay=0.9), tmp_path)
    train(Regression(), quick(ema_decay=0.9), tmp_path)
    assert evaluations(tmp_path) == evaluations(whole[0]) and losses(tmp_path) == losses(whole[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_loss_stops_with_the_batch_saved(tmp_path: Path, value: float) -> None:
    from safetensors.torch import load_file

    task = Regression(at_step={6: lambda loss: loss * value})
    with pytest.raises(NonFiniteLossError) as caught:
        train(task, quick(checkpoint_every=2), tmp_path)
    assert str(caught.value.path) in str(caught.value) and "step 7" in str(caught.value)
    saved = load_file(caught.value.path)
    batch = task.batch(1, 2, 0, 1)
    assert torch.equal(saved["x"], batch.x) and torch.equal(saved["y"], batch.y)
    about = read_json(caught.value.path.with_suffix(".json"))
    assert about["step"] == 6 and about["other_values"]["names.0"] == batch.names[0]
    assert find_checkpoint(tmp_path, "last").name == "step-00000006"


def test_the_loss_is_read_once_the_backward_pass_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it before, the caller would wait for a GPU with half of the step not yet asked for."""
    task, seen = Regression(dropout=0.0), []
    plain = loop._read

    def reading(figures):
        seen.append(all(parameter.grad is not None for parameter in task.model.parameters()))
        return plain(figures)

    monkeypatch.setattr(loop, "_read", reading)
    train(task, quick(epochs=1), tmp_path)
    assert seen and all(seen)


def test_non_finite_gradient_stops_too(tmp_path: Path) -> None:
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * float("inf")

    task = Regression(at_step={1: Explodes.apply})
    with pytest.raises(NonFiniteLossError, match="gradient"):
        train(task, quick(), tmp_path)


def test_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    train(Regression(at_step={1: send(signal.SIGTERM)}), quick(), tmp_path)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0.05 -> 0.1"):
        train(Regression(), quick(learning_rate=0.1), tmp_path)
    with pytest.raises(CheckpointError, match=naming("4", "8")):
        train(Regression(batch_size=4), quick(), tmp_path)
    with pytest.raises(ValueError, match="run"):
        train(Regression(), quick(), tmp_path, resume=False)
    task = Regression()
    task.model[1] = nn.Linear(4, 9)
    with pytest.raises(CheckpointError, match="model"):
        train(task, quick(), tmp_path)


def test_wrong_tasks_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=naming("chunk_size", "4")):
        train(Regression(), quick(chunk_size=4), tmp_path)
    task = Regression(batch_size=64)
    with pytest.raises(ValueError, match="steps"):
        train(task, quick(), tmp_path)
    task = Regression(at_step={0: lambda loss: loss.expand(3)})
    with pytest.raises(ValueError, match=naming("(3,)")):
        train(task, quick(), tmp_path)
    task = Regression()
    task.evaluate = lambda: {"accuracy": 1.0}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="score"):
        train(task, quick(), tmp_path)


def test_error_in_a_batch_reaches_the_caller(tmp_path: Path) -> None:
    class Broken(Regression):
        def batch(self, epoch, step, rank, world):  # type: ignore[no-untyped-def]
            if step == 3:
                raise OSError("photo.jpg is cut off")
            return super().batch(epoch, step, rank, world)

    with pytest.raises(OSError, match=r"photo.jpg"):
        train(Broken(), quick(), tmp_path)
    assert len(losses(tmp_path)) == 3


def test_begin_epoch_freezes_and_thaws_also_after_resume(tmp_path: Path) -> None:
    class Thaws(Regression):
        def begin_epoch(self, epoch: int) -> None:
            self.model[1].requires_grad_(epoch >= 1)

    task = Thaws(at_step={2: send(signal.SIGTERM)})
    start = task.model[1].weight.detach().clone()
    train(task, quick(), tmp_path)
    assert torch.equal(task.model[1].weight, start)
    whole, resumed = Thaws(), Thaws()
    train(whole, quick(), tmp_path / "whole")
    train(resumed, quick(), tmp_path)
    assert not torch.equal(resumed.model[1].weight, start)
    assert weights_equal(whole.model, resumed.model)


def learning_rates(folder: Path) -> list[float]:
    return [line["learning_rate"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def test_more_epochs_extend_a_finished_run_bit_for_bit(tmp_path: Path) -> None:
    steady = {"schedule": "constant", "ema_decay": 0.9}
    whole, first, more = Regression(), Regression(), Regression()
    train(whole, quick(epochs=3, **steady), tmp_path / "whole")
    train(first, quick(epochs=2, **steady), tmp_path / "run")
    said: list[str] = []
    result = train(more, quick(epochs=3, **steady), tmp_path / "run", log=said.append)
    assert (result.resumed_from, result.step) == (8, 12) and not result.interrupted
    assert weights_equal(more.model, whole.model) and not weights_equal(first.model, whole.model)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")
    assert any(mentions(sentence, "2", "3", "epochs") for sentence in said)
    with pytest.raises(CheckpointError, match=r"epochs: 3 -> 2"):
        train(Regression(), quick(epochs=2, **steady), tmp_path / "run")


def test_an_extended_run_follows_the_schedule_of_its_new_length(tmp_path: Path) -> None:
    short, long = quick(epochs=2), quick(epochs=4)
    train(Regression(), short, tmp_path)
    train(Regression(), long, tmp_path)
    expected = [lr_factor(step, 4, short if step < 8 else long) * short.learning_rate for step in range(16)]
    assert learning_rates(tmp_path) == pytest.approx(expected, rel=1e-12)


def test_labels_of_the_task_are_in_every_line_and_pointer(tmp_path: Path) -> None:
    task = Regression()
    task.labels = {"protocol": "image"}  # type: ignore[attr-defined]
    train(task, quick(), tmp_path)
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(lines) == 15 and all(line["protocol"] == "image" for line in lines)
    assert all(read_json(tmp_path / name)["protocol"] == "image" for name in ("best.json", "last.json"))


FOREIGN = {
    "metrics.jsonl": ['{"loss": 1.0}\n', '{"step": 3, "loss": 1.0}\n', "epoch,loss\n0,1.5\n", '{"kind": "train"}\n'],
    "best.json": ['{"accuracy": 0.9}', "notes"],
    "last.json": ['["mine"]'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FOREIGN.items() for text in texts])
def test_a_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="left"):
        train(Regression(), quick(), tmp_path)
    assert (tmp_path / name).read_text() == text and [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("torn", ["", '{"kind": "train", "step": 1, "ep', '{"kind": "train", "step": 1, "epoch": 0}\n'])
def test_a_log_of_a_run_killed_before_its_first_checkpoint_is_ours(tmp_path: Path, torn: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(torn)
    train(Regression(), quick(), tmp_path)
    assert len(losses(tmp_path)) == 12


def test_folders_of_somebody_else_among_the_checkpoints_stay(tmp_path: Path) -> None:
    mine = {"step-best": "weights.bin", "step-00000001": "model.ckpt", "damaged-step-00000020": "kept.txt"}
    for folder, name in mine.items():
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
        (tmp_path / "checkpoints" / folder / name).write_text("precious")
    whole = tmp_path / "elsewhere"
    train(Regression(), quick(), whole)
    newest = find_checkpoint(whole, "last")
    shutil.copytree(newest, tmp_path / "checkpoints" / newest.name)
    (tmp_path / "checkpoints" / "step-00000020").mkdir()
    train(Regression(), quick(epochs=5, checkpoint_every=1, keep_last=1), tmp_path)
    for folder, name in mine.items():
        assert (tmp_path / "checkpoints" / folder / name).read_text() == "precious"
    assert (tmp_path / "checkpoints" / "damaged-step-00000020-2").is_dir()


def test_what_was_learned_is_saved_before_an_error_of_the_data_ends_the_run(tmp_path: Path) -> None:
    class Gone(Regression):
        """Its sixth batch, the second of an epoch, cannot be made."""

        def batch(self, epoch: int, step: int, rank: int, world: int) -> Any:
            if (epoch, step) == (1, 1):
                raise ValueError("the photo is gone")
            return super().batch(epoch, step, rank, world)

    with pytest.raises(ValueError, match="photo"):
        train(Gone(), quick(), tmp_path / "run")
    again = train(Regression(), quick(), tmp_path / "run")
    train(Regression(), quick(), tmp_path / "whole")
    assert again.resumed_from == 5
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
