"""The self test of the single file: its figures, and that it fails when the file is changed."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.modules import selftest
from seps.modules.selftest import self_test
from single_files import execute, text_of


def run_file(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "seps_modules.py").write_text(text, encoding="utf-8")
    alone = "import sys, runpy; sys.modules['seps'] = None; runpy.run_path('seps_modules.py', run_name='__main__')"
    return subprocess.run([sys.executable, "-W", "error", "-c", alone], cwd=folder, capture_output=True, text=True)


def test_the_file_passes_its_own_test(tmp_path: Path) -> None:
    """As a program and without a warning; tests/modules/test_single_file_alone.py runs all four."""
    done = run_file(tmp_path, text_of("annotated-en"))
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("device ", "291 parameters", "1198 parameters", "(2, 2, 16)", "128 -> 64 -> 25 + 1", "12 of 12"):
        assert part in done.stdout


CHANGES = [
    ("code network", "F.leaky_relu(rows, 0.1)", "F.leaky_relu(rows, 0.2)"),
    ("code network", '"code": [0, 1, 2, 3, 9,', '"code": [0, 1, 2, 3, 8,'),
    ("code training", "float_apply(self.weight, x) * self", "float_apply(self.weight, x).detach() * self"),
    ("paper network", "weight.copy_(0.5 *", "weight.copy_(0.501 *"),
    ("paper network", '"paper": 1198', '"paper": 1199'),
    ("paper network", "tuple(torch.stack(decisions) for", "tuple(torch.stack(decisions)[..., 1:] for"),
    ("paper training", "return pooled + float_apply(self", "return pooled + math.nan * float_apply(self"),
    (
        "sensors",
        "int(num_patches * aggr_ratio * sparse_ratio)\n            self",
        "int(num_patches * aggr_ratio)\n            self",
    ),
    ("loss", "0.86753416", "0.87753416"),
    ("network gumbel", "return hard + (soft - soft.detach())", "return hard"),
    ("sensors gumbel", 'decision or ("relaxed" if use_gumbel else "topk")', 'decision or "topk"'),
    ("gumbel", 'if use_gumbel and self.decision == "topk"', "if False"),
    ("network gumbel", 'decision = "relaxed" if use_gumbel_softmax else "topk"', 'decision = "topk"'),
    ("relaxation", "slope = probability * (1 - probability)", "slope = probability"),
    ("relaxation", "slope = (keep * leave).sum", "slope = keep.sum"),
    ("relaxation", "+ (share * (logits - logits.detach())).sum(dim=-1, keepdim=True)", ""),
    ("paper selection", '{"image": 2 * beta,', '{"image": beta,'),
    ("code selection", 'combine_scores(given, {"image": 1.0,', 'combine_scores(given, {"image": 0.5,'),
    ("sensors", "self.own_guide * self.beta if", "self.own_guide / 2 * self.beta if"),
    ("sensors", "self.predictor_weight = 1 - (len(modalities) - 1) * beta", "self.predictor_weight = 1.0"),
    ("sensors", "[merged, extra_token(own, scores, keep)]", "[merged, 0 * extra_token(own, scores, keep)]"),
]


@pytest.mark.parametrize(("name", "before", "after"), CHANGES)
def test_a_changed_file_fails(monkeypatch: pytest.MonkeyPatch, name: str, before: str, after: str) -> None:
    """Of the annotated file; `test_a_broken_number_fails_in_every_file` breaks the others."""
    text = text_of("annotated-en")
    assert text.count(before) == 1
    monkeypatch.setitem(sys.modules, "seps_modules_changed", None)  # taken out again afterwards
    changed = execute(text.replace(before, after), "seps_modules_changed")
    told: list[str] = []
    assert changed.self_test(told.append) == 1
    assert name in {line.split(": ")[0].removeprefix("FAILED  ") for line in told if line.startswith("FAILED")}


def test_the_package_passes() -> None:
    told: list[str] = []
    assert self_test(told.append) == 0, told


@pytest.mark.parametrize("mode", ["code", "paper"])
def test_figures_agree_with_a_plain_computation(mode: str) -> None:
    """Image by image and text by text in float64, from the equations."""
    net = copy.deepcopy(selftest._tiny_net(mode)).double()
    images, captions, lengths, descriptions, dense_lengths = selftest._tiny_batch()
    found = [
        [
            pair_similarity(net, mode == "paper", image, caption[:m], dense[:n])
            for caption, m, dense, n in zip(
                captions.double(), lengths.tolist(), descriptions.double(), dense_lengths.tolist(), strict=True
            )
        ]
        for image in images.double()
    ]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(selftest._SIMILARITY[mode]), rtol=0, atol=2e-6)


def pair_similarity(net, paper: bool, image: Tensor, words: Tensor, dense: Tensor) -> float:
    cls, patches = image[:1], image[1:]
    fit = {
        name: F.cosine_similarity(patches, vector.mean(dim=0)[None])
        for name, vector in (("image", patches), ("caption", words), ("dense", dense))
    }
    if paper:
        fit = {name: (a - a.min()) / (a.max() - a.min() + 1e-8) for name, a in fit.items()}
    merged, extra = {}, {}
    for branch in ("caption", "dense"):
        sparse = net.sparse_net_cap if branch == "caption" else net.sparse_net_long
        if paper:
            predicted = sparse.score_predictor(patches)[:, 0]
            score = 0.5 * predicted + 0.25 * (fit["caption"] + fit["dense"] + 2 * fit["image"])
            mlp = net.aggr_net.weight_sparse if branch == "caption" else net.aggr_net.weight_dense
        else:
            score, mlp = fit["image"] + fit[branch], net.aggr_net.weight
        order = score.argsort(descending=True)
        # A figure that hangs on a tie would not be the same on every machine.
        assert float((score[order[7]] - score[order[8]]).detach()) > 1e-4
        kept, dropped = order[:8], order[8:]
        weights = (mlp(patches[kept]) * net.aggr_net.scale[0, 0, 0]).softmax(dim=0)
        merged[branch] = weights.T @ patches[kept]
        extra[branch] = (score[dropped].softmax(dim=0) @ patches[dropped])[None]
    if paper:
        tokens = [cls, merged["caption"] + merged["dense"], (extra["caption"] + extra["dense"]) / 2]
        return aligned(net, paper, words, torch.cat(tokens))
    return sum(
        aligned(net, paper, own, torch.cat([cls, merged[branch], extra[branch]]))
        for branch, own in (("caption", words), ("dense", dense))
    )


def aligned(net, paper: bool, words: Tensor, tokens: Tensor) -> float:
    cosines = F.normalize(words, dim=-1) @ F.normalize(tokens, dim=-1).T
    if not paper:
        cosines = torch.where(cosines < 0, 0.1 * cosines, cosines)
    total = 0.0
    for best in (cosines.max(dim=1).values, cosines.max(dim=0).values):
        total += best.mean().item()
        if paper:
            top = best.sort(descending=True).values[:5]
            total += net.hrpa.relevance_mlp(F.pad(top, (0, 5 - len(top)))).item()
    return total


def trace(rows: Tensor) -> list[float]:
    weights = selftest._pattern(9.0, rows[0].numel()).double()
    return [float(row.detach().flatten() @ weights) / row.numel() for row in rows]


def selected(patches: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept patches, best first, the extra token and D of one image that keeps half of its patches."""
    order = score.argsort(descending=True)
    half = len(order) // 2
    assert float((score[order[half - 1]] - score[order[half]]).detach()) > 1e-5
    weights = score[order[half:]].softmax(dim=0)
    decision = torch.zeros_like(score)
    decision[order[:half]] = 1.0
    return patches[order[:half]], (weights @ patches[order[half:]])[None], decision


