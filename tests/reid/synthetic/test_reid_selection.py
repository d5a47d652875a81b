"""The study of what dropping patches is worth, in miniature: its statistics, its network, and that a call goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

# Benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import reid_selection as study
from benchmarks.selection import stats
from benchmarks.selection.data import Batches, Sets, SetSize, evaluation_batch, make_sets, save_sets, write_stem
from benchmarks.selection.model import NetSize, StudyModel, matched
from benchmarks.selection.rows import ROWS, Row, keep_all_twin, random_twin
from benchmarks.selection.runs import Recipe, evaluate, train_row

from seps.nn.aggregation import merge
from seps.reid.synthetic.canvas import FIGURE
from seps.reid.synthetic.truth import BLIND

NET = NetSize(16, 2, 2, 1)
TINY = Recipe(steps=2, identities=4, images=2, net=NET)
SIZE = SetSize(identities=10, images=4, height=48, width=32)


@pytest.fixture(scope="module")
def sets() -> Sets:
    return make_sets([1, 2], SIZE, None)


def model_of(row: Row, sets: Sets) -> StudyModel:
    torch.manual_seed(0)
    return StudyModel(row, sets.grid, 6, NET).eval()


def some_shots(sets: Sets) -> tuple[Tensor, Tensor, Tensor]:
    batch = evaluation_batch(sets, torch.tensor([0]), sets.split("query"))
    return batch.features[0], batch.shares[0], batch.noise[0]


def line(row: str, data_seed: int, seed: int, values: list[float], pids: list[int]) -> dict[str, Any]:
    return {"row": row, "data_seed": data_seed, "seed": seed, "pids": pids, "ap": {"2": values}, "kept": {}}


def lines_of(row: str, value: Callable[[int, int, int], float]) -> list[dict[str, Any]]:
    """20 identities with 1 or 2 queries, 5 sets, 3 seeds; value(data_seed, seed, identity)."""
    pids = [i for i in range(20) for _ in range(1 + i % 2)]
    return [
        line(row, data, seed, [value(data, seed, pid) for pid in pids], pids) for data in range(5) for seed in range(3)
    ]


def test_a_difference_is_paired_and_weighs_identities_alike() -> None:
    noise = np.random.default_rng(0).normal(50, 15, (5, 3, 20))
    plain = lines_of("keep-all", lambda d, s, i: float(noise[d, s, i]))
    better = lines_of("topk-50", lambda d, s, i: float(noise[d, s, i]) + (4.0 if i % 2 else 0.0))
    rows = stats.by_row(plain + better)
    found = stats.compare(rows["topk-50"], rows["keep-all"])
    # Queries with a gain are two thirds of all, identities a half: the mean is over identities.
    assert found is not None and found.mean == pytest.approx(2.0) and found.error == pytest.approx(0.0, abs=1e-9)
    assert found.runs == 15 and found.p_identities < 0.001 and found.p_sets < 0.001
    reverse = stats.compare(rows["keep-all"], rows["topk-50"])
    assert reverse is not None and reverse.mean == pytest.approx(-2.0)
    assert stats.compare(rows["topk-50"], rows["keep-all"], "3") is None


def test_sets_that_disagree_are_seen_by_the_second_p_alone() -> None:
    """A gain of 6 in two sets and a loss of 2 in three is certain for these sets, and not for sets in general."""
    plain = lines_of("keep-all", lambda d, s, i: 50.0)
    mixed = lines_of("topk-50", lambda d, s, i: 56.0 if d < 2 else 48.0)
    rows = stats.by_row(plain + mixed)
    found = stats.compare(rows["topk-50"], rows["keep-all"])
    assert found is not None and found.mean == pytest.approx(1.2)
    assert found.error == pytest.approx(np.std([6, 6, -2, -2, -2], ddof=1) / 5**0.5)
    assert found.p_identities < 0.001 and found.p_sets > 0.2


def test_the_p_of_pure_chance_is_spread_evenly() -> None:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(60):
        values = rng.normal(0, 5, (5, 3, 20))
        rows = stats.by_row(
            lines_of("keep-all", lambda d, s, i: 50.0)
            + lines_of("topk-50", lambda d, s, i, v=values: 50 + float(v[d, s, i]))  # type: ignore[misc]
        )
        compared = stats.compare(rows["topk-50"], rows["keep-all"], draws=500)
        assert compared is not None
        found.append(compared.p_identities)
    assert 0.3 < np.mean(found) < 0.7 and sum(p < 0.05 for p in found) <= 9


@pytest.mark.parametrize(
    ("over_all", "over_random", "expected"),
    [(4.0, 4.0, (True, True)), (2.0, 4.0, (True, False)), (4.0, 0.0, (False, False)), (-4.0, 4.0, (False, False))],
)
def test_selection_helps_only_if_it_beats_both(
    over_all: float, over_random: float, expected: tuple[bool, bool]
) -> None:
    wave = np.random.default_rng(1).normal(0, 1, 20)
    lines = lines_of("topk-50", lambda d, s, i: 50 + float(wave[i]))
    lines += lines_of("keep-all", lambda d, s, i: 50 - over_all)
    assert stats.helps(ROWS["topk-50"], stats.by_row(lines)) is None
    lines += lines_of("random-50", lambda d, s, i: 50 - over_random)
    assert stats.helps(ROWS["topk-50"], stats.by_row(lines)) == expected
    text = stats.report(lines)
    assert ("`topk-50`: selection helps" in text) == expected[0] and ("the goal is met" in text) == expected[1]


def test_rows_of_other_queries_are_not_paired() -> None:
    rows = stats.by_row([line("keep-all", 1, 0, [1.0, 2.0], [1, 2]), line("topk-50", 1, 0, [1.0, 2.0], [1, 3])])
    with pytest.raises(ValueError, match="data seed 1"):
        stats.compare(rows["topk-50"], rows["keep-all"])


def test_every_row_that_selects_has_its_twins() -> None:
    for row in ROWS.values():
        assert keep_all_twin(row) in ROWS
        if row.rule != "agreement+score" and (twin := random_twin(row)) is not None:
            assert ROWS[twin].ratio == row.ratio and ROWS[twin].branch == row.branch and ROWS[twin].early == row.early


def test_runs_stacked_are_the_runs_alone(sets: Sets) -> None:
    """A run depends on its own seeds, not on which others it is trained with."""
    row = ROWS["topk-50"]
    together = train_row(row, sets, [(1, 0), (2, 1)], TINY)
    alone = train_row(row, sets, [(2, 1)], TINY)
    assert together[2][1] == pytest.approx(alone[2][0], rel=1e-4) and together[2][0] != together[2][1]
    both = evaluate(together[0], together[1], row, sets, [(1, 0), (2, 1)])
    one = evaluate(alone[0], alone[1], row, sets, [(2, 1)])
    assert both[1]["ap"]["1"] == pytest.approx(one[0]["ap"]["1"], abs=2.0) and both[1]["pids"] == one[0]["pids"]


def test_every_rule_keeps_what_it_says(sets: Sets) -> None:
    features, shares, noise = some_shots(sets)
    kept = {}
    for name in ("keep-all", "topk-25", "random-25", "inverted-50", "oracle-25", "sighted", "agreement-50",
                 "agreement+score-25", "left-out-25", "telling-25", "early-topk-25", "early-oracle-25",
                 "early-telling-25", "pooled-25", "first-pooled-25", "first-oracle-25"):  # fmt: skip
        keep = model_of(ROWS[name], sets)(features, shares, noise)[3]
        assert keep.shape == shares.shape[:3] and set(keep.unique().tolist()) <= {0.0, 1.0}
        if ROWS[name].rule != "sighted":
            assert bool((keep.sum(dim=-1) == np.ceil(ROWS[name].ratio * keep.shape[-1])).all())
        kept[name] = keep
    figure, blind = shares[..., FIGURE], shares[..., BLIND]
    assert float((kept["oracle-25"] * figure).sum()) > float((kept["random-25"] * figure).sum())
    assert torch.equal(kept["oracle-25"], kept["early-oracle-25"])
    assert bool((kept["sighted"][blind < 0.45] == 1).all()) and float((kept["sighted"] * blind).mean()) < 0.1
    top = model_of(Row("", "score", 0.5), sets)(features, shares, noise)[3]
    assert torch.equal(kept["inverted-50"], 1 - top)


def test_an_early_selection_passes_on_the_kept_patches_alone(sets: Sets) -> None:
    model, lengths = model_of(ROWS["early-oracle-25"], sets), []
    for block in model.backbones[0].blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape[1]))
    model(*some_shots(sets))
    assert lengths == [25, 7]
    lengths.clear()
    model.become(ROWS["first-oracle-25"])
    model(*some_shots(sets))
    assert lengths == [7, 7]


def test_what_a_patch_is_worth_equals_leaving_it_out(sets: Sets) -> None:
    model = model_of(ROWS["left-out-25"], sets)
    assert model.sdtps is not None and model.sdtps_neck is not None
    torch.nn.init.normal_(model.sdtps_neck.classifier.weight, std=0.5)
    patches, labels = torch.randn(5, 3, 24, 16), torch.tensor([0, 1, 2, 3, 4])

    def feature(keep: Tensor) -> Tensor:
        found = []
        for number in range(3):
            own = patches[:, number]
            merged = merge(own, getattr(model.sdtps, f"sensor{number}_aggr").logits(own), keep[:, number])
            found.append(torch.cat([merged, torch.zeros(5, 1, 16)], dim=1).mean(dim=1))
        return torch.cat(found, dim=1)

    whole = feature(torch.ones(5, 3, 24))
    mean, spread = whole.mean(dim=0), (whole.var(dim=0, unbiased=False) + 1e-5).sqrt()

    def entropy(feature: Tensor) -> Tensor:
        scores = ((feature - mean) / spread) @ model.sdtps_neck.classifier.weight.T  # type: ignore[union-attr]
        return F.cross_entropy(scores, labels, reduction="none")

    with torch.no_grad():
        found = model.left_out_rise(patches, labels)
        for sensor, place in ((0, 0), (1, 7), (2, 23)):
            keep = torch.ones(5, 3, 24)
            keep[:, sensor, place] = 0
            torch.testing.assert_close(
                found[:, sensor, place], entropy(feature(keep)) - entropy(whole), atol=1e-4, rtol=1e-3
            )


def test_matching_token_by_token_equals_the_loop() -> None:
    left, right = torch.randn(2, 3, 4, 8), torch.randn(5, 3, 4, 8)
    for a in range(2):
        for b in range(5):
            total = 0.0
            for sensor in range(3):
                cosines = F.normalize(left[a, sensor], dim=-1) @ F.normalize(right[b, sensor], dim=-1).T
                total += float(cosines.amax(dim=1).mean() + cosines.amax(dim=0).mean()) / 2
            assert float(matched(left, right)[a, b]) == pytest.approx(total / 3, abs=1e-5)


def test_batches_follow_from_the_run_and_mark_what_is_lost(sets: Sets) -> None:
    batches = Batches(sets, [(1, 0), (2, 0)], 3, 4, 2)
    other = Batches(sets, [(2, 0)], 3, 4, 2)
    first, second = batches(1), other(1)
    assert torch.equal(first.features[1], second.features[0]) and torch.equal(first.noise[1], second.noise[0])
    assert bool((first.labels.view(2, 4, 2).amax(-1) == first.labels.view(2, 4, 2).amin(-1)).all())
    torch.testing.assert_close(first.shares.sum(dim=-1), torch.ones(first.shares.shape[:-1]), atol=0.02, rtol=0)
    outside = (first.features == 0).all(dim=-1)
    assert bool((first.shares[outside][:, BLIND] == 1).all())


def test_a_call_goes_on_with_what_is_missing_and_repeats_itself(tmp_path: Path, sets: Sets) -> None:
    def call(out: str, *more: str) -> list[str]:
        words = f"run --out {tmp_path / out} --device cpu --processes 1 --data-seeds 1 2 --group 2 --seeds 1 --steps 2"
        words += " --identities 4 --images 2 --net 16 2 2 1 --set-identities 10 --set-images 4"
        return [*words.split(), "--set-height", "48", "--set-width", "32", *more]

    for out in ("a", "b"):
        (tmp_path / out).mkdir()
        save_sets(sets, tmp_path / out / "sets-1-2.pt")
        (tmp_path / out / "time.md").write_text("## Time\n")
    assert study.main(call("a", "--rows", "concat")) == 0
    with (tmp_path / "a" / "runs.jsonl").open("a") as file:
        file.write('{"row": "topk-25", "data')
    assert study.main(call("a", "--rows", "concat", "topk-25")) == 0
    lines = study.read_lines(tmp_path / "a" / "runs.jsonl")
    assert [(one["row"], one["data_seed"]) for one in lines] == [
        (name, seed) for name in ("concat", "topk-25", "topk-25 as keep-all", "topk-25 as match") for seed in (1, 2)
    ]
    assert study.main(call("b", "--rows", "topk-25")) == 0
    again = study.read_lines(tmp_path / "b" / "runs.jsonl")
    assert [one["ap"] for one in again] == [one["ap"] for one in lines if one["row"] != "concat"]
    assert study.main(call("b", "--rows", "topk-50", "--minutes", "0")) == 1
    with pytest.raises(SystemExit, match="another recipe"):
        study.main(call("a", "--rows", "concat", "--learning-rate", "0.1"))
    assert study.main(["report", str(tmp_path / "a")]) == 0


def test_the_stem_alone_gives_the_same_features(tmp_path: Path, sets: Sets) -> None:
    write_stem(tmp_path / "stem.pt")
    assert (tmp_path / "stem.pt").stat().st_size < 200_000
    carried = make_sets([1], SIZE, tmp_path / "stem.pt")
    assert torch.equal(carried.features[0], sets.features[0]) and torch.equal(carried.shares[0], sets.shares[0])
    assert json.dumps(carried.pids.tolist()) == json.dumps(sets.pids.tolist())
