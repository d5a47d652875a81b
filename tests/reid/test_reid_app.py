"""Training and evaluation as a whole: published folder trees, resuming, figures, pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from reid_toys import (
    SENSORS,
    msvr310,
    rgbnt100,
    rgbnt201,
    slow_distances,
    slow_features,
    slow_map,
    toy_config,
    toy_model,
)

from seps.metrics import rerank
from seps.reid.data import ReidDataset, load
from seps.reid.evaluate import (
    Case,
    Features,
    all_cases,
    cost,
    default_cases,
    distances,
    evaluate,
    extract,
    throughput,
)
from seps.reid.network.model import ReidModel
from seps.reid.run import load_trained, train_reid
from seps.reid.show.pictures import COLOURS, framed, kept_picture, ranked_picture, ranking
from seps.reid.task import ReidTask, load_dataset, make_reader
from seps.training import train


@pytest.mark.parametrize(
    ("layout", "tree"),
    [
        pytest.param("RGBNT201", rgbnt201, marks=pytest.mark.slow),  # the layout of most toy sets
        ("RGBNT100", rgbnt100),
        ("MSVR310", msvr310),
    ],
)
def test_published_trees_train_and_evaluate(tmp_path: Path, layout: str, tree: Callable[[Path], Path]) -> None:
    # Random weights give every picture the same feature, and rounding would rank them.
    settings = {"camera_embedding": True, "pretrained": True}
    config = toy_config(tree(tmp_path / "data"), layout, model=settings, train={"epochs": 1})
    dataset = load_dataset(config.data)
    result = train_reid(config, dataset, tmp_path / "run")
    assert result.step == result.total_steps > 0 and result.best_score is not None
    trained = load_trained(tmp_path / "run")
    trained.check(dataset)
    with make_reader(config, dataset) as reader:
        found = evaluate(trained.model, dataset, reader, all_cases(trained.model))
        assert len(found) == 13
        cases = [result.case for result in found]
        query, gallery = (
            extract(trained.model, dataset, records, cases, reader) for records in (dataset.query, dataset.gallery)
        )
        for result, left, right in zip(found, query, gallery, strict=True):
            slow = slow_distances(*slow_features(trained.model, dataset, reader, result.case))
            torch.testing.assert_close(distances(left, right), torch.tensor(slow), rtol=0, atol=1e-5)
            expected = slow_map(slow, dataset)
            figures = (result.metrics.mAP, float(result.metrics.cmc[0]))
            assert figures == pytest.approx(expected, abs=1e-6), result.case
            assert torch.tensor(slow).std() > 1e-3


def task_of(config, dataset: ReidDataset) -> ReidTask:
    task = ReidTask(config, dataset, toy_model(len(dataset.identities) - 1, len(dataset.cameras)))
    return task


def test_training_learns_the_toy_identities(tmp_path: Path) -> None:
    """Identities are told by colour: a few epochs must lower the loss well below chance and rank perfectly."""
    config = toy_config(rgbnt201(tmp_path), "rgbnt201", train={"epochs": 15, "learning_rate": 3e-3, "eval_every": 15})
    task = task_of(config, load_dataset(config.data))
    before = task.loss(task.batch(0, 0, 0, 1), 0)[0].item()
    result = train(task, config.train, tmp_path / "run")
    after = task.loss(task.batch(0, 0, 0, 1), 0)[0].item()
    assert after < 0.6 * before and result.metrics["r1"] == 100
    task.reader.close()


def test_batches_are_slices_of_the_same_draws(tmp_path: Path) -> None:
    config = toy_config(rgbnt201(tmp_path), "rgbnt201", loss={"modality_dropout": 0.5})
    task = task_of(config, load_dataset(config.data))
    whole, again = task.batch(1, 1, 0, 1), task.batch(1, 1, 0, 1)
    halves = [task.batch(1, 1, rank, 2) for rank in (0, 1)]
    assert torch.equal(whole.images, again.images)
    for name in ("images", "labels", "cameras", "present"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(whole, name))
    cases = {tuple(task.batch(epoch, 0, 0, 1).present[0].tolist()) for epoch in range(30)}
    assert (True, True, True) in cases and len(cases) > 3 and (False, False, False) not in cases
    with pytest.raises(ValueError, match="divide"):
        task.steps_per_epoch(3)
    task.reader.close()


def test_held_out_identities_are_not_trained_on(tmp_path: Path) -> None:
    config = toy_config(rgbnt201(tmp_path), "rgbnt201", data={"holdout": 2})
    dataset = load_dataset(config.data)
    task = ReidTask(config, dataset, toy_model(3, 2))
    fit, dev = ({r.pid for r in records} for records in (task.fit.train, task.dev.query))
    assert len(dev) == 2 and not fit & dev and fit | dev == set(dataset.identities)
    assert not {r.pid for r in dataset.query} & (fit | dev)
    task.reader.close()


def test_a_run_cut_in_two_ends_where_a_whole_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(rgbnt201(tmp_path / "data"), "rgbnt201", train={"epochs": 3, "checkpoint_every": 1})
    dataset = load_dataset(config.data)
    whole = train(task_of(config, dataset), config.train, tmp_path / "whole")
    interrupted = task_of(config, dataset)
    original, calls = ReidTask.loss, []

    def stop_after_four(self: ReidTask, batch, epoch):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return original(self, batch, epoch)

    monkeypatch.setattr(ReidTask, "loss", stop_after_four)
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, config.train, tmp_path / "cut")
    monkeypatch.setattr(ReidTask, "loss", original)
    torch.manual_seed(1)
    rest = train(task_of(config, dataset), config.train, tmp_path / "cut")
    assert rest.resumed_from == 4 and rest.step == whole.step
    assert rest.metrics == pytest.approx(whole.metrics)


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    root = rgbnt201(tmp_path / "data")
    config = toy_config(root, "rgbnt201", train={"epochs": 1})
    train_reid(config, load_dataset(config.data), tmp_path / "run")
    other = toy_config(root, "rgbnt201", train={"epochs": 1}, loss={"sdtps": 0.5})
    with pytest.raises(ValueError, match=r"loss\.sdtps: 1\.0 -> 0\.5"):
        train_reid(other, load_dataset(other.data), tmp_path / "run")


def test_other_data_does_not_continue_a_run(tmp_path: Path) -> None:
    """As many steps, identities and cameras, but other shots: the second half would be trained on other labels."""
    root = rgbnt201(tmp_path / "data")
    config = toy_config(root, "rgbnt201", train={"epochs": 1})
    said: list[str] = []
    train_reid(config, load_dataset(config.data), tmp_path / "run", log=said.append)
    assert not any("embedding" in text for text in said)
    moved = (tmp_path / "data").rename(tmp_path / "elsewhere")
    same = toy_config(moved, "rgbnt201", train={"epochs": 1})
    assert train_reid(same, load_dataset(same.data), tmp_path / "run").resumed_from == 4
    for path in moved.glob("train_171/*/000001_*"):
        path.rename(path.with_name(path.name.replace("000001", "000009")))
    with pytest.raises(ValueError, match="shots"):
        train_reid(same, load_dataset(same.data), tmp_path / "run")
    for path in moved.glob("test/*/*_cam2_*"):
        path.rename(path.with_name(path.name.replace("_cam2_", "_cam7_")))
    with pytest.raises(ValueError, match=r"cameras: \[1, 2\] -> \[1, 2, 7\]"):
        train_reid(same, load_dataset(same.data), tmp_path / "run")
    cameras = toy_config(moved, "rgbnt201", train={"epochs": 1}, model={"camera_embedding": True})
    train_reid(cameras, load_dataset(cameras.data), tmp_path / "other", log=said.append)
    assert any("[7]" in text for text in said)


@pytest.fixture
def small(tmp_path: Path) -> tuple[ReidModel, ReidDataset, Path]:
    return toy_model(5, 2).eval(), load("rgbnt201", rgbnt201(tmp_path)), tmp_path


def test_figures_equal_those_computed_directly(small: tuple[ReidModel, ReidDataset, Path]) -> None:
    model, dataset, root = small
    with make_reader(toy_config(root, "rgbnt201"), dataset) as reader:
        found = evaluate(model, dataset, reader, batch_size=5, use_rerank=True)
        pixels = reader.batch(dataset.query).float() / 255
    assert [result.reranked for result in found] == [False, True]
    with torch.no_grad():
        branches = [model(pixels, return_pattern=p) for p in (1, 2)]
    branches = [branch / branch.square().sum(dim=1, keepdim=True).sqrt() for branch in branches]
    plain = 1 - sum(branch @ branch.T for branch in branches) / 2
    # Re-ranking takes vectors: both branches side by side, each as long as the other, the whole of length 1.
    both = torch.cat(branches, dim=1) / math.sqrt(2)
    again = rerank(both, both)
    expected = [slow_map(matrix.tolist(), dataset) for matrix in (plain, again)]
    for result, figures in zip(found, expected, strict=True):
        assert (result.metrics.mAP, float(result.metrics.cmc[0])) == pytest.approx(figures, abs=1e-6)
    assert abs(expected[0][0] - expected[1][0]) > 1e-3


def test_cases_in_one_pass_equal_each_by_itself(small: tuple[ReidModel, ReidDataset, Path]) -> None:
    model, dataset, root = small
    cases = [*all_cases(model, 1), *all_cases(model, 3)]
    with make_reader(toy_config(root, "rgbnt201"), dataset) as reader:
        together = extract(model, dataset, dataset.query, cases, reader, batch_size=5)
        pixels = reader.batch(dataset.query).float() / 255
    for case, features in zip(cases, together, strict=True):
        present = torch.tensor([[sensor in case.present for sensor in SENSORS]] * len(pixels))
        with torch.no_grad():
            alone = model.embed(pixels, None, present, case.missing).pattern(case.pattern)
        torch.testing.assert_close(features.vectors.flatten(1), alone)


def test_distances_are_taken_over_shared_sensors() -> None:
    vectors = torch.randn(3, 2, 3, 4)
    present = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    features = Features(vectors * present[:, None, :, None], present)
    ours = distances(features, features)
    for i in range(3):
        for j in range(3):
            shared = present[i] & present[j]
            cosines = [
                torch.cosine_similarity(vectors[i, r][shared].flatten(), vectors[j, r][shared].flatten(), dim=0)
                for r in range(2)
            ]
            expected = 1 - sum(cosines) / 2 if shared.any() else torch.tensor(1.0)
            assert ours[i, j].item() == pytest.approx(expected.item(), abs=1e-5)
    assert ours.diagonal().abs().max() < 1e-5
    complete = Features(vectors, torch.ones(3, 3, dtype=torch.bool))
    torch.testing.assert_close(distances(complete, complete), 1 - complete.flat() @ complete.flat().T)


def test_features_with_blank_sensors_are_those_of_blank_pictures(small: tuple[ReidModel, ReidDataset, Path]) -> None:
    """Blank pictures are encoded once a camera; the features must be as if every one had been."""
    _, dataset, root = small
    model = toy_model(5, len(dataset.cameras), camera_embedding=True).eval()
    with make_reader(toy_config(root, "rgbnt201"), dataset) as reader:
        found = extract(model, dataset, dataset.query, [Case(("RGB", "TI"), "zero", 3)], reader, batch_size=5)[0]
        pixels = reader.batch(dataset.query).float() / 255
    present = torch.tensor([[True, False, True]]).expand(len(pixels), -1)
    cameras = torch.tensor(dataset.camera_indices(dataset.query))
    with torch.no_grad():
        expected = model.embed(pixels, cameras, present, "zero").pattern(3)
    torch.testing.assert_close(found.vectors.flatten(1), expected)


def test_cost_counts_the_branch() -> None:
    slimmed, plain = cost(toy_model()), cost(toy_model(fusion="concat"))
    assert slimmed["gflops"] > plain["gflops"] > 0
    gained = slimmed["parameters_m"] - plain["parameters_m"]
    assert gained == pytest.approx(slimmed["sdtps_parameters_m"]) and plain["sdtps_parameters_m"] == 0
    assert throughput(toy_model(), 2, 0.01) > 0


def test_evaluation_refusals(small: tuple[ReidModel, ReidDataset, Path]) -> None:
    model, dataset, root = small
    with make_reader(toy_config(root, "rgbnt201"), dataset) as reader:
        with pytest.raises(ValueError, match="sonar"):
            evaluate(model, dataset, reader, [Case(("sonar",), "zero", 1)])
        with pytest.raises(ValueError, match="least"):
            evaluate(model, dataset, reader, [Case((), "zero", 1)])
        with pytest.raises(ValueError, match="concat"):
            evaluate(toy_model(5, 2, fusion="concat"), dataset, reader, default_cases(model))


def test_pictures(small: tuple[ReidModel, ReidDataset, Path]) -> None:
    model, dataset, root = small
    with make_reader(toy_config(root, "rgbnt201"), dataset) as reader:
        matrix = ranking(model, dataset, reader)
        ranked = ranked_picture(dataset, reader, matrix, [0, 5], places=4)
        kept = kept_picture(model, dataset, reader, dataset.query[:2])
        with pytest.raises(ValueError, match="selects"):
            kept_picture(toy_model(fusion="concat"), dataset, reader, dataset.query[:1])
        with pytest.raises(ValueError, match="modalities"):
            kept_picture(toy_model(sensors=("A", "B")), dataset, reader, dataset.query[:1])
    colours = {colour for _, colour in ranked.getcolors(1 << 24) or []}
    assert COLOURS["query"] in colours and colours & {COLOURS["right"], COLOURS["wrong"]}
    assert ranked.width > 5 * 96 and kept.height > 2 * 64
    plain = Image.new("RGB", (60, 40))
    right, wrong = (
        framed(plain, mark, "").convert("L").point(lambda v: 255 * (v > 230)) for mark in ("right", "wrong")
    )
    assert right.tobytes() != wrong.tobytes()  # told apart by the symbol alone


def test_a_choice_of_the_layouts_sensors(tmp_path: Path) -> None:
    root = rgbnt201(tmp_path)
    dataset = load_dataset(toy_config(root, "rgbnt201", data={"modalities": ["TI", "RGB"]}).data)
    assert dataset.modalities == ("TI", "RGB")
    with make_reader(toy_config(root, "rgbnt201"), dataset) as reader:
        found = evaluate(toy_model(5, 2, sensors=("TI", "RGB")), dataset, reader)
    assert found[0].case.present == ("TI", "RGB")
    with pytest.raises(ValueError, match="sonar"):
        load_dataset(toy_config(root, "rgbnt201", data={"modalities": ["RGB", "sonar"]}).data)