def scaled(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min() + 1e-8)


@pytest.mark.parametrize("mode", ["code", "paper"])
def test_the_selection_agrees_with_a_plain_computation(mode: str) -> None:
    net, inputs = selftest._tiny_selection(mode)
    patches, own, caption, dense = (tensor[0].double() for tensor in inputs)
    score = own + caption
    if mode == "paper":
        predicted = copy.deepcopy(net).double().score_predictor(patches)[:, 0]
        score = 0.5 * predicted + 0.25 * (scaled(caption) + scaled(dense) + 2 * scaled(own))
    found = [trace(part[None])[0] for part in selected(patches, score)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(selftest._SELECTED[mode]), rtol=0, atol=1e-6)


def test_the_sensors_agree_with_a_plain_computation() -> None:
    net = selftest._tiny_sensors().double()
    shots = [tensor.double() for tensor in selftest._tiny_shots()]
    for place, (name, expected) in enumerate(zip(net.modalities, selftest._SENSORS, strict=True)):
        select, merge = getattr(net, f"{name}_sparse"), getattr(net, f"{name}_aggr")
        tokens = []
        for sample, patches in enumerate(shots[place]):
            fit = [scaled(F.cosine_similarity(patches, vectors[sample][None])) for vectors in shots[3:]]
            score = 0.5 * select.score_predictor(patches)[:, 0] + 0.25 * (sum(fit) + fit[place])
            kept, extra, _ = selected(patches, score)
            weights = (merge.weight(kept) * merge.scale[0, 0, 0]).softmax(dim=0)
            tokens.append(torch.cat([weights.T @ kept, extra]))
        torch.testing.assert_close(torch.tensor(trace(torch.stack(tokens))), torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_relaxation_agrees_with_a_plain_computation() -> None:
    """theta by halving; the gradient by moving each logit a little."""

    def relaxed(logits: Tensor, count: float) -> Tensor:
        low, high = logits.min() - 40, logits.max() + 40
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if float(torch.sigmoid((logits - middle) / 0.7).sum()) > count else (low, middle)
        return torch.sigmoid((logits - low) / 0.7)

    step, rows = 1e-4, []
    for logits, count in zip(3 * selftest._pattern(1.0, 2, 10).double(), (3.0, 6.0), strict=True):
        ends = [
            [trace(relaxed(logits + sign * move, count)[None])[0] for sign in (1, -1)] for move in step * torch.eye(10)
        ]
        slope = torch.tensor([[(up - down) / (2 * step) for up, down in ends]], dtype=torch.float64)
        rows.append([trace(relaxed(logits, count)[None])[0], trace(slope)[0]])
    torch.testing.assert_close(torch.tensor(rows).T, torch.tensor(selftest._RELAXED), rtol=0, atol=2e-6)


def test_loss_and_counts_are_those_of_the_golden_files(golden) -> None:
    data = golden("dual_mode_code")
    torch.testing.assert_close(torch.tensor(selftest._MEASURED), data["sims"][:5, :5], rtol=0, atol=1e-7)
    assert math.isclose(selftest._MEASURED_LOSS, float(data["loss_a"][1]), abs_tol=1e-6)
    for mode in ("code", "paper"):
        assert selftest._PARAMETERS[mode] == golden(f"dual_mode_{mode}").settings["parameters"]
