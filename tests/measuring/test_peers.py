"""Plain MaxSim beside our scorer in `benchmarks.speed.defaults`: computed right, optional, never in the way."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.speed import defaults, peers
from torch import Tensor


class Kept:
    """Keeps lines and rows."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, told: str, **row: Any) -> None:
        self.told.append(told)
        self.rows += [row] if row else []


def inputs(images: int = 5, captions: int = 7) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    return {
        "img_embs": torch.randn(images, 45, 16, generator=draw),
        "cap_embs": torch.randn(captions, 6, 16, generator=draw),
        "cap_lens": torch.randint(1, 7, (captions,), generator=draw),
    }


@pytest.mark.parametrize("workspace", [1, 2**30])
def test_maxsim_of_torch_is_that_of_the_slow_loop(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WORKSPACE", workspace)  # one caption at a time, or all
    data = inputs()
    images, words, lengths = data["img_embs"], data["cap_embs"], data["cap_lens"]
    slow = torch.tensor(
        [
            [sum(max(float(w @ t) for t in image) for w in caption[:length]) for image in images]
            for caption, length in zip(words, lengths.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(peers.torch_maxsim(images, words, lengths), slow, atol=1e-5, rtol=0)


def test_a_package_that_is_absent_or_fails_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    kept = Kept()
    peers.measure(inputs(), torch.device("cpu"), kept)
    assert [line for line in kept.told if "installed" in line] == kept.told[:2]
    assert [(row["package"], row["tokens"]) for row in kept.rows] == [("torch", 45), ("torch", 41)]
    assert all(0 < row["largest_difference"] < 5e-3 and row["seconds"] > 0 for row in kept.rows)

    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(peers, "peers", lambda *_: iter([("a 1", "a", broken, None), ("b 2", "b", zeros, None)]))
    kept = Kept()
    peers.measure(inputs(), torch.device("cpu"), kept)
    assert "out of resources" in kept.told[0] and [row["peer"] for row in kept.rows] == ["b 2", "b 2"]
    assert kept.rows[0]["largest_difference"] > 0.1  # wrong scores are seen


def zeros(images: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    return torch.zeros(len(words), len(images))


def test_what_takes_too_long_is_timed_on_a_part_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counting(images: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
        asked.append(len(words))
        return zeros(images, words, lengths)

    monkeypatch.setattr(peers, "TRIAL", 4)
    monkeypatch.setattr(peers, "peers", lambda *_: iter([("a 1", "a", counting, None)]))
    monkeypatch.setattr(peers, "clock", lambda work, *_, **__: (work(), asked[-1] / 10)[1])
    data = inputs(captions=80)
    kept = Kept()
    peers.measure(data, torch.device("cpu"), kept)
    assert asked[:4] == [4, 4, 8, 80] and kept.rows[0]["seconds"] == pytest.approx(8.0)
    assert kept.rows[0]["captions_timed"] == 80
    monkeypatch.setattr(peers, "LONGEST", 7.9)
    asked.clear()
    kept = Kept()
    peers.measure(data, torch.device("cpu"), kept)
    assert asked[:3] == [4, 4, 8] and 80 not in asked
    assert kept.rows[0]["seconds"] == pytest.approx(8.0) and kept.rows[0]["captions_timed"] == 8
    assert "timed on 8 captions" in kept.told[0]


def test_sizes_of_kernels_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = types.SimpleNamespace(cache={"key": 1}, cache_results=True)
    other = types.SimpleNamespace(cache={"key": 1})
    module = types.ModuleType("kernels_of_a_peer")
    module.tuned, module.other = tuned, other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels_of_a_peer", module)
    peers.forget_sizes("kernels_of_a_peer")
    assert (tuned.cache, tuned.cache_results, other.cache) == ({}, False, {"key": 1})


def test_parts_run_alone_or_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(defaults, "CALLS", {"half": {"precision": "half"}, "factored float32": {"backend": "factored"}})

    def kinds(*options: str) -> list[str]:
        out = tmp_path / "rows.jsonl"
        out.unlink(missing_ok=True)
        few = ["--device", "cpu", "--images", "2", "--captions", "3", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["defaults", *few, *options])
        defaults.main()
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return [row.get("call") or row["package"] for row in rows if "call" in row or "peer" in row]

    pairs = [f"{kind} against factored float32, all pairs" for kind in ("float32", "half")]
    assert kinds("--only", "pairs") == pairs
    assert kinds("--skip", "pairs", "peers") == ["half", "factored float32"]
    assert kinds("--skip", "factored") == ["half", "torch", "torch"]
    assert kinds("--only", "calls", "pairs", "--skip", "half") == ["factored float32", *pairs]
