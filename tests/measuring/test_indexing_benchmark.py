"""What `benchmarks/index/indexing.py` says of a run: the steady part without reading ahead, and the steps."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.index import indexing
from benchmarks.index.watching import STEPS, Spans, Timed, WatchedLock, steady_window

from seps.photos.indexing.embedding import Preparer
from stores import few_sentences, gallery, model, model_folder


def test_batches_read_ahead_are_no_part_of_the_steady_rate() -> None:
    # The encoder is ready after 10 s; five batches of 32 wait for it, then each takes a second.
    marks = [(10.0 + 0.01 * number, 32 * (number + 1)) for number in range(5)]
    marks += [(11.0 + number, 32 * (number + 6)) for number in range(10)]
    window = steady_window(marks, 5)
    assert window is not None
    start, end, photos = window
    assert photos / (end - start) == pytest.approx(32, rel=0.01)
    assert (start, end, photos) == (pytest.approx(10.04), 20.0, 320)
    assert steady_window(marks[:5], 5) is None and steady_window([], 5) is None  # all were read ahead


def test_steps_are_counted_inside_the_window_alone() -> None:
    spans = Spans()
    spans.all += [("decoding", 0.0, 4.0), ("decoding", 9.0, 20.0), ("embedding", 4.0, 8.0), ("waiting", 4.0, 5.0)]
    spans.all += [("held", 5.0, 7.0), ("levels", 6.5, 7.0), ("writing", 3.0, 3.25)]
    found = spans.steps(2.0, 10.0)
    want = {"decoding": 3.0, "waiting": 1.0, "encoding": 1.5, "levels": 0.5, "packing": 1.0, "writing": 0.25}
    assert {name: found[name] for name in STEPS} == pytest.approx(want)


def test_a_lock_is_held_by_one_at_a_time_and_the_others_wait() -> None:
    spans = Spans()
    lock = WatchedLock(threading.Lock(), spans)

    def work() -> None:
        with lock:
            time.sleep(0.03)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = sorted((start, end) for name, start, end in spans.all if name == "held")
    assert len(held) == 3 and all(left[1] <= right[0] for left, right in pairwise(held))
    waited = spans.seconds("waiting", held[0][0], held[-1][1])
    assert waited > 0.03 and spans.seconds("held", held[0][0], held[-1][1]) >= 0.09
    with pytest.raises(KeyError), WatchedLock(nullcontext(), spans):
        raise KeyError  # an error passes


def test_a_run_is_the_default_call_and_its_figures_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_sentences(monkeypatch)
    folder = gallery(tmp_path / "photos", count=8, described=0)
    batches_of_two = indexing.IndexOptions(batch_size=2)
    monkeypatch.setattr(indexing, "IndexOptions", lambda **_: batches_of_two)
    monkeypatch.setattr(indexing.os, "cpu_count", lambda: 1)  # three batches are read ahead, the fourth is steady
    found = indexing.run(folder, tmp_path / "timed", model(), model_folder(), None, Timed)
    assert (found["photos"], found["workers"], found["device_waits"]) == (8, None, None)
    assert found["starting"] + found["finishing"] < found["seconds"] and found["steady"] > 0
    assert set(found["step_ms"]) == set(STEPS) and min(found["step_ms"].values()) >= 0
    names = {name for name, _, _ in Timed.spans.all}
    assert names == {"decoding", "waiting", "held", "embedding", "levels", "writing"}
    indexing.run(folder, tmp_path / "plain", model(), model_folder(), None, Preparer)
    same = indexing.compared(indexing.rows(tmp_path / "timed"), indexing.rows(tmp_path / "plain"))
    assert same["rows"] == 8 and same["missing"] == same["other_facts"] == same["other_bits"] == 0
    monkeypatch.setattr(indexing, "STORES", False)
    without = indexing.run(folder, tmp_path / "none", model(), model_folder(), None, Timed)
    assert without["store"] is False and without["photos"] == 8 and without["step_ms"]["writing"] == 0
    merged = indexing.merged([found, {**found, "photos_per_second": 3 * found["photos_per_second"]}])
    assert merged["photos_per_second"] == pytest.approx(2 * found["photos_per_second"], abs=1e-3)
    assert merged["first_round"] == pytest.approx(found["photos_per_second"], abs=1e-3)
    assert "decoding" in indexing.told("mini", found)
    assert "too few photos to say" in indexing.told("mini", {**found, "steady": None, "step_ms": None})


def test_a_folder_of_ones_own_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few_sentences(monkeypatch)
    out = tmp_path / "out.json"
    options = ["--models", "tiny", "--ray-model", "tiny", "--workers", "--rounds", "1", "--device", "cpu"]
    monkeypatch.setattr(indexing, "from_pretrained", lambda name, device=None: model())
    monkeypatch.setattr(sys, "argv", ["indexing", *options, "--folder", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit):
        indexing.main()
    assert "*.jpg" in capsys.readouterr().err
    indexing.make_photos(tmp_path / "photos", 3)
    indexing.main()
    facts = json.loads(out.read_text())
    assert facts["rows"][0]["photos"] == 3 and facts["side"] is None and facts["encoder_alone"] == {"tiny": None}
    made = [path.read_bytes() for path in sorted((tmp_path / "photos").iterdir())]
    assert len(set(made)) == 3
