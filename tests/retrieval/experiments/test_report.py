"""Tables and picture of `seps compare`, from lines of results alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seps.cli.main import main
from seps.retrieval.experiments.report import Figure, markdown, plot_differences, rows_of, summarise
from seps.retrieval.experiments.suites import SUITES


def lines(name: str, values: list[float], **more: Any) -> list[dict[str, Any]]:
    return [
        {"name": name, "seed": i, "rsum": {"dev/none": v, "dev/image": v + 1}, **more} for i, v in enumerate(values)
    ]


def test_report_from_results_alone(tmp_path, capsys):
    results = lines("base", [100.0, 102.0, 104.0], step_ms=10.0, head_parameters=1234)
    results += lines("dense-none", [110.0, 111.0, 112.0], kept=[0.5, 0.25], ratio=[0.0, 0.0625])
    results += lines("rho-0.3", [101.0, 103.0, 106.0], gradient={"norm": 0.5, "share": 0.25})
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, results)) + '\n{"name": "rho-0.3", "se')
    assert main(["compare", "--suite", "ablation", "--out", str(tmp_path), "--report"]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "| 102.0 ± 2.0 | 103.0 ± 2.0 | 10 | 1,234 | 3 |" in text
    assert "111.0 ± 1.0 (**+9.0** ± 1.0)" in text and "103.3 ± 2.5 (+1.3 ± 0.6)" in text
    assert "0.500 → 0.250" in text and "25.0%" in text
    rows = rows_of("numbers", summarise(results, SUITES["ablation"]), SUITES["ablation"])
    assert rows == ["base", "rho-0.3"]
    pytest.importorskip("matplotlib")
    assert plot_differences(results, SUITES["ablation"], tmp_path / "again.png")
    with Image.open(tmp_path / "plot.png") as plot:  # two panels, a data set under two protocols, two rows
        assert plot.format == "PNG" and plot.size == (130 * (3 + 3 * 2), round(130 * (1.5 + 0.24 * 2)))
        assert len(plot.convert("RGB").getcolors(maxcolors=1 << 20)) > 10


def test_the_table_of_the_baselines():
    results = lines("mean", [10.0, 12.0]) + lines("default", [20.0])
    text = markdown(results, SUITES["baselines"]).splitlines()
    assert text[0] == "| model | protocol | rSum dev |"
    assert text[2] == "| **mean**: mean patch against mean word (VSE++ style) | none | 11.0 ± 1.4 |"
    assert text[5].endswith("| image | 21.0 |") and len(text) == 6
    assert not plot_differences(results, SUITES["baselines"], Path("nowhere.png"))


def test_one_seed_has_no_deviation():
    text = markdown(lines("base", [100.0]) + lines("rho-0.3", [101.0]), SUITES["ablation"])
    assert "| 101.0 (+1.0) |" in text and "±" not in text.replace("mean ± standard deviation", "")


def test_a_difference_is_taken_seed_by_seed():
    """Seeds far apart, the difference between them small and steady: clear. The other way round: not."""
    far, near = Figure({0: 1.0, 1: 51.0, 2: 101.0}), Figure({2: 100.0, 1: 50.1, 0: 0.1, 3: 7.0})
    assert (far.mean, far.spread) == (51.0, 50.0)
    difference = far.minus(near)
    assert difference is not None and difference.clear and difference.mean == pytest.approx(2.8 / 3)
    assert difference.error == pytest.approx(4.30 * difference.spread / 3**0.5)
    unsteady = Figure({0: 5.0, 1: 0.0}).minus(Figure({0: 1.0, 1: 0.0}))
    assert unsteady is not None and unsteady.mean == 2.0 and not unsteady.clear
    alone = Figure({0: 5.0}).minus(Figure({0: 1.0, 1: 2.0}))
    assert alone is not None and (alone.mean, alone.spread, alone.clear) == (4.0, 0.0, False)
    assert Figure({0: 5.0}).minus(Figure({1: 5.0})) is None
