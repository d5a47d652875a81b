"""A trained model put to use: a threshold, an ONNX file, features of a folder, figures of every query."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reid_toys import (
    SENSORS,
    rgbnt201,
    slow_distances,
    slow_features,
    tiny_vit_file,
    toy_config,
    toy_demo_model,
    toy_model,
    write,
)
from torch import Tensor

from messages import mentions, naming
from seps.cli.main import call, main
from seps.export import ExportError, largest_difference
from seps.metrics import reid_metrics
from seps.reid.data import ReidDataset, ReidReader
from seps.reid.deploy import (
    Deployable,
    FolderFeatures,
    check_export,
    check_features_file,
    export_reid,
    folder_features,
)
from seps.reid.evaluate import Features, default_cases, distances, evaluate, extract
from seps.reid.pretrained import from_pretrained, save_pretrained
from seps.reid.run import load_trained, train_reid
from seps.reid.task import load_dataset, split_dataset
from seps.reid.trained import TrainedReid
from seps.reid.verification import calibrate, roc_picture


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run on a tree in RGBNT201's layout: a tiny ViT from a file that is gone afterwards, two identities held out."""
    root = tmp_path_factory.mktemp("deploy")
    rgbnt201(root / "data")
    encoder = tiny_vit_file(root / "vit.pth")
    config = toy_config(
        root / "data",
        "rgbnt201",
        data={"holdout": 2},
        model={"encoder": str(encoder), "camera_embedding": True},
        train={"epochs": 1},
    )
    train_reid(config, load_dataset(config.data), root / "run")
    encoder.unlink()
    yield root


def opened(root: Path) -> tuple[TrainedReid, ReidDataset, ReidReader]:
    loaded = load_trained(root / "run")
    return loaded, load_dataset(loaded.config.data), ReidReader(SENSORS, loaded.config.model.image_size)


def test_the_threshold_is_that_of_the_held_out_pairs(trained: Path) -> None:
    loaded, dataset, reader = opened(trained)
    found = calibrate(loaded, loaded.config, dataset, reader, 0.25)
    _, dev = split_dataset(loaded.config, dataset)
    assert len({shot.pid for shot in dev.query}) == 2 and found.held_out.identities == 2
    # By hand: each pair of shots by different cameras once, by the network's own call.
    case = default_cases(loaded.model)[0]
    held = ReidDataset("held", SENSORS, dataset.train, dev.query, dev.query)
    rows, _ = slow_features(loaded.model, held, reader, case)
    matrix = slow_distances(rows, rows)
    genuine, impostor = [], []
    for i, one in enumerate(dev.query):
        for j in range(i + 1, len(dev.query)):
            if one.camid != dev.query[j].camid:
                (genuine if one.pid == dev.query[j].pid else impostor).append(matrix[i][j])
    assert found.held_out.genuine.numel() == len(genuine) == 8
    assert found.held_out.impostor.numel() == len(impostor) == 8
    assert sorted(found.held_out.impostor.tolist()) == pytest.approx(sorted(impostor), abs=1e-5)
    # A quarter of eight is two: the threshold lies just below the third nearest impostor.
    assert found.distance == pytest.approx(sorted(impostor)[2], abs=1e-5) and found.distance < sorted(impostor)[3]
    assert found.to_json()["held_out"]["false_accept"] <= 0.25
    assert found.to_json()["test"]["identities"] == 3
    assert found.test.genuine.numel() == 3 * 4 and found.test.impostor.numel() == 3 * 8
    picture = np.asarray(roc_picture(found))
    for colour in ((0, 114, 178), (213, 94, 0)):
        assert (picture == colour).all(axis=2).sum() > 30
    reader.close()


