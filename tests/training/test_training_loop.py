import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from training_toys import Contrastive, Regression, evaluations, losses, quick, send, weights_equal

from seps.training import CheckpointError, NonFiniteLossError, find_checkpoint, load_weights, train
from seps.training.checkpoint import read_json


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


def test_non_finite_gradient_stops_too(tmp_path: Path) -> None:
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * float("inf")

    task = Regression(at_step={1: Explodes.apply})
    with pytest.raises(NonFiniteLossError, match="gradient norm"):
        train(task, quick(), tmp_path)


def test_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    train(Regression(at_step={1: send(signal.SIGTERM)}), quick(), tmp_path)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0.05 -> 0.1"):
        train(Regression(), quick(learning_rate=0.1), tmp_path)
    with pytest.raises(CheckpointError, match="steps per epoch: 4 -> 8"):
        train(Regression(batch_size=4), quick(), tmp_path)
    with pytest.raises(ValueError, match="already holds a run"):
        train(Regression(), quick(), tmp_path, resume=False)
    task = Regression()
    task.model[1] = nn.Linear(4, 9)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        train(task, quick(), tmp_path)


def test_wrong_tasks_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunk_size = 4, but Regression has no split"):
        train(Regression(), quick(chunk_size=4), tmp_path)
    task = Regression(batch_size=64)
    with pytest.raises(ValueError, match="0 steps in an epoch"):
        train(task, quick(), tmp_path)
    task = Regression(at_step={0: lambda loss: loss.expand(3)})
    with pytest.raises(ValueError, match=r"has shape \(3,\)"):
        train(task, quick(), tmp_path)
    task = Regression()
    task.evaluate = lambda: {"accuracy": 1.0}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no 'score'"):
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
