"""Rows compared image by image: against a slow bootstrap, and the command that prints them."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from seps.cli.main import main
from seps.metrics import metrics_from_ranks, ranks, rsum_by_image
from seps.retrieval.experiments.paired import against, difference


def result(name: str, seed: int, values: list[float], key: str = "dev/none") -> dict[str, Any]:
    return {"name": name, "seed": seed, "rsum": {key: statistics.fmean(values)}, "by_image": {key: values}}


def drawn(count: int, seed: int, shift: float = 0.0) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(300 + shift, 100) for _ in range(count)]


def test_what_images_add_is_rsum() -> None:
    """Also with images of different numbers of captions, one without any, and ties; against counting by hand."""
    torch.manual_seed(0)
    owner = torch.tensor([0, 0, 1, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    scores = torch.randn(12, 14)
    scores[1] = scores[0]
    i2t, t2i = ranks(scores, owner)
    found = rsum_by_image(i2t, t2i, owner)
    assert found.mean().item() == pytest.approx(metrics_from_ranks(i2t, t2i).rsum)
    assert found.shape == (12,) and found[2] == 0
    for image in range(12):
        own = [t for t in range(14) if owner[t] == image]
        hits = sum(100 * 12 / 14 * sum(int(t2i[t]) < k for k in (1, 5, 10)) for t in own)
        if own:
            hits += 100 * 12 / 11 * sum(int(i2t[image]) < k for k in (1, 5, 10))
        assert found[image].item() == pytest.approx(hits), image


def test_the_difference_is_that_of_a_slow_bootstrap() -> None:
    """Seeds that both rows have count, and their differences are averaged image by image first."""
    count = 60
    results = [result("ours", seed, drawn(count, seed, 20)) for seed in (0, 1, 2)]
    results += [result("theirs", seed, drawn(count, 10 + seed)) for seed in (1, 2, 3)]
    found = difference(results, "ours", "theirs", "dev/none")
    assert found is not None and found.seeds == 2
    mine, other = ([drawn(count, seed + start, shift) for seed in (1, 2)] for start, shift in ((0, 20), (10, 0)))
    gaps = [statistics.fmean(mine[s][i] - other[s][i] for s in (0, 1)) for i in range(count)]
    assert found.mean == pytest.approx(statistics.fmean(gaps))
    source = random.Random(0)
    means = [statistics.fmean(source.choices(gaps, k=count)) for _ in range(4000)]
    assert found.error == pytest.approx(statistics.stdev(means), rel=0.1)
    assert found.p == pytest.approx(2 * min(sum(m <= 0 for m in means), sum(m >= 0 for m in means)) / 4000, abs=0.03)


def test_equal_rows_differ_by_nothing_and_clear_ones_clearly() -> None:
    same = [result(name, 0, drawn(50, 1)) for name in ("one", "two")]
    found = difference(same, "one", "two", "dev/none")
    assert found is not None and (found.mean, found.error, found.p) == (0, 0, 1)
    higher = [result("one", 0, [value + 30 + i % 3 for i, value in enumerate(drawn(50, 1))]), same[1]]
    found = difference(higher, "one", "two", "dev/none")
    assert found is not None and found.mean == pytest.approx(31, abs=0.1) and found.p < 0.001
    assert difference(higher, "one", "three", "dev/none") is None
    assert difference(higher, "one", "two", "dev/image") is None


def test_the_command_prints_the_table_and_refuses_what_is_not_there(tmp_path: Path, capsys: Any) -> None:
    aborted = {"name": "scan", "seed": 0, "rsum": {"dev/none": 1.0}}
    lines = [result("mean", 0, drawn(40, 1)), result("maxsim", 0, [value + 9 for value in drawn(40, 1)]), aborted]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = ["compare", "--report", "--out", str(tmp_path)]
    assert main([*report, "--against", "mean"]) == 0
    said = capsys.readouterr().out
    assert "| maxsim | +9.0 ± 0.0, p < 0.001 (1) |" in said and "### dev, none" in said
    assert said.rstrip() == (tmp_path / "table.md").read_text().rstrip()
    assert main([*report, "--against", "mean", "--only", "scan"]) == 0
    assert "maxsim | +9.0" not in capsys.readouterr().out
    assert main([*report, "--against", "scan"]) == 2
    assert "rSum" in capsys.readouterr().err
    assert main([*report, "--against", "nobody"]) == 2
    assert "--against" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--against scan"):
        against(lines, ["mean"], ["scan"])
