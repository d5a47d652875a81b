"""The experiment on the synthetic set in miniature: every run is kept at once, a second call does what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

# Benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import reid_synthetic as experiment
from benchmarks.reid_truth import Truth, kept_rows, on_figure, patch_shares

from seps.reid.config import from_mapping
from seps.reid.synthetic.truth import KINDS
from seps.reid.task import load_dataset

SIZES = {
    "identities": 6,
    "images": 4,
    "epochs": 1,
    "batch": 8,
    "stride": 8,
    "width": 16,
    "seeds": 1,
    "freeze-blocks": 15,
}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
TINY += ["--device", "cpu", "--image-size", "64", "32", "--modality-dropout", "0", "0.3", "--variants"]


def test_a_failed_run_loses_no_other_and_the_next_call_does_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, ran = experiment.one_run, []

    def flaky(options: object, job: experiment.RunKey) -> dict[str, object]:
        ran.append(job.name)
        if len(ran) == 2:
            raise RuntimeError("the disk is on fire")
        return real(options, job)  # type: ignore[arg-type]

    monkeypatch.setattr(experiment, "one_run", flaky)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    call = ["--out", str(tmp_path), *TINY, "concat", "oracle"]
    assert experiment.main(call) == 1
    said = capsys.readouterr()
    assert "on fire" in said.err and "1 runs are missing" in said.err and "no curves.png" in said.err
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"variant": "oracle", "drop')
    assert experiment.main(call) == 0
    assert ran == ["oracle-d0-0", "oracle-d0.3-0", "concat-d0-0", "concat-d0.3-0", "oracle-d0.3-0"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(run["variant"], run["dropout"]) for run in results["runs"]] == [
        ("concat", 0.0), ("oracle", 0.0), ("concat", 0.3), ("oracle", 0.3),
    ]  # fmt: skip
    text = (tmp_path / "results.md").read_text()
    assert "## Modality dropout 0.3" in text and "- oracle:" in text and results["recipe"]["data_seed"] == 1
    assert experiment.main([*call[:2], "--report"]) == 0 and len(ran) == 5
    with pytest.raises(SystemExit, match="another epochs"):
        experiment.main([*call, "--epochs", "2"])


def test_the_oracle_keeps_the_figure_and_follows_crops_and_flips(tmp_path: Path) -> None:
    options = experiment.parse(["--out", str(tmp_path), *TINY, "oracle"])
    experiment.draw_set(options)
    config = from_mapping(experiment.settings(options, experiment.RunKey("oracle", 0.3, 0)))
    dataset, known = load_dataset(config.data), Truth(experiment.truth_path(options))
    task = experiment.make_task("oracle", config, dataset, known)
    pixels = task.reader.batch(dataset.query).float() / 255
    truth = known.of(dataset.query)
    expected = on_figure(patch_shares(truth, task.model.grid))
    with torch.no_grad():
        plain, mirrored = task.model.embed(pixels), task.model.embed(pixels.flip(-1))
    assert plain.keep is not None and torch.equal(plain.keep, expected)
    assert mirrored.keep is not None
    side = (len(truth), 3, *task.model.grid)
    assert torch.equal(mirrored.keep.view(side), on_figure(patch_shares(truth.flip(-1), task.model.grid)).view(side))
    rows = kept_rows(task.model, dataset, task.reader, known)
    for row in rows:
        assert sum(row["area"].values()) == pytest.approx(1) and set(row["kept"]) <= set(KINDS)
        total = sum(row["area"][kind] * part for kind, part in row["kept"].items())
        assert total == pytest.approx(row["rate"])
        if row["by"] != "score":
            assert row["rate"] == pytest.approx(0.5)
    told = [row for row in rows if row["by"] == "score" and not row["blinded"]]
    assert told and all(row["kept"]["figure"] > 0.8 and row["kept"]["background"] < 0.4 for row in told)
    batch = task.batch(0, 0, 0, 1)
    assert batch.images.shape[1] == 6
    absent = torch.tensor([[True, False, True]]).expand(len(batch.images), -1)
    blocks = task.model.embed(batch.images, batch.cameras, absent).original.view(-1, 3, 16)
    alone = task.model.embed(batch.images, batch.cameras).original.view(-1, 3, 16)
    assert (blocks[:, 1] == 0).all()
    torch.testing.assert_close(blocks[:, 0], alone[:, 0] * (3 / 2) ** 0.5)


def test_the_oracle_keeps_the_patches_that_show_the_figure() -> None:
    kinds = torch.randint(0, len(KINDS), (5, 3, 64, 32), generator=torch.Generator().manual_seed(0))
    kinds[0] = 0
    shares = patch_shares(kinds, (8, 4))
    torch.testing.assert_close(shares.sum(dim=-1), torch.ones(5, 3, 32))
    torch.testing.assert_close(shares[1, 1, 5, 3], (kinds[1, 1, 8:16, 8:16] == 3).float().mean())
    keep = on_figure(shares)
    assert bool((keep.sum(dim=-1) >= 1).all()) and bool((keep[shares[..., 2] >= 0.25] == 1).all())
