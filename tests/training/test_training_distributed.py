import importlib
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from training_toys import Contrastive, evaluations, losses, quick, send

from messages import naming
from seps.training import (
    DistributedInfo,
    distributed,
    find_checkpoint,
    from_environment,
    process_group,
    train,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_environment_of_torchrun_is_read() -> None:
    assert from_environment({}) == DistributedInfo()
    info = from_environment(TORCHRUN, backend="gloo")
    assert info == DistributedInfo(3, 8, 1, "host", 29500, "gloo") and info.device.type == "cpu"
    assert from_environment(TORCHRUN, backend="nccl").device == torch.device("cuda", 1)


def test_wrong_environments_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="lacks MASTER_PORT"):
        from_environment({**TORCHRUN, "MASTER_PORT": ""})
    with pytest.raises(ValueError, match="number"):
        from_environment({**TORCHRUN, "RANK": "first"})
    with pytest.raises(ValueError, match=r"DistributedInfo.rank = 9"):
        from_environment({**TORCHRUN, "RANK": "9"})
    with pytest.raises(ValueError, match=naming("8", "1")):
        train(Contrastive(), quick(), Path("unused"), distributed=from_environment(TORCHRUN, "gloo"))


def free_port() -> int:
    with socket.socket() as open_socket:
        open_socket.bind(("127.0.0.1", 0))
        return int(open_socket.getsockname()[1])


def collectives(rank: int) -> None:
    """Uneven gather, its gradient against the same done in one process, and the small ones."""
    rows = [torch.arange(6.0).view(3, 2), -torch.arange(2.0).view(1, 2)]
    mine = rows[rank].clone().requires_grad_()
    everyone = distributed.gather_with_gradient(mine)
    assert torch.equal(everyone, torch.cat(rows))
    weight = [torch.randn(4, 2, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    (everyone**2 * weight[rank]).sum().backward()
    expected = (2 * torch.cat(rows) * (weight[0] + weight[1])).split([3, 1])[rank]
    assert torch.allclose(mine.grad, expected)
    assert distributed.gather_ragged(torch.ones(rank, dtype=torch.bool)).tolist() == [True]
    assert distributed.mean_values({"b": float(rank), "a": 3.0}) == {"a": 3.0, "b": 0.5}
    assert distributed.broadcast(torch.tensor([rank + 5])).item() == 5
    assert distributed.broadcast_json({"x": [rank, None, "é"]}) == {"x": [0, None, "é"]}
    sent = {"a": torch.eye(2, dtype=torch.bool), "b": torch.tensor(3)} if rank == 0 else None
    got = distributed.broadcast_tensors(sent)
    assert got["a"].tolist() == [[True, False], [False, True]] and got["b"].item() == 3
    assert distributed.any_rank(rank == 1) and not distributed.any_rank(False)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), float(rank))
    if rank == 1:
        parameters[1].grad = torch.ones(2)
    distributed.average_gradients(parameters)
    assert [p.grad.tolist() if p.grad is not None else None for p in parameters] == [
        [0.5] * 2,
        [0.5] * 2,
        None,
    ]
    with pytest.raises(ValueError, match="disk"):
        distributed.on_first_rank(lambda: (_ for _ in ()).throw(ValueError("disk is full")))


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with process_group(DistributedInfo(rank, 2, rank, "127.0.0.1", port), timeout_minutes=1) as info:
        importlib.import_module("torch.distributed.nn")  # as torch's optimizers do
        collectives(rank)
        for name, settings in {**RUNS, "dropout": NOISY, "dropout again": NOISY}.items():
            task = Contrastive(batch_size=9, dropout=0.3 if settings is NOISY else 0.0)
            if rank == 1:
                # The ranks must not depend on having started alike.
                torch.nn.init.zeros_(task.model.image[0].weight)
            train(task, quick(**settings), Path(folder) / name, distributed=info)
        stopped(info, Path(folder) / "stopped")
    assert not gloo_threads()


def gloo_threads() -> list[str]:
    """Those that hold tensors; one left when python shuts down can abort the process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def stopped(info: DistributedInfo, folder: Path) -> None:
    """SIGTERM at one process stops both after the same step; they resume together."""

    class Stops(Contrastive):
        def loss(self, batch: Any, epoch: int) -> Any:
            loss = super().loss(batch, epoch)
            return (send(15)(loss[0]), loss[1]) if info.rank == 1 else loss

    result = train(Stops(batch_size=9), quick(batch_size=9), folder, distributed=info)
    assert result.interrupted and 1 <= result.step <= 2
    result = train(Contrastive(batch_size=9), quick(batch_size=9), folder, distributed=info)
    assert result.step == 9 and result.resumed_from in (1, 2)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 9},
    "cached": {"batch_size": 9, "chunk_size": 2, "ema_decay": 0.5},
}


NOISY: dict[str, Any] = {"batch_size": 9}


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    # 9 samples over 2 processes: 5 and 4, so the uneven case is the one tested.
    two = tmp_path / "two"
    multiprocessing.spawn(worker, (free_port(), str(two)), nprocs=2)
    for name, settings in RUNS.items():
        one = tmp_path / name
        train(Contrastive(batch_size=9), quick(**settings), one)
        for (step, *alone), (other_step, *together) in zip(losses(one), losses(two / name), strict=True):
            assert step == other_step and together == pytest.approx(alone, rel=1e-4)
        # The score is the share of samples that find their partner: weights this close leave every one of them alone.
        assert evaluations(one) == evaluations(two / name)
        expected = distributed_weights(one)
        for key, value in distributed_weights(two / name).items():
            assert torch.allclose(value, expected[key], atol=1e-4), key
    for line, other in zip(losses(two / "stopped"), losses(two / "plain"), strict=True):
        assert line == pytest.approx(other, rel=1e-5)
    # With dropout two processes are as good as one and repeat themselves to the bit, but are not the same: each draws
    # for its own rows.
    assert losses(two / "dropout") == losses(two / "dropout again")
    train(Contrastive(batch_size=9, dropout=0.3), quick(**NOISY), tmp_path / "dropout")
    together, alone = losses(two / "dropout"), losses(tmp_path / "dropout")
    assert together[0][1] != pytest.approx(alone[0][1], rel=1e-4)


def distributed_weights(folder: Path) -> dict[str, torch.Tensor]:
    from seps.training import load_weights

    return load_weights(find_checkpoint(folder, "last"))
