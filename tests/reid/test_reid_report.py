"""`seps reid report`: seeds of several sets, the papers' figures beside ours, and going on where it stopped."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from reid_toys import msvr310, rgbnt201

from seps.cli.main import main
from seps.method.config import ConfigError
from seps.reid import report
from seps.reid.report import PUBLISHED, Row, joined, picture, read_figures, rows_of


@pytest.fixture
def configs(tmp_path: Path) -> list[Path]:
    """Settings of two toy sets in the published layouts."""
    made = []
    for name, tree, size in (("RGBNT201", rgbnt201, [64, 32]), ("MSVR310", msvr310, [32, 64])):
        values = {
            "data": {
                "layout": name.lower(),
                "root": str(tree(tmp_path / name)),
                "identities": 2,
                "images": 2,
                "holdout": 1,
            },
            "model": {"image_size": size, "stride": 16, "width": 16, "aggr_ratio": 0.5, "pretrained": False},
            "train": {"epochs": 1},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        made.append(path)
    return made


@pytest.fixture
def run(configs: list[Path], tmp_path: Path) -> Callable[..., int]:
    def call(*words: str, seeds: tuple[str, ...] = ("0", "1")) -> int:
        files = [word for path in configs for word in ("--config", str(path))]
        out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
        return main(["reid", "report", *files, "--seeds", *seeds, *out, *words])

    return call


def seeds_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("seed.json"))]


def test_the_table_is_that_of_the_seeds(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--missing", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    found = [seed for seed in seeds_of(tmp_path / "out") if seed["set"] == "RGBNT201"]
    assert [seed["seed"] for seed in found] == [0, 1] and all(
        seed["seconds"] > 0 and seed["peak_mib"] > 1 for seed in found
    )
    for sensors in (["RGB", "NI", "TI"], ["NI"]):
        values = [next(r["mAP"] for r in seed["rows"] if r["present"] == sensors) for seed in found]
        row = next(r for r in rows if (r["set"], r["sensors"], r["figure"]) == ("RGBNT201", " + ".join(sensors), "mAP"))
        assert row["mean"] == pytest.approx(statistics.fmean(values))
        assert row["deviation"] == pytest.approx(statistics.stdev(values))
    # Every set of sensors, and every paper that states the figure.
    assert len({r["sensors"] for r in rows}) == 7
    papers = {
        (r["paper"], r["published"]) for r in rows if r["set"] == "MSVR310" and r["figure"] == "mAP" and r["paper"]
    }
    assert papers == {("DeMo (arXiv 2412.10650)", 49.2), ("Signal", 53.2)}
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| 49.2 |" in text and "## Settings of MSVR310" in text and "width: 16" in text
    with Image.open(tmp_path / "out" / "report.png") as image:
        assert image.height > 14 * 30


@pytest.mark.slow
def test_a_report_goes_on_where_it_stopped(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(seeds=("0",)) == 0
    first = seeds_of(tmp_path / "out")
    trained: list[str] = []
    original = report.train_reid

    def counted(config: Any, dataset: Any, place: Path, **options: Any) -> Any:
        trained.append(f"{place.parent.name}/{place.name}")
        if len(trained) == 2:
            raise KeyboardInterrupt
        return original(config, dataset, place, **options)

    monkeypatch.setattr(report, "train_reid", counted)
    run()
    assert trained == ["RGBNT201/seed-1", "MSVR310/seed-1"]
    assert run() == 0
    assert trained[2:] == ["MSVR310/seed-1"], "finished seeds were trained again"
    assert [seed for seed in seeds_of(tmp_path / "out") if seed["seed"] == 0] == first
    assert run("--train.epochs", "2") == 2, "a seed of other settings was taken"


def test_a_difference_is_ours_less_the_papers(tmp_path: Path) -> None:
    values = {"set": "x", "layout": "rgbnt201", "rows": [{"present": ["RGB", "NI", "TI"], "mAP": 75.0, "r1": 80.0}]}
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"RGBNT201": {"mine": {"RGB + NI + TI": {"mAP": 70}}}}), encoding="utf-8")
    rows = rows_of(
        [values, {**values, "rows": [{**values["rows"][0], "mAP": 77.0}]}], joined(PUBLISHED, read_figures(more))
    )
    found = {(row.paper, row.figure): row.difference for row in rows}
    assert found["DeMo (arXiv 2412.10650)", "mAP"] == pytest.approx(76 - 79)
    assert found["mine", "mAP"] == pytest.approx(6) and found["SDTPS inside DeMo", "mAP"] == pytest.approx(0)
    assert rows[0].cells()[5] == "76.0 ± 1.4" and Row("x", "RGB", "mAP", (3.0,)).cells()[5] == "3.0"
    # A bar that is twice as long has twice as many of its pixels.
    bars = []
    for mean in (30.0, 60.0):
        pixels = np.asarray(picture([Row("x", "RGB", "mAP", (mean,))]))
        bars.append(int((pixels == (0, 114, 178)).all(axis=-1).sum()))
    assert bars[1] == pytest.approx(2 * bars[0], rel=0.05)
    more.write_text('{"rgbnt201": {"mine": 70}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold"):
        read_figures(more)