def test_no_threshold_without_identities_that_were_held_out(trained: Path) -> None:
    loaded, dataset, reader = opened(trained)
    settings = {**loaded.config.to_json()}
    settings["data"] = {**settings["data"], "holdout": 0}
    settings["train"] = {**settings["train"], "eval_every": 0}
    from seps.reid.config import from_mapping

    with pytest.raises(ValueError, match="identity"):
        calibrate(loaded, from_mapping(settings), dataset, reader, 0.25)
    with pytest.raises(ValueError, match="1000"):
        calibrate(loaded, loaded.config, dataset, reader, 0.001)
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"network": "demo", "camera_embedding": True}, {"guides": "position", "selection": "gate"}],
    ids=["cameras", "gate"],
)
def test_the_onnx_file_gives_the_features_of_the_evaluation(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    demo = settings.pop("network", None)
    model = (toy_demo_model(**settings) if demo else toy_model(cameras=3, **settings)).eval()
    config = toy_config(tmp_path, model={"width": 16})
    assert export_reid(TrainedReid(model, config, (1, 2, 5), tmp_path), tmp_path / "out", threshold=0.5) < 1e-4
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    assert facts["sensors"] == list(SENSORS) and facts["image_size"] == [64, 32] and facts["threshold"] == 0.5
    assert facts["cameras"] == ([1, 2, 5] if settings.get("camera_embedding") else None)
    # Other numbers of shots than the traced one, and cosines that are those the ranking uses.
    for shots in (1, 5):
        inputs: dict[str, Tensor] = {"images": torch.rand(shots, 3, 3, 64, 32)}
        if model.camera_embedding is not None:
            inputs["cameras"] = torch.arange(shots) % 3
        module = Deployable(model, model.patterns[-1]).eval()
        assert largest_difference(module, tmp_path / "out" / "model.onnx", inputs) < 1e-4
        with torch.no_grad():
            vectors = module(*inputs.values())
            flat = model.embed(inputs["images"], inputs.get("cameras")).pattern(model.patterns[-1])
        assert vectors.shape == (shots, facts["width"])
        features = Features(flat.view(shots, -1, 3, 16), torch.ones(shots, 3, dtype=torch.bool), model.concatenated)
        torch.testing.assert_close(1 - vectors @ vectors.T, distances(features, features), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_export_replaces_its_own_files_alone(tmp_path: Path) -> None:
    model, config = toy_model(fusion="concat").eval(), toy_config(tmp_path)
    trained = TrainedReid(model, config, (1, 2, 3), tmp_path)
    assert export_reid(trained, tmp_path / "out") < 1e-4
    check_export(tmp_path / "out")
    (tmp_path / "out" / "model.onnx").write_bytes(b"somebody's")
    with pytest.raises(ExportError, match="way"):
        export_reid(trained, tmp_path / "out")
    assert (tmp_path / "out" / "model.onnx").read_bytes() == b"somebody's"


def test_features_of_a_folder(trained: Path, tmp_path: Path) -> None:
    loaded, dataset, reader = opened(trained)
    for sensor in SENSORS:
        for pid in (20, 21):
            source = trained / "data" / "test" / sensor / f"{pid:06d}_cam2_0_00.jpg"
            (tmp_path / "shots" / sensor).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tmp_path / "shots" / sensor / f"{pid}_c2.jpg")
    found = folder_features(loaded, loaded.config, tmp_path / "shots")
    assert found.names == ["20_c2", "21_c2"] and found.cameras == [2, 2]
    records = [shot for shot in dataset.query if shot.camid == 2 and shot.name.endswith("_00") and shot.pid < 22]
    expected = extract(loaded.model, dataset, records, default_cases(loaded.model), reader)[0].flat()
    torch.testing.assert_close(torch.from_numpy(found.features), expected)
    found.save(tmp_path / "features.npz")
    with np.load(tmp_path / "features.npz", allow_pickle=False) as held:
        assert held["names"].tolist() == found.names and np.array_equal(held["features"], found.features)
    other = folder_features(loaded, loaded.config, tmp_path / "shots", camera=1)
    assert other.cameras == [1, 1] and not np.allclose(other.features, found.features)
    # Names of the layout that the run was trained on tell it too; they were taken for names without a camera.
    published = folder_features(loaded, loaded.config, trained / "data" / "test")
    assert len(published.names) == 12
    assert published.cameras == [int(name[len("000020_cam")]) for name in published.names]
    with pytest.raises(ValueError, match=naming("(1, 2)", "[7]")):
        folder_features(loaded, loaded.config, tmp_path / "shots", camera=7)
    write(tmp_path / "shots" / "RGB" / "33_c1.jpg", 33, (64, 32))
    with pytest.raises(ValueError, match=naming("NI", "TI")):
        folder_features(loaded, loaded.config, tmp_path / "shots")
    reader.close()


def test_a_picture_that_cannot_be_read_is_refused_or_left_out(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence named two settings, of which `seps reid features` obeyed neither for such a picture."""
    shots, file = tmp_path / "shots", tmp_path / "features.npz"
    shutil.copytree(trained / "data" / "test", shots)
    names = sorted(path.stem for path in (shots / "RGB").iterdir())
    (shots / "NI" / f"{names[1]}.jpg").write_bytes(b"no picture")
    (shots / "TI" / f"{names[3]}.jpg").unlink()
    command = ["reid", "features", str(trained / "run"), str(shots), "--out", str(file), "--camera", "1"]
    assert main([*command, "--data.on_problem", "skip"]) == 2
    told = capsys.readouterr().err
    assert f"{shots}/NI/{names[1]}.jpg" in told
    remedy = ["--data.on_problem", "skip", "--data.verify_files", "true"]
    assert " ".join(remedy) in told and not file.exists()
    assert main([*command, *remedy]) == 0
    told = capsys.readouterr().err
    assert mentions(told, "2", "shots") and f"NI/{names[1]}.jpg" in told and f"{names[3]}" in told
    with np.load(file, allow_pickle=False) as held:
        assert held["names"].tolist() == [name for name in names if name not in (names[1], names[3])]
    assert main([*command, *remedy[2:]]) == 2
    assert "--data.on_problem" in capsys.readouterr().err


def test_a_broken_file_in_the_place_of_the_features_is_left_as_it_is(tmp_path: Path) -> None:
    """A cut archive and an empty file ended in a traceback."""
    whole = FolderFeatures(["a"], np.ones((1, 4), dtype=np.float32), [1])
    file = tmp_path / "features.npz"
    check_features_file(file)
    whole.save(file)
    check_features_file(file)
    for broken in (file.read_bytes()[:200], b"PK\x03\x04 no archive", b"\x80\x04}q\x00.", b"mine"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="features"):
            check_features_file(file)
    file.write_bytes(b"")  # as `touch` makes it: nothing is lost
    check_features_file(file)


def test_figures_of_every_query_average_to_the_whole(trained: Path) -> None:
    loaded, dataset, reader = opened(trained)
    result = evaluate(loaded.model, dataset, reader)[0]
    rows = result.per_query(dataset.query)
    assert len(rows) == result.metrics.valid_queries == 12
    assert sum(row["AP"] for row in rows) / len(rows) == pytest.approx(100 * result.metrics.mAP, abs=1e-9)
    first = sum(row["first_match"] == 1 for row in rows) / len(rows)
    assert first == pytest.approx(float(result.metrics.cmc[0]), abs=1e-6)
    assert [row["name"] for row in rows] == [shot.name for shot in dataset.query]
    reader.close()


@pytest.mark.parametrize("block", [1 << 22, 3])
def test_a_query_without_a_match_is_left_out_of_the_list(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seps.metrics.reid._BLOCK_ENTRIES", block)
    matrix = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.1, 0.3]])
    metrics = reid_metrics(matrix, [1, 9, 2], [2, 1, 1], [0, 0, 0], [1, 1, 1])
    assert metrics.queries is not None and metrics.precisions is not None and metrics.first_ranks is not None
    assert metrics.queries.tolist() == [0, 2] and metrics.first_ranks.tolist() == [2, 2]
    assert metrics.precisions.tolist() == pytest.approx([(1 / 2 + 2 / 3) / 2, 1 / 2])


def test_the_commands(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(trained / "run"), tmp_path / "threshold"
    assert main(["reid", "threshold", run, "--out", str(out), "--false-accept", "0.25", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "2" in told and (out / "roc.png").is_file()
    stated = json.loads((out / "threshold.json").read_text())
    assert stated["asked_false_accept"] == 0.25 and stated["pattern"] == 3
    assert main(["reid", "export", run, "-o", str(tmp_path / "onnx"), "--threshold", str(out)]) == 0
    assert json.loads((tmp_path / "onnx" / "export.json").read_text())["threshold"] == stated["distance"]
    shots = str(trained / "data" / "test")
    file = str(tmp_path / "features.npz")
    arguments = ["reid", "features", run, shots, "--out", file, "--camera", "1", "--device", "cpu"]
    assert main(arguments) == 0 and main(arguments) == 0
    assert mentions(capsys.readouterr().out, "12", "96")
    assert main(["reid", "eval", run, "--json", "--per-query", "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"][0]["queries"]) == 12
    foreign = tmp_path / "foreign.npz"
    foreign.write_bytes(b"mine")
    for words, sentence in (
        (["threshold", run, "--out", str(out), "--data.holdout", "0.5"], "identities"),
        (["threshold", run, "--out", str(out), "--false-accept", "0.001"], "at least 1000 are needed"),
        (["features", run, shots, "--out", str(tmp_path / "features.txt"), "--camera", "1"], "written as .npz"),
        (["features", run, shots, "--out", str(foreign), "--camera", "1"], "left"),
        (["features", run, str(tmp_path), "--out", file, "--camera", "1"], "pictures"),
        (["features", run, shots, "--out", file, "--camera", "1", "--model.width", "8"], "settings"),
        (
            ["export", run, "-o", str(tmp_path / "o"), "--threshold", str(out), "--pattern", "1"],
            "threshold",
        ),
        (["eval", run, "--per-query"], "give --json too"),
    ):
        assert main(["reid", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert foreign.read_bytes() == b"mine"


def test_no_threshold_on_other_shots_than_those_of_the_run(trained: Path, tmp_path: Path) -> None:
    """Which identities were held out follows from all training shots: on others, trained ones would be among them."""
    loaded, dataset, reader = opened(trained)
    shutil.copytree(trained / "data", tmp_path / "fewer")
    for shot in (tmp_path / "fewer" / "train_171").rglob("000001_*"):
        shot.unlink()
    fewer = load_dataset(replace(loaded.config.data, root=str(tmp_path / "fewer")))
    _, before = split_dataset(loaded.config, dataset)
    _, after = split_dataset(loaded.config, fewer)
    assert {shot.pid for shot in after.query} - {shot.pid for shot in before.query}  # trained on, and held out now
    with pytest.raises(ValueError, match="training"):
        calibrate(loaded, loaded.config, fewer, reader, 0.25)
    # The same by a folder of the model, and by a converted one, which states the number of identities alone.
    save_pretrained(loaded, tmp_path / "saved")
    saved = from_pretrained(tmp_path / "saved")
    assert calibrate(saved, saved.config, dataset, reader, 0.25) is not None
    for model in (saved, replace(saved, shots=None)):
        with pytest.raises(ValueError, match="training"):
            calibrate(model, model.config, fewer, reader, 0.25)
    reader.close()


def test_no_threshold_without_wrong_pairs_or_right_ones(trained: Path, tmp_path: Path) -> None:
    """One held-out identity has no pair of two; a gallery of one camera has no pair of two cameras."""
    config = toy_config(trained / "data", "rgbnt201", data={"holdout": 1}, train={"epochs": 1})
    dataset = load_dataset(config.data)
    fit, _ = split_dataset(config, dataset)
    model = toy_model(len(fit.identities)).eval()
    alone = TrainedReid(model, config, dataset.cameras, tmp_path)
    with ReidReader(SENSORS, (64, 32)) as reader:
        with pytest.raises(ValueError, match="identities"):
            calibrate(alone, config, dataset, reader, 0.25)
        config = toy_config(trained / "data", "rgbnt201", data={"holdout": 2}, train={"epochs": 1})
        one_camera = tuple(shot for shot in dataset.query if shot.camid == 1)
        narrow = replace(dataset, query=one_camera, gallery=one_camera)
        two = TrainedReid(toy_model(len(fit.identities) - 1).eval(), config, dataset.cameras, tmp_path)
        with pytest.raises(ValueError, match="identity"):
            calibrate(two, config, narrow, reader, 0.25)


@pytest.mark.slow
def test_a_threshold_of_another_model_is_refused(trained: Path, tmp_path: Path) -> None:
    """The distance of one checkpoint means nothing for the features of another."""
    out = tmp_path / "threshold"
    run = ["reid", "threshold", str(trained / "run"), "--out", str(out), "--false-accept", "0.25", "--device", "cpu"]
    assert main(run) == 0
    other = tmp_path / "other"
    loaded = load_trained(trained / "run")
    with torch.no_grad():
        next(loaded.model.parameters()).add_(0.01)
    save_pretrained(loaded, other)
    with pytest.raises(ValueError, match="threshold"):
        call("reid", ["export", str(other), "-o", str(tmp_path / "onnx"), "--threshold", str(out)])
    assert not (tmp_path / "onnx").exists()
    # The same weights in another place are taken; a file that does not name its model is not.
    save_pretrained(load_trained(trained / "run"), tmp_path / "same")
    export = ["reid", "export", str(tmp_path / "same"), "-o", str(tmp_path / "onnx"), "--threshold", str(out)]
    assert main(export) == 0
    stated = json.loads((out / "threshold.json").read_text())
    (out / "threshold.json").write_text(json.dumps({k: v for k, v in stated.items() if k != "model_sha256"}))
    assert main(export) == 2
