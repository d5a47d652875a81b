"""Queries by one sensor, a gallery by another: figures against a slow twin, the loss against a sum, what it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from reid_toys import SENSORS, msvr310, rgbnt201, slow_distances, slow_map, toy_config, toy_model

from seps.cli.main import main
from seps.reid.any_to_any import evaluate_pairs, matrix_of, pooled, shared_distances, shared_space_loss
from seps.reid.data import load
from seps.reid.evaluate import Features
from seps.reid.network.model import missing_cases
from seps.reid.task import ReidTask, load_dataset, make_reader


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / max(float(vector.square().sum().sqrt()), 1e-12)


@pytest.mark.parametrize(("layout", "tree"), [("rgbnt201", rgbnt201), ("msvr310", msvr310)])
def test_every_pair_is_that_of_a_slow_twin(layout: str, tree, tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = toy_config(tree(tmp_path), layout)
    dataset, model = load(layout, tmp_path), toy_model(cameras=2).eval()
    with make_reader(config, dataset) as reader:
        results = evaluate_pairs(model, dataset, reader)
        kinds = missing_cases(SENSORS)
        assert [(r.query, r.gallery) for r in results] == [(q, g) for q in kinds for g in kinds]
        sides = []
        for records in (dataset.query, dataset.gallery):
            pixels = torch.stack([reader.read(record) for record in records]).float() / 255
            of_kind = {}
            for kind in kinds:
                present = torch.tensor([[name in kind for name in SENSORS]] * len(records))
                with torch.no_grad():
                    of_kind[kind] = model.embed(pixels, None, present, "leave-out").pattern(3).view(-1, 2, 3, 16)
            sides.append(of_kind)
    for result in results:
        common = [SENSORS.index(name) for name in result.query if name in result.gallery]
        assert result.compared_by == (" + ".join(SENSORS[i] for i in common) or "shared space")
        made = []
        for side, kind in zip(sides, (result.query, result.gallery), strict=True):
            own = [SENSORS.index(name) for name in kind]
            if common:
                made.append([[row[branch, common].flatten() for branch in (0, 1)] for row in side[kind]])
            else:
                made.append([[sum(unit(row[b, i]) for i in own) for b in (0, 1)] for row in side[kind]])
        expected = slow_map(slow_distances(*made), dataset)
        assert (result.metrics.mAP, float(result.metrics.cmc[0])) == pytest.approx(expected, abs=1e-6), result
    assert len(matrix_of(results, "mAP")) == 7 and {len(row) for row in matrix_of(results, "r1")} == {7}


def test_an_absent_sensor_has_no_part_in_the_pooled_vector() -> None:
    vectors = torch.randn(3, 2, 3, 4)
    present = torch.tensor([[True, False, True]] * 3)
    changed = vectors.clone()
    changed[:, :, 1] = 9.0
    assert torch.equal(pooled(Features(vectors, present)), pooled(Features(changed, present)))
    same = Features(vectors, present)
    torch.testing.assert_close(shared_distances(same, same).diagonal(), torch.zeros(3), atol=1e-6, rtol=0)


def test_the_loss_is_the_hardest_triplet_over_single_sensors() -> None:
    features, labels = torch.randn(6, 3 * 4), torch.tensor([0, 0, 1, 1, 2, 2])
    present = torch.tensor([True, False, True])
    rows = [(unit(features[i, 4 * m : 4 * m + 4]), int(labels[i])) for i in range(6) for m in (0, 2)]
    expected = 0.0
    for vector, label in rows:
        apart = [(math.dist(vector.tolist(), other.tolist()), label == name) for other, name in rows]
        far, near = max(d for d, own in apart if own), min(d for d, own in apart if not own)
        expected += math.log1p(math.exp(far - near)) / len(rows)
    assert shared_space_loss(features, features, labels, present).item() == pytest.approx(expected, rel=1e-5)
    # The parts of two processes, each against all, average to the whole.
    parts = [shared_space_loss(features[i : i + 2], features, labels, present, first=i) for i in (0, 2, 4)]
    assert torch.stack(parts).mean().item() == pytest.approx(expected, rel=1e-5)


def test_training_with_it_brings_the_sensors_into_one_space() -> None:
    """Each sensor shows an identity in colours of its own: nothing but the loss says that they belong together."""
    torch.manual_seed(0)
    codes = torch.rand(8, 3, 3, 1, 1)  # identity, sensor
    images = codes.expand(-1, -1, -1, 64, 32).repeat_interleave(2, dim=0)
    labels = torch.arange(8).repeat_interleave(2)
    model = toy_model(identities=8).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def found() -> float:
        """How often a colour picture's nearest thermal one is of the same identity."""
        with torch.no_grad():
            vectors = model.eval().embed(images[::2] + 0.02 * torch.randn_like(images[::2])).original.view(8, 1, 3, 16)
        model.train()
        sides = [Features(vectors, torch.eye(3, dtype=torch.bool)[i].expand(8, -1)) for i in (0, 2)]
        return float((shared_distances(*sides).argmin(dim=1) == torch.arange(8)).float().mean())

    before = found()
    for _ in range(120):
        fused = model.embed(images + 0.02 * torch.randn_like(images))
        loss = shared_space_loss(fused.original, fused.original, labels, torch.ones(3, dtype=torch.bool))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found() >= 0.875 > 0.5 > before


def test_the_command_trains_for_it_and_prints_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = toy_config(rgbnt201(tmp_path / "data"), "rgbnt201", loss={"shared": 0.5, "modality_dropout": 0.5})
    task = ReidTask(config, load_dataset(config.data), toy_model(4, 2))
    total, figures = task.loss(task.batch(0, 0, 0, 1), 0)
    plain = toy_config(tmp_path / "data", "rgbnt201", loss={"modality_dropout": 0.5})
    without = ReidTask(plain, task.dataset, task.model)
    difference = total.item() - without.loss(without.batch(0, 0, 0, 1), 0)[0].item()
    assert difference == pytest.approx(0.5 * float(figures["shared"]), rel=1e-4)
    words = ["reid", "train", "--out", str(tmp_path / "run"), "--device", "cpu", "--loss.shared", "1"]
    small = {"data.layout": "rgbnt201", "data.root": tmp_path / "data", "data.identities": 2, "data.images": 2}
    small |= {"data.holdout": 1, "model.image_size": "[64,32]", "model.width": 16, "model.stride": 16}
    small |= {"model.pretrained": "false", "model.aggr_ratio": 0.5, "train.epochs": 1}
    assert main([*words, *(word for name, value in small.items() for word in (f"--{name}", str(value)))]) == 0
    capsys.readouterr()
    assert main(["reid", "eval", str(tmp_path / "run"), "--any", "--json", "--device", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert len(rows) == 49 and {"query", "gallery", "compared_by", "mAP", "r1"} <= set(rows[0])
    assert main(["reid", "eval", str(tmp_path / "run"), "--any", "--device", "cpu"]) == 0
    assert "query (rows) against gallery (columns)" in capsys.readouterr().out
    assert main(["reid", "eval", str(tmp_path / "run"), "--any", "--missing"]) == 2
