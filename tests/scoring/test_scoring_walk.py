"""The files that one call of `score_matrix` passes: few, and each calls only those after it.

Somebody who follows a score through the code reads these files, from the first to the last, and never goes back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import seps.scoring
from scoring_cases import SMALL, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.scoring import score_matrix

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import walk

WALK = ("api.py", "blocks.py", "difference.py", "terms.py", "inputs.py")
"""In the order of calls: a file calls the ones after it."""
ROOM = Path(seps.scoring.__file__).parent


def walk_of(call: Callable[[], Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """The files of `scoring` whose functions run in a call, and which of them calls which, in all its threads."""
    files: set[str] = set()
    calls: set[tuple[str, str]] = set()

    def file_of(frame: FrameType | None) -> str | None:
        path = Path(frame.f_code.co_filename) if frame is not None else Path()
        return path.relative_to(ROOM).as_posix() if path.is_relative_to(ROOM) else None

    def look(frame: FrameType, event: str, _: object) -> None:
        here = file_of(frame)
        if event != "call" or here is None:
            return
        files.add(here)
        caller = frame.f_back
        while caller is not None and file_of(caller) is None:
            caller = caller.f_back
        before = file_of(caller)
        if before not in (None, here):
            calls.add((str(before), here))

    before_us = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before_us)
        threading.setprofile(None)
    return files, calls


def scores(images: int = 20, texts: int = 150, spread: float = 1.0, described: bool = False, **options: Any) -> None:
    """A call with the default network, lengths given."""
    config = SlimmingConfig.default(**SMALL)
    data = make_inputs(config, images=images, texts=texts, words=9)
    own = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]} if described else {}
    score_matrix(make_net(config, spread=spread), data["images"], data["words"], data["lengths"], **own, **options)


def test_a_default_call_passes_five_files_and_each_calls_only_those_after_it() -> None:
    files, calls = walk_of(scores)
    assert sorted(files) == sorted(WALK)
    backwards = [pair for pair in calls if WALK.index(pair[0]) > WALK.index(pair[1])]
    assert not backwards


@pytest.mark.parametrize(
    "options",
    [
        {"described": True},
        {"texts": 3},  # the direct form
        {"spread": 6.0},  # both forms
        {"topk": 3},
        {"memory": 200_000},
    ],
)
def test_no_option_leads_to_another_file(options: dict[str, Any]) -> None:
    assert walk_of(lambda: scores(**options))[0] <= set(WALK)


@pytest.mark.parametrize(("name", "most"), [("score_matrix", 98), ("forward", 41)])
@pytest.mark.parametrize("preset", ["default", "open_source", "paper"])
def test_a_score_passes_few_functions(name: str, most: int, preset: str) -> None:
    functions = walk.scoring(name, preset)
    assert "method/network.py" in functions
    assert sum(map(len, functions.values())) <= most


def test_other_precisions_take_the_factored_form() -> None:
    assert walk_of(lambda: scores(precision="bfloat16"))[0] <= {*WALK, "factored.py"}


def test_the_threads_of_a_call_pass_the_same_files() -> None:
    torch.set_num_threads(2)
    try:
        files, _ = walk_of(scores)
    finally:
        torch.set_num_threads(1)
    assert sorted(files) == sorted(WALK)


def test_the_published_pairing_adds_its_own_file() -> None:
    config = SlimmingConfig.open_source(**SMALL)
    data, net = make_inputs(config), make_net(config)
    paired = {"paired_dense": data["paired"], "paired_dense_lengths": data["paired_lengths"]}
    files, _ = walk_of(lambda: score_matrix(net, data["images"], data["words"], data["lengths"], **paired))
    assert {*WALK, "pairing.py"} <= files <= {*WALK, "pairing.py", "factored.py"}
