"""One and two processes train the same model and measure the same figures."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from reid_toys import rgbnt201, toy_config, toy_model

from seps.reid.task import ReidTask, load_dataset
from seps.training import DistributedInfo, find_checkpoint, load_weights, process_group, train

SELECTIONS = ("published", "gate")


def run(rank: int, world: int, port: int, root: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(DistributedInfo(rank, world, rank, "127.0.0.1", port)) as info:
        for selection in SELECTIONS:
            model = {"selection": selection}
            config = toy_config(root, "rgbnt201", model=model, train={"epochs": 2}, loss={"modality_dropout": 0.5})
            dataset = load_dataset(config.data)
            torch.manual_seed(5)
            task = ReidTask(config, dataset, toy_model(4, 2, selection=selection))
            result = train(task, config.train, out / selection, distributed=info)
            assert result.best_score is not None
            task.reader.close()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    root = rgbnt201(tmp_path / "data")
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = int(opened.getsockname()[1])
    run(0, 1, 0, root, tmp_path / "one")
    multiprocessing.spawn(run, args=(2, port, root, tmp_path / "two"), nprocs=2)
    for selection in SELECTIONS:
        one, two = (load_weights(find_checkpoint(tmp_path / name / selection, "last")) for name in ("one", "two"))
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=2e-3, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}")
        assert any("running_mean" in name for name in one)
        assert any(name.startswith("patch_gate.") for name in one) == (selection == "gate")
